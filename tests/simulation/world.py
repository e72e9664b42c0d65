"""One world: servers, instances, clients and faults, all drawn from one seed, and what must hold.

- **No wrong bytes.** Every forward pass checks all KV before its own; answers are checked, and at
  the end every value in Redis that no fault has damaged.
- **No request is lost**, whatever Redis does; each ends with the right tokens.
- **No wait past its deadline**: of a load, of a read, of a call inside an engine step.
- **At rest all agree**: index, memory, owners, pins, and what routers were told; see `at_rest`.
- **Nothing stays in Redis** for ever that should not.
- **Nothing leaks**: blocks, jobs, CPU memory, threads, connections.
- **Liveness**: once faults are over, hits from Redis come back within a bound, and so do values
  that were lost or spoiled; see `recovery`.
"""

from __future__ import annotations

import gc
import logging
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch

from lmcache_connector.config import limits
from tests.simulation import faults, stdlib
from tests.simulation.instance import Instance
from tests.simulation.kernel import Kernel, SimulationFailure
from tests.simulation.ledger import Ledger
from tests.simulation.network import Network
from tests.simulation.plan import Client, deploy, draw_plan
from tests.simulation.rank import PEER_PORT, Weights
from tests.simulation.recovery import Recovery
from tests.simulation.stdlib import RUNTIME

