"""What a world is made of, drawn from its seed before anything happens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.simulation.faults import Deployment, RefusingServer
from tests.simulation.instance import VOCABULARY
from tests.simulation.kernel import Kernel
from tests.simulation.network import Network, Path
from tests.simulation.rank import CHUNK_SIZE, NUM_HEADS, PEER_PORT, Shape
from tests.simulation.redis_model import Cluster, RedisModel

MAX_INSTANCES = 6
SLOW_BYTES_PER_SECOND = 1.5e5
"""Slower than instances compute KV, but so fast that no time-out of a second expires."""
_PAIR = ["kv_producer", "kv_consumer"]


@dataclass
class Client:
    """Asks for one prompt of a family, on some instance. ``abort_after``: seconds after which
    nobody wants the answer any more."""

    prompt: tuple[int, ...]
    max_tokens: int
    start: float = 0.0
    abort_after: float | None = None
    salt: str | None = None
    hints: dict[str, Any] | None = None


@dataclass
class Plan:
    """``roles``: one for each instance. ``families``: prompts begin with one of them. ``resets``:
    how often an instance gets new weights, or the same again."""

    shape: Shape
    roles: list[str]
    families: list[tuple[int, ...]]
    clients: list[Client] = field(default_factory=list)
    resets: int = 0


def deploy(kernel: Kernel, network: Network) -> Deployment:
    chance = kernel.chance
    kind = chance.choices(["single", "cluster", "sentinel"], [0.6, 0.3, 0.1])[0]
    servers = [
        RedisModel(
            kernel,
            network,
            (f"redis{i}", 6379 + i),
            password=b"word" if kind == "sentinel" else None,
        )
        for i in range({"single": 1, "cluster": 3, "sentinel": 2}[kind])
    ]
    if kind == "cluster":
        return _cluster(kernel, network, servers)
    if kind == "single":
        return Deployment(kernel, network, servers, "redis://redis0:6379")
    master, replica = servers
    replica.entries, replica.refusal = master.entries, RefusingServer.read_only
    sentinel = RedisModel(kernel, network, ("sentinel0", 26379), master=master)
    url = "redis+sentinel://:word@sentinel0:26379/main"
    return Deployment(kernel, network, servers, url, sentinel=sentinel)


def _cluster(kernel: Kernel, network: Network, servers: list[RedisModel]) -> Deployment:
    chance, url = kernel.chance, "redis+cluster://"
    url += ",".join(f"{server.address[0]}:{server.address[1]}" for server in servers)
    odd = chance.choice([None, None, "old slot map", "slow node"])
    members = servers[1:] if odd == "old slot map" else servers
    cluster = Cluster(members)
    cluster.spread()
    for server in members:
        server.cluster = cluster
    deployment = Deployment(kernel, network, servers, url, cluster)
    if odd == "old slot map":  # it has left the cluster, and remembers it with one node less
        servers[0].cluster = Cluster(servers[1:2])
        servers[0].cluster.spread()
    elif odd == "slow node":
        deployment.slow = servers[2]
        network.paths[servers[2].address] = Path(bytes_per_second=SLOW_BYTES_PER_SECOND)
    return deployment


def _peers(kernel: Kernel, network: Network, world_size: int) -> tuple[str, ...]:
    """All instances that may start, each also a peer of its own, and one that never starts."""
    if kernel.chance.random() < 0.5:
        return ()
    names = [f"instance{i}" for i in range(MAX_INSTANCES)]
    for name in names:
        for rank in range(world_size):
            network.paths[name, PEER_PORT + rank] = Path()
    return tuple(f"{name}:{PEER_PORT}" for name in names)


def draw_plan(kernel: Kernel, deployment: Deployment) -> Plan:
    chance, is_slow = kernel.chance, deployment.slow is not None
    settings = {
        "compute_or_load": chance.choice(["always", "auto"]),
        "redis_timeout_seconds": chance.choice([0.3, 1.0]),
        "load_deadline_seconds": chance.choice([0.3, 2.0]),
        "loads_in_step": chance.random() < 0.7,
    }
    if chance.random() < 0.3:
        settings |= {"redis_ttl_seconds": 8, "redis_ttl_refresh": chance.random() < 0.5}
    if chance.random() < 0.2:
        settings["hash_key"] = "a secret of more than 16 bytes"
    if chance.random() < 0.2:
        settings["redis_admission"] = "reused"
    if chance.random() < 0.3:
        settings["redis_codec"] = "blosc2"
    if is_slow:
        settings |= {"redis_timeout_seconds": 1.0, "redis_admission": "all"}
        settings.pop("redis_ttl_seconds", None)
        settings.pop("redis_ttl_refresh", None)
    has_tenants = chance.random() < 0.3 and not is_slow
    if has_tenants:  # a tenant keeps no more than its share until it is written
        settings |= {"tenant_share": chance.choice([0.3, 0.6]), "pin_share": 0.5}
    world_size = chance.choice([1, 1, 2])
    peers = () if is_slow else _peers(kernel, deployment.network, world_size)
    # Instances that read from peers can also read from their own ranks.
    shares = world_size > 1 and bool(peers) and chance.random() < 0.5
    shape = Shape(
        world_size=world_size,
        num_heads=1 if shares else NUM_HEADS,
        peers=peers,
        depth=chance.choice([1, 2]),
        num_blocks=chance.choice([20, 24, 40]),
        cpu_chunks=48 if is_slow else chance.choice([8, 24]),
        max_batched_tokens=chance.choice([64, 256]),
        token_seconds=chance.choice([0.0002, 0.001]),
        kv_events=chance.random() < 0.3,
        settings=settings,
    )
    families = [_tokens(kernel, chance.randint(64, 200)) for _ in range(chance.choice([2, 3]))]
    rushes = [chance.uniform(0.0, 2.5) for _ in range(3)]
    clients = [
        Client(
            prompt=(*chance.choice(families), *_tokens(kernel, chance.randrange(40))),
            max_tokens=chance.choice([1, 1, 2, 2, 3, 33]),
            start=chance.choice(rushes) + chance.uniform(0.0, 0.1),
            abort_after=chance.uniform(0.0, 0.5) if chance.random() < 0.15 else None,
            salt=chance.choice([None, "one", "two"]) if has_tenants else None,
            hints=_hints(kernel) if has_tenants else None,
        )
        for _ in range(chance.randint(4, 10))
    ]
    roles = chance.choice([["kv_both"], ["kv_both"] * 2, ["kv_both"] * 2, _PAIR])
    if shape.peers:
        roles = chance.choice([["kv_both"] * 2, ["kv_both"] * 3, _PAIR, [*_PAIR, "kv_consumer"]])
    resets = chance.choice([0, 0, 0, 0, 1, 3])
    return Plan(shape, list(roles), families, clients, resets)


def _hints(kernel: Kernel) -> dict[str, Any] | None:
    chance = kernel.chance
    hints = {"pin": True, "ttl_seconds": chance.choice([0.5, 60.0]), "priority": 2}
    return {name: hints[name] for name in hints if chance.random() < 0.4} or None


def _tokens(kernel: Kernel, count: int) -> tuple[int, ...]:
    return tuple(kernel.chance.randrange(VOCABULARY) for _ in range(count))


assert CHUNK_SIZE * 2 <= 64, "a family has at least two chunks"
