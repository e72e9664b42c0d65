"""What can go wrong, as small public classes: each begins, lasts, and ends.

A fault is aimed at one server of a :class:`Deployment` and changes what the model of that server,
or the path to it, does. ``end`` puts back what can be put back; what was lost or damaged stays so.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from redis.crc import key_slot

from lmcache_connector.storage.redis.value_names import chunk_tag
from tests.simulation.kernel import Kernel
from tests.simulation.network import Address, Network
from tests.simulation.redis_model import Cluster, Entry, RedisModel

_LIE_CHANCE = 0.05


@dataclass(eq=False)
class Deployment:
    """The servers of one world. ``url`` is what instances are configured with. ``damaged`` holds
    values that a fault has put there, by name. ``sentinel`` names the master among the servers,
    which have one set of data. ``slow``: the server with a slow path, if there is one.
    ``originals``: what faults have changed, by object and attribute, as it was before."""

    kernel: Kernel
    network: Network
    servers: list[RedisModel]
    url: str
    cluster: Cluster | None = None
    sentinel: RedisModel | None = None
    slow: RedisModel | None = None
    damaged: dict[bytes, bytes] = field(default_factory=dict)
    originals: dict[tuple[int, str], Any] = field(default_factory=dict)

    def owner_of(self, key: bytes) -> RedisModel | None:
        """The server of the cluster that should have a chunk."""
        assert self.cluster is not None
        return self.cluster.owners.get(key_slot(chunk_tag("default", key)))

    @property
    def chance(self) -> random.Random:
        return self.kernel.chance


@dataclass(frozen=True, slots=True)
class At:
    """The address of a server that is no Redis."""

    address: Address


class Fault:
    """``server`` is the one it is aimed at."""

    def begin(self, world: Deployment, server: Any) -> None:
        raise NotImplementedError

    def end(self, world: Deployment, server: Any) -> None:
        """Nothing is put back."""


class _Changes(Fault):
    """Sets attributes of a server as its class says, and puts back what they were in the beginning:
    faults of one kind that overlap end together."""

    changes: ClassVar[dict[str, Any]]

    def __init_subclass__(cls, **changes: Any) -> None:
        cls.changes = changes

    def begin(self, world: Deployment, server: Any) -> None:
        target = self._target(world, server)
        for name in self.changes:
            world.originals.setdefault((id(target), name), getattr(target, name))
        vars(target).update(self.changes)

    def end(self, world: Deployment, server: Any) -> None:
        target = self._target(world, server)
        for name in self.changes:
            original = world.originals.get((id(target), name), getattr(type(target), name))
            setattr(target, name, original)

    def _target(self, world: Deployment, server: Any) -> Any:
        return server


class _PathFault(_Changes):
    """Of the path to a server."""

    def _target(self, world: Deployment, server: RedisModel | At) -> Any:
        return world.network.paths[server.address]


class SlowPath(_PathFault, latency_seconds=0.15, bytes_per_second=2e5):
    """Far away, and narrow."""


class Trickle(_PathFault, segment_bytes=7, bytes_per_second=2e3):
    """Bytes come a few at a time."""


class ReorderingPath(_PathFault, jitter_seconds=0.05):
    """What is sent on one connection passes what was sent earlier on another."""


class LossyPath(_PathFault, reset_chance=0.1):
    """Connections break, now and then, in the middle of a message."""


class CutPath(_PathFault, is_cut=True):
    """Nothing arrives, and nobody is told."""


class RefusingPort(_PathFault, refuses=True):
    """Nobody new can connect; what is connected goes on."""


class SlowServer(_Changes, seconds_per_command=0.03):
    """Each command takes long."""


class FrozenServer(_Changes, is_frozen=True):
    """It accepts and reads, and does not answer until it thaws."""

    def end(self, world: Deployment, server: RedisModel) -> None:
        server.thaw()


class DyingServer(Fault):
    """It ends, and starts again later, with its data or without."""

    def begin(self, world: Deployment, server: RedisModel) -> None:
        server.stop(keep_data=world.chance.random() < 0.5)

    def end(self, world: Deployment, server: RedisModel) -> None:
        server.start()


class LoadingServer(_Changes, is_loading=True):
    """It answers that it is not ready yet."""


class RefusingServer(_Changes, refusal=None):
    """It answers every write with an error."""

    read_only = b"-READONLY You can't write against a read only replica.\r\n"
    errors = (
        read_only,
        b"-OOM command not allowed when used memory > 'maxmemory'.\r\n",
        b"-NOPERM this user has no permissions to run the command\r\n",
        b"-MISCONF Redis is configured to save RDB snapshots, but cannot.\r\n",
        b"-ERR something odd\r\n",
    )

    def begin(self, world: Deployment, server: RedisModel) -> None:
        server.refusal = world.chance.choice(self.errors)

    def end(self, world: Deployment, server: RedisModel) -> None:
        is_replica = world.sentinel is not None and world.sentinel.master is not server
        server.refusal = self.read_only if is_replica else None


class ForgetfulServer(Fault):
    """It loses some values, or all."""

    def begin(self, world: Deployment, server: RedisModel) -> None:
        share = world.chance.choice([0.2, 0.5, 1.0])
        for name in server.names():
            if world.chance.random() < share:
                del server.entries[name]


class DamagedValues(Fault):
    """Values change at rest: a bit flips, they are cut or extended, or replaced, also by a list."""

    def __init__(self, share: float = 0.3) -> None:
        self._share = share

    def begin(self, world: Deployment, server: RedisModel) -> None:
        names = [n for n in server.names() if b"-" in n]
        self.damage(world, [(server, name) for name in names])

    def damage(self, world: Deployment, values: Sequence[tuple[RedisModel, bytes]]) -> int:
        """Damage some of ``values``; returns how many."""
        chosen = [value for value in values if world.chance.random() < self._share]
        for server, name in chosen:
            other, other_name = world.chance.choice(values)
            entry = self._spoiled(world, server.entries[name], other.entries[other_name])
            world.damaged[name] = entry.value
            server.entries[name] = entry
        return len(chosen)

    def _spoiled(self, world: Deployment, entry: Entry, other: Entry) -> Entry:
        chance, value, kind = world.chance, bytearray(entry.value), b"string"
        match chance.randrange(5):
            case 0 if value:
                value[chance.randrange(len(value))] ^= 1 << chance.randrange(8)
            case 1 if value:
                del value[chance.randrange(len(value)) :]
            case 2:
                value += b"more"
            case 3:
                kind = b"list"
            case _:
                value = bytearray(other.value)
        return Entry(bytes(value), kind, entry.expires_at)


_HUGE = (2**31, 900_000_000_000, 2**63, 10**30, 10**400)


def _slots(*ranges: tuple[int, int, bytes, int]) -> bytes:
    """The reply to CLUSTER SLOTS: first, last, host and port of each range."""
    entries = (
        b"*3\r\n:%d\r\n:%d\r\n*3\r\n$%d\r\n%b\r\n:%d\r\n$1\r\nx\r\n" % (a, b, len(host), host, port)
        for a, b, host, port in ranges
    )
    return b"*%d\r\n%b" % (len(ranges), b"".join(entries))


def _wrong_slots(chance: random.Random) -> bytes:
    host, port = b"127.0.0.1", chance.choice([0, -1, 1, 65536, *_HUGE])
    return chance.choice(
        [
            _slots((0, chance.choice(_HUGE), host, 7000)),
            _slots((-5, 16383, host, 7000)),
            _slots((9, 3, host, 7000)),
            _slots((0, 16383, host, port)),
            _slots((0, 16383, b"x" * chance.choice([0, 254, 100_000]), 7000)),
            _slots((0, 16383, b"\xff\x00\n bad", 7000)),
            _slots(*[(0, 16383, host, 7000)] * 500),
            _slots(*[(i, i, host, 1 + i) for i in range(1200)]),
            b"*1\r\n*2\r\n:0\r\n:16383\r\n",
            b"*1\r\n*3\r\n$1\r\n0\r\n:5\r\n*1\r\n$-1\r\n",
            b"*0\r\n",
        ]
    )


_LIES: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    lambda r, reply: b"-ERR lies\r\n",
    lambda r, reply: b":%d\r\n" % r.choice([-1, 0, 1, 7, *_HUGE]),
    lambda r, reply: b"$-1\r\n",
    lambda r, reply: reply + reply,
    lambda r, reply: b"",
    lambda r, reply: r.randbytes(r.choice([1, 60, 100_000])),
    lambda r, reply: reply[: r.randrange(len(reply))],
    lambda r, reply: _flipped(reply, r.randrange(len(reply))),
    lambda r, reply: b"%b%d\r\n" % (r.choice([b"$", b"*"]), r.choice(_HUGE) * r.choice([1, -1])),
    lambda r, reply: _wrong_slots(r),
    lambda r, reply: r.choice([b"*1\r\n", b"*2\r\n:1\r\n"]) * r.choice([10, 1000, 20_000]),
    lambda r, reply: b"*%d\r\n%b" % (n := r.choice([300, 20_000]), b"$-1\r\n" * n),
    lambda r, reply: r.choice([b"+", b"-", b":", b"$", b"*", b"_", b"%", b"#t", b",1.5"]) + b"\r\n",
    lambda r, reply: r.choice([b"+", b"-", b":", b"$", b"*"]) + b"9" * r.choice([19, 5000, 70_000]),
    lambda r, reply: (
        r.choice([b":", b"$"]) + r.choice([b"x", b"1e9", b"+1", b" 1", b"-0"]) + b"\r\n"
    ),
    lambda r, reply: b"-MOVED %d 127.0.0.1:%d\r\n" % (r.choice([-1, 5, *_HUGE]), r.choice(_HUGE)),
    lambda r, reply: b"-%b\r\n" % r.randbytes(r.choice([1, 300, 60_000])).replace(b"\n", b""),
    lambda r, reply: b"+OK\r\n" * r.choice([2, 10_000]),
    lambda r, reply: b"$5\r\nabc\r\n$3\r\nabcdef\r\n",
)


def _flipped(reply: bytes, at: int) -> bytes:
    return reply[:at] + bytes([reply[at] ^ 1]) + reply[at + 1 :]


class LyingServer(_Changes, tamper=None):
    """Now and then it answers with something else. Afterwards its connections may be out of step
    for good, and nobody could tell from outside."""

    def begin(self, world: Deployment, server: RedisModel) -> None:
        chance = world.chance

        def tamper(command: Sequence[bytes], reply: bytes) -> bytes:
            return chance.choice(_LIES)(chance, reply) if chance.random() < _LIE_CHANCE else reply

        server.tamper = tamper


class MovingSlots(Fault):
    """Slots go to other nodes of the cluster, some while they are in use, some to nobody."""

    def begin(self, world: Deployment, server: RedisModel) -> None:
        cluster = world.cluster
        if cluster is None:
            return
        chance = world.chance
        for _ in range(8):
            target, is_done = chance.choice(cluster.servers), chance.random() < 0.5
            first = chance.randrange(15000)
            for slot in range(first, first + chance.randrange(1384)):
                if cluster.owners.get(slot) in (None, target):
                    continue
                if is_done:
                    cluster.assign(slot, target)
                else:
                    cluster.migrating[slot] = target
        cluster.move_keys()

    def end(self, world: Deployment, server: RedisModel) -> None:
        cluster = world.cluster
        if cluster is not None:
            for slot, target in list(cluster.migrating.items()):
                cluster.assign(slot, target)
            cluster.migrating.clear()
            cluster.move_keys()


class OrphanedSlots(Fault):
    """Nobody serves the slots of a node for a while, as in a cluster that has lost it."""

    def __init__(self) -> None:
        self._slots: list[int] = []

    def begin(self, world: Deployment, server: RedisModel) -> None:
        if world.cluster is not None:
            owners = world.cluster.owners
            self._slots = [slot for slot, owner in owners.items() if owner is server]
            for slot in self._slots:
                world.cluster.assign(slot, None)

    def end(self, world: Deployment, server: RedisModel) -> None:
        for slot in self._slots:
            assert world.cluster is not None
            world.cluster.assign(slot, server)


class Failover(Fault):
    """The master is gone for a while, and comes back as a replica of another."""

    def begin(self, world: Deployment, server: RedisModel) -> None:
        if world.sentinel is None or world.sentinel.master is None:
            return
        old = world.sentinel.master
        (new,) = (each for each in world.servers if each is not old)
        old.stop(keep_data=True)
        new.refusal = None
        world.sentinel.master = new

    def end(self, world: Deployment, server: RedisModel) -> None:
        if world.sentinel is None:
            return
        for each in world.servers:
            if each is not world.sentinel.master:
                each.refusal = RefusingServer.read_only
                each.start()


ON_PATHS = (SlowPath, Trickle, ReorderingPath, LossyPath, CutPath, RefusingPort)
ALL: tuple[type[Fault], ...] = (
    *ON_PATHS,
    SlowServer,
    FrozenServer,
    DyingServer,
    LoadingServer,
    RefusingServer,
    ForgetfulServer,
    DamagedValues,
    LyingServer,
    MovingSlots,
    OrphanedSlots,
    Failover,
)