_MAX_SECONDS = 1200.0  # of one world, simulated
_START_SECONDS = 30.0
_REQUEST_SECONDS = 90.0
_STOP_SECONDS = 20.0


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
    """Run the world of ``seed``. ``trace`` gets one line for each thing that happens.

    Collects no garbage: that would happen at moments that no seed decides. A world leaves some MiB.
    Digests of weights that another world or process has kept would change the course of events too,
    so each world has a folder of its own for them. vLLM goes on using the user's.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(patch.object(limits, "user_cache_folder", lambda: folder))
        return _run_world(seed, model, trace)


def _run_world(seed: int, model: Path, trace: Callable[[str], None] | None) -> Report:
    gc.disable()
    kernel = Kernel(seed, trace=trace)
    torch.manual_seed(seed)  # probes and self-tests store random numbers, which may be compressed
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


class World:
    def __init__(self, kernel: Kernel, network: Network, model: Path) -> None:
        self.kernel = kernel
        self.counts: Counter[str] = Counter()
        self.instances: list[Instance] = []
        self._model = model
        self._outside = kernel.new_process("outside")
        self._deployment = deploy(kernel, network)
        self._ledger = Ledger(self._deployment)
        self._plan = draw_plan(kernel, self._deployment)
        self.director = kernel.spawn(self._outside, self._direct, "director")

    # -- the course of events ----------------------------------------------------------------------

    def _direct(self) -> None:
        kernel, plan = self.kernel, self._plan
        for role in plan.roles:
            self._start_instance(role)
        self._wait(lambda: all(i.is_up for i in self.instances), _START_SECONDS, "START")
        threads = [self._thread(partial(self._be_client, client)) for client in plan.clients]
        chance = kernel.chance
        threads += [self._thread(self._be_trouble) for _ in range(chance.randrange(5))]
        if plan.shape.peers:
            threads += [self._thread(self._be_peer_trouble) for _ in range(chance.randrange(4))]
        threads.append(self._thread(self._be_short_of_memory))
        if kernel.chance.random() < 0.2:
            threads.append(self._thread(self._be_crash))
        threads += [self._thread(self._be_trainer) for _ in range(plan.resets)]
        for thread in threads:
            thread.join()
        self.kernel.trace("faults are over")
        self._check_liveness()
        self._check_end()

    def _start_instance(self, role: str) -> Instance:
        process = self.kernel.new_process(f"instance{len(self.instances)}")
        process.num_cores = self.kernel.chance.choice([2, 4])
        shape, url = replace(self._plan.shape, role=role), self._deployment.url
        weights, names = Weights(), self._ledger.name
        instance = Instance(self.kernel, process, self._model, shape, url, names, weights)
        self.instances.append(instance)
        return instance

    def _be_client(self, client: Client) -> None:
        self.kernel.sleep(client.start)
        chance, alive = self.kernel.chance, self._alive
        if self._plan.shape.peers and len(alive) > 1 and chance.random() < 0.5:
            self._hand_over(client, chance.sample(alive, min(len(alive), chance.choice([2, 3]))))
        else:
            self._ask(chance.choice(alive), client)

    def _hand_over(self, client: Client, instances: list[Instance]) -> None:
        """The first computes the prompt, the others load it from there, as a router asks them."""
        first, second = (instance.process.name for instance in instances[:2])
        self.counts["requests"] += 1
        name = f"___prefill_addr_{first}:{PEER_PORT}___decode_addr_{second}:{PEER_PORT}"
        name = f"{name}_r{self.counts['requests']}"
        asked = [(instances[0], replace(client, max_tokens=1), name), (instances[1], client, name)]
        source = {"remote_host": first, "remote_port": PEER_PORT, "remote_request_id": name}
        hints = {**(client.hints or {}), "do_remote_prefill": True, **source}
        asked += [(each, replace(client, hints=hints), "") for each in instances[2:]]
        threads = [self._thread(partial(self._ask, *each)) for each in asked]
        for thread in threads:
            thread.join()

    def _ask(self, instance: Instance, client: Client, name: str = "") -> None:
        """Wait for the answer."""
        kernel = self.kernel
        self.counts["requests"] += 1
        name, abort_after = name or f"r{self.counts['requests']}", client.abort_after
        asked = instance.ask(name, client.prompt, client.max_tokens, client.salt, client.hints)
        if abort_after is not None and not asked.ended.wait(abort_after):
            instance.abort(asked)
            self.counts["aborts"] += 1
        until = kernel.now + _REQUEST_SECONDS
        while not asked.ended.wait(1.0):
            if not instance.process.alive:
                return
            if kernel.now > until:
                raise SimulationFailure(f"REQUEST LOST: {asked.request.request_id}")

    def _ask_for(self, instance: Instance, prompt: tuple[int, ...], max_tokens: int) -> None:
        self._ask(instance, Client(prompt, max_tokens))

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

    def _be_peer_trouble(self) -> None:
        """On the way to one rank's peer server; or its whole instance stands still."""
        kernel, chance = self.kernel, self.kernel.chance
        kernel.sleep(chance.uniform(0.0, 2.0))
        process, seconds = chance.choice(self._alive).process, chance.choice([0.02, 0.2, 1.0])
        if chance.random() < 0.3:
            kernel.trace(f"{process.name} stands still")
            self.counts["frozen"] += 1
            kernel.freeze(process, seconds)
            return
        fault = chance.choice(faults.ON_PATHS)()
        address = process.name, PEER_PORT + chance.randrange(self._plan.shape.world_size)
        kernel.trace(f"{type(fault).__name__} begins on the way to {address}")
        fault.begin(self._deployment, faults.At(address))
        kernel.sleep(seconds)
        fault.end(self._deployment, faults.At(address))

    def _be_short_of_memory(self) -> None:
        """What memory holds is forgotten now and then, so that the tiers are asked."""
        chance = self.kernel.chance
        for _ in range(chance.randrange(12)):
            self.kernel.sleep(chance.uniform(0.0, 0.5))
            instance = chance.choice(self._alive)
            chance.choice([instance.evict_all, instance.evict_blocks])()

    def _be_trainer(self) -> None:
        """Some instance gets new weights, or the same again."""
        chance = self.kernel.chance
        self.kernel.sleep(chance.uniform(0.2, 2.5))
        instance = chance.choice(self._alive)
        before = instance.num_resets
        instance.load_weights(chance.randrange(3))
        while instance.process.alive and instance.num_resets == before:
            self.kernel.sleep(0.01)
        self.counts["resets"] += instance.num_resets - before

    def _be_crash(self) -> None:
        kernel = self.kernel
        kernel.sleep(kernel.chance.uniform(0.0, 2.0))
        victim = kernel.chance.choice(self._alive)
        kernel.trace(f"{victim.process.name} crashes")
        self.counts["crashes"] += 1
        successor = self._start_instance(victim.shape.role)
        self._wait(lambda: successor.is_up, _START_SECONDS, "START")
        kernel.kill(victim.process)

    @property
    def _alive(self) -> list[Instance]:
        return [i for i in self.instances if i.process.alive and i.is_up]

    # -- what must hold -----------------------------------------------------------------------

    def _check_liveness(self) -> None:
        """Check one thing that must recover, at an instance that lived through the faults or a new
        one. To check all of them would take longer than the rest of a world."""
        chance = self.kernel.chance
        writer = chance.choice([i for i in self._alive if i.shape.role != "kv_consumer"])
        reader = writer if writer.shape.role == "kv_both" else self._consumers[0]
        if self._plan.resets and reader is not writer:
            return  # whether they have the same weights is another question
        recovery = Recovery(self.kernel, self._deployment, self._ledger, self._ask_for, self.counts)
        prompt = (*chance.choice(self._plan.families), 1, 2, 3)
        ending = chance.random()
        if self._deployment.slow is not None:  # what loads slowly may be recomputed
            if not writer.num_resets:  # the ledger knows no chunk of other weights by its prompt
                recovery.writes_go_on(writer)
            return
        if ending < 0.4 and not self._plan.resets:
            reader = self._start_instance(reader.shape.role)
            self._wait(lambda: reader.is_up, _START_SECONDS, "START")
        # Without a fixed lifetime, a value that only a consumer finds damaged stays.
        lifetime_ends = not self._plan.shape.settings.get("redis_ttl_refresh", True)
        if reader.shape.role == "kv_consumer" and not lifetime_ends:
            recovery.remove_unsound(prompt)
        recovery.hits(reader, writer, prompt)
        if writer.num_resets:
            return  # nobody asks for what it has in memory from before
        elif ending > 0.9:
            recovery.offers(writer, prompt)
        # Who reads a spoiled value writes it anew, if it writes at all; with peers nobody needs to.
        elif ending > 0.7 and reader.shape.role == "kv_both" and not self._plan.shape.peers:
            recovery.names(reader, writer, prompt)

    @property
    def _consumers(self) -> list[Instance]:
        return [i for i in self._alive if i.shape.role == "kv_consumer"]

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
            self.counts["pinned"] += instance.at_rest.num_pinned
            self.counts.update(instance.counts)
        processes = {instance.process for instance in alive}
        links = [link for link in RUNTIME.network.open_links() if link.process in processes]
        if links:
            raise SimulationFailure(f"CONNECTIONS LEAKED: {[link.address for link in links]}")
        have_ttl = "redis_ttl_seconds" in self._plan.shape.settings
        self.counts["values checked"] += self._ledger.check(have_ttl=have_ttl)

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
