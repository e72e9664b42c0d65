"""A small model of Redis servers: the commands the tier uses, expiry, clusters, restarts.

`test_redis_model.py` compares its answers with those of a real server.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from redis.crc import key_slot

from tests.simulation.kernel import Kernel
from tests.simulation.network import Address, Link, Network

_NUM_SLOTS = 16384
_SECONDS_PER_COMMAND = 5e-6
_SECONDS_PER_BYTE = 2e-10
_WRONG_TYPE = b"-WRONGTYPE Operation against a key holding the wrong kind of value\r\n"
_OF_ONE_KEY = {b"GET", b"GETEX", b"SET", b"STRLEN", b"PEXPIRE"}
_WRITES = {b"SET", b"PEXPIRE", b"GETEX"}


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """``kind`` is what ``TYPE`` says. ``expires_at`` is on the kernel's clock."""

    value: bytes
    kind: bytes = b"string"
    expires_at: float | None = None


@dataclass(eq=False)
class Cluster:
    """Which server owns each slot. ``migrating``: where the keys of a slot are on their way to."""

    servers: list[RedisModel] = field(default_factory=list)
    owners: dict[int, RedisModel] = field(default_factory=dict)
    migrating: dict[int, RedisModel] = field(default_factory=dict)

    _ranges: list[tuple[int, int, RedisModel]] | None = None

    def spread(self) -> None:
        """All slots, in equal runs."""
        share = -(-_NUM_SLOTS // len(self.servers))
        self.owners = {slot: self.servers[slot // share] for slot in range(_NUM_SLOTS)}
        self._ranges = None

    def assign(self, slot: int, server: RedisModel | None) -> None:
        """``None``: nobody serves it."""
        self._ranges = None
        if server is None:
            self.owners.pop(slot, None)
        else:
            self.owners[slot] = server

    def move_keys(self) -> None:
        """To those who own their slots."""
        for server in self.servers:
            for name in list(server.entries):
                owner = self.owners.get(key_slot(name), server)
                if owner is not server:
                    owner.entries[name] = server.entries.pop(name)

    def ranges(self) -> list[tuple[int, int, RedisModel]]:
        """Runs of slots: the first, the last, and who owns them."""
        if self._ranges is None:
            found: list[tuple[int, int, RedisModel]] = []
            for slot in sorted(self.owners):
                owner = self.owners[slot]
                if found and found[-1][1] == slot - 1 and found[-1][2] is owner:
                    found[-1] = (found[-1][0], slot, owner)
                else:
                    found.append((slot, slot, owner))
            self._ranges = found
        return self._ranges


@dataclass(eq=False)
class RedisModel:
    """One server. Faults set its public fields.

    ``is_frozen``: it accepts and never answers. ``refusal``: its answer to every write.
    ``is_loading``: it answers everything with ``-LOADING``. ``tamper(command, reply)`` may change
    what goes out. ``seconds_per_command``: how slow it is. ``password``: without it, nobody is
    answered. ``master``: whom it names, as a sentinel.
    """

    kernel: Kernel
    network: Network
    address: Address
    cluster: Cluster | None = None
    is_frozen: bool = False
    is_loading: bool = False
    refusal: bytes | None = None
    tamper: Callable[[Sequence[bytes], bytes], bytes] | None = None
    seconds_per_command: float = _SECONDS_PER_COMMAND
    password: bytes | None = None
    master: RedisModel | None = None

    def __post_init__(self) -> None:
        self.entries: dict[bytes, Entry] = {}
        self._busy_until = 0.0
        self._frozen: list[tuple[Link, bytes]] = []
        self.start()

    # -- what an operator, or bad luck, does -----------------------------------------------------

    def start(self) -> None:
        self.network.listen(self.address, self)

    def stop(self, *, keep_data: bool) -> None:
        """The process ends: connections break, nobody listens."""
        for link in self.network.open_links(self.address):
            link.reset()
        self.network.services.pop(self.address, None)
        self._frozen.clear()
        if not keep_data:
            self.entries.clear()

    def thaw(self) -> None:
        self.is_frozen = False
        frozen, self._frozen = self._frozen, []
        for link, data in frozen:
            self.receive(link, data)

    def names(self) -> list[bytes]:
        """Of what has not expired."""
        self._expire()
        return list(self.entries)

    # -- Service -------------------------------------------------------------------------------

    def accept(self, link: Link) -> None:
        link.state = Session()

    def closed(self, link: Link) -> None:
        """Nothing is kept of it."""

    def receive(self, link: Link, data: bytes) -> None:
        if self.is_frozen:
            self._frozen.append((link, data))
            return
        session: Session = link.state
        session.buffer += data
        while (parts := _parse(session.buffer)) is not None:
            cost = self.seconds_per_command + _SECONDS_PER_BYTE * sum(map(len, parts))
            self._busy_until = max(self._busy_until, self.kernel.now) + cost
            self.kernel.at(self._busy_until, partial(self._answer, link, parts))

    def _answer(self, link: Link, parts: Sequence[bytes]) -> None:
        if link.is_closed or self.network.services.get(self.address) is not self:
            return
        reply = self.execute(link.state, parts)
        if self.tamper is not None:
            reply = self.tamper(parts, reply)
        if self.kernel.is_traced:
            shown = b" ".join(p if len(p) < 100 else b"<%d bytes>" % len(p) for p in parts)
            self.kernel.trace(f"{self.address[0]}: {shown!r} -> {reply[:60]!r}")
        link.to_client(reply)

    # -- commands ------------------------------------------------------------------------------

    def execute(self, session: Session, parts: Sequence[bytes]) -> bytes:
        """The reply to one command."""
        verb, args = parts[0].upper(), parts[1:]
        handler = getattr(self, f"do_{verb.decode().lower()}", None)
        if handler is None:
            return b"-ERR unknown command '%b'\r\n" % verb
        if self.password is not None and not (session.is_known or verb == b"AUTH"):
            return b"-NOAUTH Authentication required.\r\n"
        if self.is_loading and verb != b"AUTH":
            return b"-LOADING Redis is loading the dataset in memory\r\n"
        self._expire()
        names = args if verb == b"EXISTS" else args[:1] if verb in _OF_ONE_KEY else ()
        refusal = self._redirection(names) or (self.refusal if verb in _WRITES else None)
        return refusal or bytes(handler(session, args))

    def _redirection(self, names: Sequence[bytes]) -> bytes | None:
        if self.cluster is None or not names:
            return None
        slots = {key_slot(name) for name in names}
        if len(slots) > 1:
            return b"-CROSSSLOT Keys in request don't hash to the same slot\r\n"
        slot = slots.pop()
        owner = self.cluster.owners.get(slot)
        target = self.cluster.migrating.get(slot)
        if owner is None:
            return b"-CLUSTERDOWN Hash slot not served\r\n"
        if owner is not self:
            return b"-MOVED %d %b:%d\r\n" % (slot, owner.address[0].encode(), owner.address[1])
        if target is not None:
            there = [name in self.entries for name in names]
            if not all(there):
                if any(there):
                    return b"-TRYAGAIN Multiple keys request during rehashing of slot\r\n"
                return b"-ASK %d %b:%d\r\n" % (slot, target.address[0].encode(), target.address[1])
        return None

    def _expire(self) -> None:
        now = self.kernel.now
        for name in [
            n for n, e in self.entries.items() if e.expires_at is not None and now >= e.expires_at
        ]:
            del self.entries[name]

    def do_get(self, session: Session, args: Sequence[bytes]) -> bytes:
        entry = self.entries.get(args[0])
        if entry is None:
            return b"$-1\r\n"
        return _bulk(entry.value) if entry.kind == b"string" else _WRONG_TYPE

    def do_getex(self, session: Session, args: Sequence[bytes]) -> bytes:
        reply = self.do_get(session, args)
        entry = self.entries.get(args[0])
        is_string = entry is not None and entry.kind == b"string"
        if is_string and len(args) == 3 and args[1].upper() == b"PX":
            self._keep_for(args[0], int(args[2]))
        return reply

    def do_set(self, session: Session, args: Sequence[bytes]) -> bytes:
        name, value, *options = args  # PX and milliseconds, or none
        expires_at = self.kernel.now + int(options[1]) / 1000 if options else None
        self.entries[name] = Entry(value, expires_at=expires_at)
        return b"+OK\r\n"

    def do_strlen(self, session: Session, args: Sequence[bytes]) -> bytes:
        entry = self.entries.get(args[0])
        if entry is None:
            return b":0\r\n"
        return b":%d\r\n" % len(entry.value) if entry.kind == b"string" else _WRONG_TYPE

    def do_exists(self, session: Session, args: Sequence[bytes]) -> bytes:
        return b":%d\r\n" % sum(name in self.entries for name in args)

    def do_pexpire(self, session: Session, args: Sequence[bytes]) -> bytes:
        if args[0] not in self.entries:
            return b":0\r\n"
        self._keep_for(args[0], int(args[1]))
        return b":1\r\n"

    def _keep_for(self, name: bytes, milliseconds: int) -> None:
        expires_at = self.kernel.now + milliseconds / 1000
        self.entries[name] = replace(self.entries[name], expires_at=expires_at)

    def do_info(self, session: Session, args: Sequence[bytes]) -> bytes:
        return _bulk(b"# Memory\r\nmaxmemory:0\r\nmaxmemory_policy:allkeys-lru\r\n")

    def do_auth(self, session: Session, args: Sequence[bytes]) -> bytes:
        if self.password is None:
            return b"-ERR AUTH <password> called without any password configured\r\n"
        session.is_known = args[-1] == self.password
        return b"+OK\r\n" if session.is_known else b"-WRONGPASS invalid username or password\r\n"

    def do_sentinel(self, session: Session, args: Sequence[bytes]) -> bytes:
        if self.master is None:
            return b"*-1\r\n"
        host, port = self.master.address
        return b"*2\r\n" + _bulk(host.encode()) + _bulk(b"%d" % port)

    def do_cluster(self, session: Session, args: Sequence[bytes]) -> bytes:
        if self.cluster is None:
            return b"-ERR This instance has cluster support disabled\r\n"
        ranges = self.cluster.ranges()
        reply = b"*%d\r\n" % len(ranges)
        for first, last, owner in ranges:
            host, port = owner.address
            name = b"%040d" % port
            reply += b"*3\r\n:%d\r\n:%d\r\n*3\r\n" % (first, last)
            reply += _bulk(host.encode()) + b":%d\r\n" % port + _bulk(name)
        return reply


@dataclass(slots=True)
class Session:
    """One client."""

    buffer: bytearray = field(default_factory=bytearray)
    is_known: bool = False


def _bulk(value: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(value), value)


def _parse(buffer: bytearray) -> list[bytes] | None:
    """Take one command, an array of bulk strings, out of ``buffer``; ``None``: not all of it is
    there."""
    end = buffer.find(b"\r\n")
    if end < 0:
        return None
    assert buffer[:1] == b"*", f"no command: {bytes(buffer[:40])!r}"
    count, at, parts = int(buffer[1:end]), end + 2, list[bytes]()
    for _ in range(count):
        end = buffer.find(b"\r\n", at)
        if end < 0:
            return None
        size = int(buffer[at + 1 : end])
        at = end + 2 + size + 2
        if len(buffer) < at:
            return None
        parts.append(bytes(buffer[at - 2 - size : at - 2]))
    del buffer[:at]
    return parts
