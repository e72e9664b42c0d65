"""One world: servers, instances, clients and faults, all drawn from one seed, and what must hold.

- **No wrong bytes.** Every forward pass checks all KV before its own; answers are checked, and at
  the end every value in Redis that no fault has damaged.
- **No request is lost**, whatever Redis does; each ends with the right tokens.
- **No wait past its deadline**: of a load, of a read, of a call inside an engine step.
- **Nothing leaks**: blocks, jobs, CPU memory, threads, connections.
- **Liveness**: once faults are over, hits from Redis come back within a bound.
"""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from lmcache_connector.storage.redis.value_names import parse_value_name
from tests.simulation import faults, stdlib
from tests.simulation.faults import Deployment
from tests.simulation.instance import (
    CHUNK_SIZE,
    VOCABULARY,
    WIDTH,
    Instance,
    Shape,
)
from tests.simulation.kernel import Kernel, SimulationFailure
from tests.simulation.kv_memory import cells_of, payload
from tests.simulation.network import Network
from tests.simulation.redis_model import Cluster, RedisModel
from tests.simulation.stdlib import RUNTIME

_HEADER_BYTES = 128
_MAX_SECONDS = 1200.0  # of one world, simulated
_START_SECONDS = 30.0
_REQUEST_SECONDS = 90.0
_RECOVERY_SECONDS = 90.0
_STOP_SECONDS = 20.0
_COLLECT_EVERY = 20  # seeds


@dataclass(frozen=True, slots=True)
class Report:
    """What came of a seed. ``digest`` is the same for the same course of events. ``counts``: what
    happened, to show that a world was worth running."""

    seed: int
    failures: tuple[str, ...]
    digest: str
    seconds: float
    counts: Counter[str]


def run_world(seed: int, model: Path, trace: Callable[[str], None] | None = None) -> Report:
    """Run the world of ``seed``. ``trace`` gets one line for each thing that happens."""
    gc.disable()  # it would run at moments that no seed decides
    kernel = Kernel(seed, trace=trace)
    handler = _ExceptionHandler(kernel)
    logging.getLogger("lmcache_connector").addHandler(handler)
    try:
        RUNTIME.kernel, RUNTIME.network = kernel, Network(kernel)
        world = World(kernel, RUNTIME.network, model)
        if not kernel.run(lambda: world.director.is_done, _MAX_SECONDS):
            kernel.fail(f"the world came to no end: {kernel.describe_tasks()}")
        digest = f"{kernel.num_switches}-{kernel.now:.9f}-{kernel.chance.random():.9f}"
        kernel.close()
    finally:
        logging.getLogger("lmcache_connector").removeHandler(handler)
        gc.enable()
        if seed % _COLLECT_EVERY == 0:
            gc.collect()
    return Report(seed, tuple(kernel.failures), digest, kernel.now, world.counts)


