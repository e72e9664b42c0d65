"""Looking at what lies in Redis, and removing it, without getting in the way of who serves.

Keys are found with SCAN, never KEYS; questions go out a few hundred at a time; values are removed
with UNLINK, which frees memory in the background. Where the server can (Redis 7.2, Valkey), looking
does not make a value recently used.

Blocking, single-threaded, for a person's tools. Errors of redis-py come out as `RedisAdminError`,
without credentials.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from redis import Connection
from redis.exceptions import (
    AuthenticationError,
    NoPermissionError,
    RedisError,
    ResponseError,
)

from lmcache_connector.storage.chunk_codec import HEADER_BYTES, MAX_PAYLOAD_BYTES
from lmcache_connector.storage.redis.config import RedisTierConfig
from lmcache_connector.storage.redis.topology import CONNECT_ERRORS, Node, make_topology
from lmcache_connector.storage.redis.value_names import ValueName, parse_value_name, scan_pattern

_T = TypeVar("_T")
_SCAN_COUNT = 512
_BATCH = 256
# Of values read whole at once.
_READ_BATCH = 8


class RedisAdminError(Exception):
    """``hint``: what to do about it."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server says of itself; sizes in bytes, ``None`` where it does not tell."""

    node: str
    version: str | None
    used_bytes: int | None
    max_bytes: int | None
    policy: str | None
    evicted_keys: int | None


@dataclass(frozen=True, slots=True)
class StoredValue:
    """A value as found. ``header``: its first 128 bytes. ``ttl_seconds``: ``None`` without one.
    ``idle_seconds``: since it was last used; ``None`` where the server does not keep that."""

    node: str
    raw_name: bytes
    name: ValueName
    num_bytes: int
    ttl_seconds: float | None
    idle_seconds: int | None
    header: bytes


