"""Looks at what lies in Redis and removes it, without getting in the way of serving instances.

Keys are found with SCAN, never KEYS. Commands are pipelined a few hundred at a time. Values are
removed with UNLINK, which frees memory in the background. On servers that can (Redis 7.2, Valkey),
looking at a value does not make it recently used.

Everything blocks, within bounds, and one thread uses it: this serves command-line tools. What goes
wrong is raised as `RedisAdminError`, without credentials.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import TypeVar

from lmcache_connector.net.wire import WireError, WireFault
from lmcache_connector.storage.chunk_codec import HEADER_BYTES, MAX_PAYLOAD_BYTES
from lmcache_connector.storage.redis.client.conversation import (
    Conversation,
    ErrorReply,
    RefusedError,
    Reply,
    ReplyLimits,
)
from lmcache_connector.storage.redis.client.dial import TALK_ERRORS
from lmcache_connector.storage.redis.client.resp import command
from lmcache_connector.storage.redis.config import RedisTierConfig
from lmcache_connector.storage.redis.topology import Node, make_topology
from lmcache_connector.storage.redis.value_names import ValueName, parse_value_name, scan_pattern

_T = TypeVar("_T")
_SCAN_COUNT = 512
_BATCH = 256
# Whole values read at once.
_READ_BATCH = 8
# SCAN returns some hundreds of names at once, INFO some pages of text.
_LIMITS = ReplyLimits(4 << 20, 1 << 16)
_LINE_BYTES = 1024
_ANSWER_SECONDS = 60.0
_Word = bytes | str | int


class RedisAdminError(Exception):
    """What went wrong, and in ``hint`` what to do about it."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server reports about itself. Sizes in bytes; None where it does not tell."""

    node: Node
    version: str | None
    used_bytes: int | None
    max_bytes: int | None
    policy: str | None
    evicted_keys: int | None


class Unreadable(Enum):
    """Why a value cannot be read as one of ours, in the words of the metrics."""

    WRONG_TYPE = "wrong_type"
    OVERSIZED = "oversized_payload"


@dataclass(frozen=True, slots=True)
class StoredValue:
    """A value as found. ``header`` is its first 128 bytes. ``ttl_seconds`` is None if it does not
    expire. ``idle_seconds`` count from its last use; None where the server does not keep that."""

    node: Node
    raw_name: bytes
    name: ValueName
    num_bytes: int
    ttl_seconds: float | None
    idle_seconds: int | None
    header: bytes