class _ExceptionHandler(logging.Handler):
    """An exception that the product logs and survives is still one that nobody expected."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self._kernel = kernel

    def emit(self, record: logging.LogRecord) -> None:
        self._kernel.trace(f"log: {record.getMessage()}")
        if record.exc_info:
            text = logging.Formatter().formatException(record.exc_info)
            self._kernel.fail(f"logged: {record.getMessage()}\n{text}")


@dataclass
class _Client:
    """Asks for one prompt of a family, on some instance."""

    start: float
    prompt: tuple[int, ...]
    max_tokens: int
    abort_after: float | None


@dataclass
class _Plan:
    """Drawn from the seed before anything happens."""

    shape: Shape
    num_instances: int
    families: list[tuple[int, ...]]
    clients: list[_Client] = field(default_factory=list)


class World:
    def __init__(self, kernel: Kernel, network: Network, model: Path) -> None:
        self.kernel = kernel
        self.counts: Counter[str] = Counter()
        self.instances: list[Instance] = []
        self._model = model
        self._cells_of_key: dict[bytes, tuple[int, ...]] = {}
        self._outside = kernel.new_process("outside")
        self._deployment = _deploy(kernel, network)
        self._plan = _draw_plan(kernel)
        self.director = kernel.spawn(self._outside, self._direct, "director")

    # -- the course of events ----------------------------------------------------------------------

    def _direct(self) -> None:
        kernel, plan = self.kernel, self._plan
        for _ in range(plan.num_instances):
            self._start_instance()
        self._wait(lambda: all(i.is_up for i in self.instances), _START_SECONDS, "START")
        threads = [self._thread(partial(self._be_client, client)) for client in plan.clients]
        threads += [self._thread(self._be_trouble) for _ in range(kernel.chance.randrange(5))]
        threads.append(self._thread(self._be_short_of_memory))
        if kernel.chance.random() < 0.2:
            threads.append(self._thread(self._be_crash))
        for thread in threads:
            thread.join()
        self.kernel.trace("faults are over")
        self._check_liveness()
        self._check_end()

    def _start_instance(self) -> Instance:
        process = self.kernel.new_process(f"instance{len(self.instances)}")
        process.num_cores = self.kernel.chance.choice([2, 4])
        instance = Instance(
            self.kernel, process, self._model, self._plan.shape, self._deployment.url, self._name
        )
        self.instances.append(instance)
        return instance

    def _be_client(self, client: _Client) -> None:
        self.kernel.sleep(client.start)
        self._ask(self.kernel.chance.choice(self._alive), client)

    def _ask(self, instance: Instance, client: _Client) -> None:
        kernel = self.kernel
        self.counts["requests"] += 1
        asked = instance.ask(f"r{self.counts['requests']}", client.prompt, client.max_tokens)
        if client.abort_after is not None and not asked.ended.wait(client.abort_after):
            instance.abort(asked)
            self.counts["aborts"] += 1
        until = kernel.now + _REQUEST_SECONDS
        while not asked.ended.wait(1.0):
            if not instance.process.alive:
                return
            if kernel.now > until:
                raise SimulationFailure(f"REQUEST LOST: {asked.request.request_id}")

    def _be_trouble(self) -> None:
        kernel, deployment = self.kernel, self._deployment
        kernel.sleep(kernel.chance.uniform(0.0, 2.0))
        fault = kernel.chance.choice(faults.ALL)()
        server = kernel.chance.choice(deployment.servers)
        kernel.trace(f"{type(fault).__name__} begins on {server.address[0]}")
        self.counts[type(fault).__name__] += 1
        fault.begin(deployment, server)
        kernel.sleep(kernel.chance.choice([0.01, 0.1, 0.5, 2.0]) * kernel.chance.uniform(0.5, 1.5))
        fault.end(deployment, server)
        kernel.trace(f"{type(fault).__name__} ends")

    def _be_short_of_memory(self) -> None:
        """What memory holds is forgotten now and then, so that Redis is asked."""
        for _ in range(self.kernel.chance.randrange(12)):
            self.kernel.sleep(self.kernel.chance.uniform(0.0, 0.5))
            self.kernel.chance.choice(self._alive).evict_all()

    def _be_crash(self) -> None:
        kernel = self.kernel
        kernel.sleep(kernel.chance.uniform(0.0, 2.0))
        victim = kernel.chance.choice(self._alive)
        kernel.trace(f"{victim.process.name} crashes")
        self.counts["crashes"] += 1
        successor = self._start_instance()
        self._wait(lambda: successor.is_up, _START_SECONDS, "START")
        kernel.kill(victim.process)

    @property
    def _alive(self) -> list[Instance]:
        return [i for i in self.instances if i.process.alive and i.is_up]

    # -- what must hold -----------------------------------------------------------------------

    def _check_liveness(self) -> None:
        """One that lived through the faults, and one that is new, with nothing in memory, find in
        Redis what was asked for before."""
        survivor = self.kernel.chance.choice(self._alive)
        newcomer = self._start_instance()
        self._wait(lambda: newcomer.is_up, _START_SECONDS, "START")
        prompt = (*self.kernel.chance.choice(self._plan.families), 1, 2, 3)
        self._hit_again(survivor, prompt)
        self._hit_again(newcomer, prompt)
        self._offer_again(survivor, prompt)

    def _hit_again(self, instance: Instance, prompt: tuple[int, ...]) -> None:
        kernel, attempts = self.kernel, 0
        until, before = kernel.now + _RECOVERY_SECONDS, instance.num_redis_hits
        while instance.num_redis_hits == before:
            if kernel.now > until:
                raise SimulationFailure(
                    f"NO HIT of {instance.process.name} came back within {_RECOVERY_SECONDS:g} s, "
                    f"in {attempts} attempts"
                )
            if attempts:
                kernel.sleep(1.0)
            instance.evict_all()
            # Any step tells the scheduler side what has left.
            self._ask(instance, _Client(0.0, (1, 2, 3), 1, None))
            self._ask(instance, _Client(0.0, prompt, 2, None))
            attempts += 1
        self.counts["attempts to hit"] += attempts

    def _offer_again(self, instance: Instance, prompt: tuple[int, ...]) -> None:
        """What Redis has lost and one instance holds in memory comes back to Redis, although nobody
        computes it again."""
        kernel = self.kernel
        self._ask(instance, _Client(0.0, prompt, 1, None))
        wanted = self._keys_of(prompt) & instance.keys_in_memory()
        for server in self._deployment.servers:
            server.entries.clear()
        until, pause = kernel.now + _RECOVERY_SECONDS, 0.5
        while missing := wanted - self._keys_in_redis():
            if kernel.now > until:
                raise SimulationFailure(
                    f"NOT OFFERED AGAIN by {instance.process.name} within {_RECOVERY_SECONDS:g} s: "
                    f"{len(missing)} of {len(wanted)} chunks"
                )
            self._ask(instance, _Client(0.0, prompt, 1, None))
            kernel.sleep(pause)
            pause = min(2 * pause, 4.0)
        self.counts["offered again"] += 1

    def _keys_of(self, prompt: tuple[int, ...]) -> set[bytes]:
        cells = cells_of(prompt)
        return {
            key
            for key, held in self._cells_of_key.items()
            if held[-1] in cells and len(held) == CHUNK_SIZE
        }

    def _keys_in_redis(self) -> set[bytes]:
        names = [parse_value_name(n) for s in self._deployment.servers for n in s.names()]
        return {name.key for name in names if name is not None}

    def _check_end(self) -> None:
        kernel, alive = self.kernel, self._alive
        self._wait(lambda: all(i.is_idle for i in alive), _STOP_SECONDS, "IDLE")
        for instance in alive:
            self._wait(instance.is_settled, _STOP_SECONDS, f"SETTLED {instance.process.name}")
            instance.check_whole()
            instance.stop()
        self._wait(lambda: all(i.is_down for i in alive), _STOP_SECONDS, "STOP")
        kernel.sleep(1.0)
        for instance in alive:
            if left := [task for task in instance.process.tasks if not task.is_done]:
                raise SimulationFailure(f"THREADS LEAKED: {left}")
            self.counts["hits from redis"] += instance.num_redis_hits
            self.counts["hits from memory"] += instance.num_cpu_hits
            self.counts["failed loads"] += instance.num_failed_loads
        processes = {instance.process for instance in alive}
        links = [link for link in RUNTIME.network.open_links() if link.process in processes]
        if links:
            raise SimulationFailure(f"CONNECTIONS LEAKED: {[link.address for link in links]}")
        self._check_values()

    def _check_values(self) -> None:
        for server in self._deployment.servers:
            for raw in server.names():
                name, entry = parse_value_name(raw), server.entries[raw]
                cells = self._cells_of_key.get(name.key) if name is not None else None
                if (
                    name is None
                    or cells is None
                    or self._deployment.damaged.get(raw) == entry.value
                ):
                    continue
                self.counts["values checked"] += 1
                layers = range(name.layer_start, name.layer_end)
                if entry.value[_HEADER_BYTES:] != payload(cells, layers, name.shard, WIDTH):
                    raise SimulationFailure(f"WRONG BYTES stored as {raw!r}")

    def _name(self, key: bytes, cells: tuple[int, ...]) -> None:
        if self._cells_of_key.setdefault(key, cells) != cells:
            raise SimulationFailure("WRONG BYTES: one key names two different chunks")

    def _wait(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        until = self.kernel.now + seconds
        while not condition():
            if self.kernel.now > until:
                raise SimulationFailure(
                    f"{what} takes over {seconds:g} s: {self.kernel.describe_tasks()}"
                )
            self.kernel.sleep(0.01)

    def _thread(self, run: Callable[[], None]) -> stdlib.Thread:
        thread = stdlib.Thread(target=run)
        thread.start()
        return thread


def _deploy(kernel: Kernel, network: Network) -> Deployment:
    chance = kernel.chance
    is_cluster = chance.random() < 0.3
    servers = [
        RedisModel(
            kernel,
            network,
            (f"redis{i}", 6379 + i),
            max_bytes=chance.choice([1 << 40, 1 << 20]),
            evicts=True,
        )
        for i in range(3 if is_cluster else 1)
    ]
    if not is_cluster:
        return Deployment(kernel, network, servers, "redis://redis0:6379")
    cluster = Cluster(servers)
    cluster.spread()
    for server in servers:
        server.cluster = cluster
    url = "redis+cluster://" + ",".join(f"{s.address[0]}:{s.address[1]}" for s in servers)
    return Deployment(kernel, network, servers, url, cluster)


def _draw_plan(kernel: Kernel) -> _Plan:
    chance = kernel.chance
    settings = {
        "compute_or_load": chance.choice(["always", "auto"]),
        "redis_timeout_seconds": chance.choice([0.3, 1.0]),
        "load_deadline_seconds": chance.choice([0.3, 2.0]),
        "redis_connections": chance.choice([1, 2]),
    }
    if chance.random() < 0.3:
        settings |= {"redis_ttl_seconds": 8, "redis_ttl_refresh": chance.random() < 0.5}
    if chance.random() < 0.2:
        settings["hash_key"] = "a secret of more than 16 bytes"
    if chance.random() < 0.2:
        settings["redis_admission"] = "reused"
    shape = Shape(
        world_size=chance.choice([1, 1, 2]),
        depth=chance.choice([1, 2]),
        num_blocks=chance.choice([20, 24, 40]),
        cpu_chunks=chance.choice([8, 24]),
        max_batched_tokens=chance.choice([64, 256]),
        token_seconds=chance.choice([0.0002, 0.001]),
        settings=settings,
    )
    families = [_tokens(kernel, chance.randint(64, 200)) for _ in range(chance.choice([2, 3]))]
    rushes = [chance.uniform(0.0, 2.5) for _ in range(4)]
    clients = [
        _Client(
            start=chance.choice(rushes) + chance.uniform(0.0, 0.1),
            prompt=(*chance.choice(families), *_tokens(kernel, chance.randrange(40))),
            max_tokens=chance.choice([1, 1, 2, 2, 3, 40]),
            abort_after=chance.uniform(0.0, 0.5) if chance.random() < 0.15 else None,
        )
        for _ in range(chance.randint(10, 20))
    ]
    return _Plan(shape, chance.choice([1, 2, 2]), families, clients)


def _tokens(kernel: Kernel, count: int) -> tuple[int, ...]:
    return tuple(kernel.chance.randrange(VOCABULARY) for _ in range(count))


assert CHUNK_SIZE * 2 <= 64, "a family has at least two chunks"