class RedisAdmin:
    """Use it in a ``with``. Raises `RedisAdminError` from every method."""

    def __init__(
        self, config: RedisTierConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config
        self._topology = make_topology(config, clock)
        self._connections: dict[Node, Connection] = {}
        self.leaves_no_trace = True
        """Whether looking leaves the values' last use alone; known once connected."""

    def __enter__(self) -> RedisAdmin:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for connection in self._connections.values():
            connection.disconnect()
        self._topology.close()

    def nodes(self) -> tuple[str, ...]:
        """Connects to every server that holds values."""
        with self._translated():
            self._topology.prepare()
        for node in self._topology.nodes():
            self._connection(node)
        return tuple(self._topology.nodes())

    def facts(self, node: str) -> ServerFacts:
        connection = self._connection(Node(node))
        try:
            info = self._ask(connection, [("INFO", "everything")])[0]
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
        """Keys of all servers, whoever's: an upper bound for a progress bar."""
        sizes = [self._ask(self._connection(Node(n)), [("DBSIZE",)])[0] for n in self.nodes()]
        return sum(size for size in sizes if isinstance(size, int))

    def names(
        self, namespace: str | None, key_prefix: str = ""
    ) -> Iterator[tuple[str, bytes, ValueName]]:
        """``(node, raw name, name)`` of all values. SCAN may repeat one; this does not hide it."""
        pattern = scan_pattern(namespace, key_prefix)
        for node in self.nodes():
            connection = self._connection(Node(node))
            cursor = b"0"
            while True:
                reply = self._ask(
                    connection, [("SCAN", cursor, "MATCH", pattern, "COUNT", _SCAN_COUNT)]
                )[0]
                cursor, found = reply
                for raw in found:
                    name = parse_value_name(raw)
                    if name is not None:
                        yield node, raw, name
                if cursor == b"0":
                    break

    def values(self, namespace: str | None, key_prefix: str = "") -> Iterator[StoredValue]:
        """All values, without their payload. One that goes away meanwhile is left out."""
        for batch in _batches(self.names(namespace, key_prefix), _BATCH):
            for node in dict.fromkeys(node for node, _, _ in batch):
                yield from self._describe(Node(node), [b[1:] for b in batch if b[0] == node])

    def payloads(
        self, namespace: str | None, key_prefix: str = ""
    ) -> Iterator[tuple[bytes, ValueName, bytes | None]]:
        """``(raw name, name, whole value)``; ``None`` for one too long to be sound, or gone."""
        for batch in _batches(self.names(namespace, key_prefix), _READ_BATCH):
            for node in dict.fromkeys(node for node, _, _ in batch):
                connection = self._connection(Node(node))
                mine = [(raw, name) for n, raw, name in batch if n == node]
                lengths = self._ask(connection, [("STRLEN", raw) for raw, _ in mine])
                sound = [
                    (raw, name)
                    for (raw, name), length in zip(mine, lengths, strict=True)
                    if isinstance(length, int) and length <= HEADER_BYTES + MAX_PAYLOAD_BYTES
                ]
                yield from ((raw, name, None) for raw, name in mine if (raw, name) not in sound)
                for raw, name in sound:
                    value = self._ask(connection, [("GET", raw)])[0]
                    yield raw, name, value if isinstance(value, bytes) else None

    def unlink(self, node: str, names: Sequence[bytes]) -> int:
        """How many were there. One command each: a cluster's node wants keys of one slot."""
        replies = self._ask(self._connection(Node(node)), [("UNLINK", name) for name in names])
        for reply in replies:
            if isinstance(reply, Exception):
                raise self._translate(reply)
        return sum(reply for reply in replies if isinstance(reply, int))

    def unlink_anywhere(self, names: Sequence[bytes]) -> int:
        """Remove values wherever they lie. How many were there."""
        by_node: dict[Node, list[bytes]] = {}
        for name in names:
            node = self._topology.node_of(name)
            if node is not None:
                by_node.setdefault(node, []).append(name)
        return sum(self.unlink(node, group) for node, group in by_node.items())

    def _describe(
        self, node: Node, names: Sequence[tuple[bytes, ValueName]]
    ) -> Iterator[StoredValue]:
        commands: list[tuple[object, ...]] = []
        for raw, _ in names:
            # Idleness first: on old servers the rest is a use.
            commands += [("OBJECT", "IDLETIME", raw), ("PTTL", raw), ("STRLEN", raw)]
            commands.append(("GETRANGE", raw, 0, HEADER_BYTES - 1))
        replies = iter(self._ask(self._connection(node), commands))
        for raw, name in names:
            idle, ttl, length, header = islice(replies, 4)
            for reply in (ttl, length, header):
                if isinstance(reply, NoPermissionError):
                    raise self._translate(reply)
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

    def _connection(self, node: Node) -> Connection:
        if node not in self._connections:
            with self._translated():
                connection = self._topology.connect(node)
                self._connections[node] = connection
                replies = self._ask(connection, [("CLIENT", "NO-TOUCH", "ON"), ("PING",)])
                self.leaves_no_trace &= not isinstance(replies[0], Exception)
                if isinstance(replies[1], Exception):  # say, it is still loading its data
                    raise replies[1]
        return self._connections[node]

    def _ask(self, connection: Connection, commands: Sequence[tuple[object, ...]]) -> list[Any]:
        """One pipelined round trip. A single question raises the server's error; of several, each
        answer may be one."""
        with self._translated():
            connection.send_packed_command(connection.pack_commands(commands))
            replies: list[Any] = []
            for _ in commands:
                try:
                    replies.append(connection.read_response())
                except ResponseError as error:
                    replies.append(error)
            if len(commands) == 1 and isinstance(replies[0], Exception):
                raise replies[0]
        return replies

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except CONNECT_ERRORS as error:
            raise self._translate(error) from error

    def _translate(self, error: Exception) -> RedisAdminError:
        address = self._config.address
        text = address.redact(str(error)) or type(error).__name__
        return RedisAdminError(f"{address}: {text}", _hint(error))


def _hint(error: Exception) -> str:
    text = str(error).lower()
    if isinstance(error, NoPermissionError):
        return (
            "give the user these rights: ACL SETUSER NAME ~lmc:* +get +getex +set +strlen +exists "
            "+pttl +getrange +object|idletime +scan +unlink +info +dbsize +client"
        )
    if isinstance(error, AuthenticationError) or "auth" in text or "wrongpass" in text:
        return "set user and password in the URL: redis://USER:PASSWORD@HOST (best as env:NAME)"
    if "certificate" in text or "ssl" in text:
        return "use rediss:// and name the authority: ?ssl_ca_certs=/path/to/ca.pem"
    if "refused" in text:
        return "start the server, or correct host and port; a container may need its port published"
    if "timed out" in text or "timeout" in text:
        return "the server does not answer: look at firewalls, and at its own load"
    if "name or service" in text or "resolution" in text or "nodename" in text:
        return "the host name is not known here"
    if "closed by server" in text or "reset" in text:
        return "the server hangs up: it may want TLS (rediss://), or have protected-mode on"
    if isinstance(error, RedisError | OSError):
        return "see the server's own log"
    return "see the message"


def _batches(items: Iterator[_T], size: int) -> Iterator[list[_T]]:
    while batch := list(islice(items, size)):
        yield batch