class RedisAdmin:
    """Use it in a ``with``. Every method may raise `RedisAdminError`. ``clock`` returns seconds."""

    def __init__(
        self, config: RedisTierConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config
        self._topology = make_topology(config, clock)
        self._connections: dict[Node, Conversation] = {}
        self.leaves_no_trace = True
        """Whether looking at values leaves their last use alone; known once connected."""

    def __enter__(self) -> RedisAdmin:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for connection in self._connections.values():
            connection.close()

    def nodes(self) -> tuple[Node, ...]:
        """Connect to every server that holds values, and return their names."""
        with self._translated():
            self._topology.prepare()
        for node in self._topology.nodes():
            self._connection(node)
        return self._topology.nodes()

    def facts(self, node: Node) -> ServerFacts:
        connection = self._connection(node)
        try:
            info = self._ask_one(connection, ("INFO", "everything"))
        except RedisAdminError:
            return ServerFacts(node, None, None, None, None, None)
        text = info.decode(errors="replace") if isinstance(info, bytes) else ""
        fields = dict(line.split(":", 1) for line in text.split("\r\n") if ":" in line)

        def number(name: str) -> int | None:
            return int(fields[name]) if fields.get(name, "").isdigit() else None

        return ServerFacts(
            node=node,
            version=fields.get("valkey_version") or fields.get("redis_version"),
            used_bytes=number("used_memory"),
            max_bytes=number("maxmemory"),
            policy=fields.get("maxmemory_policy"),
            evicted_keys=number("evicted_keys"),
        )

    def num_keys(self) -> int:
        """The number of all keys on all servers: an upper bound for a progress bar."""
        sizes = [self._ask_one(self._connection(n), ("DBSIZE",)) for n in self.nodes()]
        return sum(size for size in sizes if isinstance(size, int))

    def names(
        self, namespace: str | None, key_prefix: str = ""
    ) -> Iterator[tuple[Node, bytes, ValueName]]:
        """``(node, raw name, name)`` of all values. As with SCAN, a value may come twice."""
        pattern = scan_pattern(namespace, key_prefix)
        for node in self.nodes():
            connection = self._connection(node)
            cursor: bytes | None = b"0"
            while cursor is not None:
                scan = ("SCAN", cursor, "MATCH", pattern, "COUNT", _SCAN_COUNT)
                cursor, found = self._scanned(self._ask_one(connection, scan))
                for raw in found:
                    name = parse_value_name(raw)
                    # The pattern "a:*" also finds what is in the namespace "a:b".
                    if name is not None and name.is_in(namespace, key_prefix):
                        yield node, raw, name

    def values(self, namespace: str | None, key_prefix: str = "") -> Iterator[StoredValue]:
        """All values, without their payload, except those that vanish meanwhile."""
        for batch in _batches(self.names(namespace, key_prefix), _BATCH):
            for node, names in _by_node(batch).items():
                yield from self._describe(node, names)

    def payloads(
        self, namespace: str | None, key_prefix: str = ""
    ) -> Iterator[tuple[bytes, ValueName, bytes | Unreadable | None]]:
        """``(raw name, name, whole value)``; None for a value gone meanwhile."""
        for batch in _batches(self.names(namespace, key_prefix), _READ_BATCH):
            for node, names in _by_node(batch).items():
                connection = self._connection(node)
                lengths = self._ask(connection, [("STRLEN", raw) for raw, _ in names])
                for (raw, name), length in zip(names, lengths, strict=True):
                    yield raw, name, self._payload(connection, raw, length)

    def _payload(
        self, connection: Conversation, raw: bytes, length: Reply
    ) -> bytes | Unreadable | None:
        if isinstance(length, ErrorReply) and length.is_a(b"WRONGTYPE"):
            return Unreadable.WRONG_TYPE
        if isinstance(length, ErrorReply):
            raise self._translate(RefusedError(length))
        if not isinstance(length, int):
            return None
        if length > HEADER_BYTES + MAX_PAYLOAD_BYTES:
            return Unreadable.OVERSIZED
        limits = ReplyLimits(length + _LINE_BYTES)
        value = self._ask_one(connection, ("GET", raw), limits)
        return value if isinstance(value, bytes) else None

    def unlink(self, node: str, names: Sequence[bytes]) -> int:
        """Remove values of one node; returns how many existed. One command each, because a
        cluster's node takes only keys of one slot in a command."""
        replies = self._ask(self._connection(Node(node)), [("UNLINK", name) for name in names])
        for reply in replies:
            if isinstance(reply, ErrorReply):
                raise self._translate(RefusedError(reply))
        return sum(reply for reply in replies if isinstance(reply, int))

    def unlink_anywhere(self, names: Sequence[bytes]) -> int:
        """Remove values on any node; returns how many existed."""
        by_node: dict[Node, list[bytes]] = {}
        for name in names:
            node = self._topology.node_of(name)
            if node is not None:
                by_node.setdefault(node, []).append(name)
        return sum(self.unlink(node, group) for node, group in by_node.items())

    def _describe(
        self, node: Node, names: Sequence[tuple[bytes, ValueName]]
    ) -> Iterator[StoredValue]:
        commands: list[tuple[_Word, ...]] = []
        for raw, _ in names:
            # Idleness first: on old servers, the other commands count as uses.
            commands += [("OBJECT", "IDLETIME", raw), ("PTTL", raw), ("STRLEN", raw)]
            commands.append(("GETRANGE", raw, 0, HEADER_BYTES - 1))
        replies = iter(self._ask(self._connection(node), commands))
        for raw, name in names:
            idle, ttl, length, header = islice(replies, 4)
            for reply in (ttl, length, header):
                if isinstance(reply, ErrorReply) and reply.is_a(b"NOPERM"):
                    raise self._translate(RefusedError(reply))
            if isinstance(length, int) and length > 0 and isinstance(header, bytes):
                yield StoredValue(
                    node=node,
                    raw_name=raw,
                    name=name,
                    num_bytes=length,
                    ttl_seconds=ttl / 1000 if isinstance(ttl, int) and ttl >= 0 else None,
                    idle_seconds=idle if isinstance(idle, int) else None,
                    header=header,
                )

    def _connection(self, node: Node) -> Conversation:
        if node not in self._connections:
            with self._translated():
                connection = self._topology.connect(node)
                self._connections[node] = connection
                replies = self._ask(connection, [("CLIENT", "NO-TOUCH", "ON"), ("PING",)])
                self.leaves_no_trace &= not isinstance(replies[0], ErrorReply)
                if isinstance(replies[1], ErrorReply):  # say, it is still loading its data
                    raise RefusedError(replies[1])
        return self._connections[node]

    def _ask(
        self,
        connection: Conversation,
        commands: Sequence[tuple[_Word, ...]],
        limits: ReplyLimits = _LIMITS,
    ) -> list[Reply]:
        """The replies to ``commands``, in one pipelined round trip; each may be an error."""
        with self._translated():
            encoded = (command(*map(_encoded, words)) for words in commands)
            return connection.ask(*encoded, limits=limits, seconds=_ANSWER_SECONDS)

    def _ask_one(
        self, connection: Conversation, words: tuple[_Word, ...], limits: ReplyLimits = _LIMITS
    ) -> Reply:
        """The reply to one command. An error is raised."""
        (reply,) = self._ask(connection, [words], limits)
        if isinstance(reply, ErrorReply):
            raise self._translate(RefusedError(reply))
        return reply

    def _scanned(self, reply: Reply) -> tuple[bytes | None, list[bytes]]:
        """The next cursor, None at the end, and the names in a reply to SCAN."""
        match reply:
            case [bytes(cursor), list(found)]:
                names = [name for name in found if isinstance(name, bytes)]
                return None if cursor == b"0" else cursor, names
        raise self._translate(WireError(WireFault.OUT_OF_STEP, "an unexpected answer to SCAN"))

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except TALK_ERRORS as error:
            raise self._translate(error) from error

    def _translate(self, error: Exception) -> RedisAdminError:
        address = self._config.address
        text = address.redact(str(error)) or type(error).__name__
        return RedisAdminError(f"{address}: {text}", _hint(error))


def _encoded(word: _Word) -> bytes:
    return word if isinstance(word, bytes) else str(word).encode()


def _hint(error: Exception) -> str:
    text = str(error).lower()
    if "noperm" in text:
        return (
            "give the user these rights (from Redis 7.2 on, +client|no-touch too): "
            "ACL SETUSER NAME ~lmc:* +get +getex +set +strlen +exists "
            "+pexpire +watch +multi +exec +unlink +select +getrange +pttl +object|idletime +scan "
            "+dbsize +info +ping"
        )
    if "auth" in text or "wrongpass" in text:
        return "set user and password in the URL: redis://USER:PASSWORD@HOST (best as env:NAME)"
    if "certificate" in text or "ssl" in text:
        return "use rediss:// and name the authority: ?ssl_ca_certs=/path/to/ca.pem"
    if "refused" in text:
        return "start the server, or correct host and port; a container may need its port published"
    if "timed out" in text or "timeout" in text:
        return "the server does not answer: look at firewalls, and at its own load"
    if "name or service" in text or "resolution" in text or "nodename" in text:
        return "the host name is not known here"
    if "closed" in text or "reset" in text:
        return "the server hangs up: it may want TLS (rediss://), or have protected-mode on"
    return "see the server's own log"


def _by_node(
    found: Sequence[tuple[Node, bytes, ValueName]],
) -> dict[Node, list[tuple[bytes, ValueName]]]:
    groups: dict[Node, list[tuple[bytes, ValueName]]] = {}
    for node, raw, name in found:
        groups.setdefault(node, []).append((raw, name))
    return groups


def _batches(items: Iterator[_T], size: int) -> Iterator[list[_T]]:
    while batch := list(islice(items, size)):
        yield batch
