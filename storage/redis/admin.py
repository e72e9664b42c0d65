"""Lists, reads and removes values in Redis, with little effect on serving instances.

SCAN finds keys, never KEYS. Commands are pipelined, up to about a thousand at a time. UNLINK
removes values, so that memory is freed in the background. From Redis 7.2 on, and on Valkey,
reading a value here does not mark it as recently used.

For command-line tools: one thread, calls block within bounds, and failures raise `RedisAdminError`,
without credentials.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import Enum
from itertools import islice
from typing import Any, TypeVar

from lmcache_connector.storage.chunk_codec import HEADER_BYTES, MAX_PAYLOAD_BYTES
from lmcache_connector.storage.redis.client.dial import (
    CONNECTION_ERRORS,
    REDIRECTIONS,
    AuthenticationError,
    Client,
    NoPermissionError,
    ResponseError,
    is_wrong_type,
    set_reply_timeout,
)
from lmcache_connector.storage.redis.config import RedisTierConfig
from lmcache_connector.storage.redis.topology import Node, make_topology
from lmcache_connector.storage.redis.value_names import ValueName, parse_value_name, scan_pattern

_T = TypeVar("_T")
_SCAN_COUNT = 512
_BATCH = 256
# Values whose lengths one round trip asks for, before each value is read.
_READ_BATCH = 8
# For the first reply: a slower server is no Redis, or not the intended one.
_GREETING_SECONDS = 5.0
# For later replies: SCAN on a large server takes time.
_ANSWER_SECONDS = 60.0
# Bytes of a value per command: by default, only values of a single layer may be larger.
_PIECE_BYTES = 4 << 20
# Limit of the replies to one command: one such piece, or some hundred names or headers.
_MAX_BYTES = _PIECE_BYTES + (1 << 20)


_UNKNOWN_HOST = "this machine cannot resolve the host name: correct it"
# Error text, in lower case, and hint; the first match applies.
_HINTS = (
    ("certificate", "use rediss:// and name the CA: ?ssl_ca_certs=/path/to/ca.pem"),
    ("handshake", "this port speaks no TLS: use redis://, or the port of the server that does"),
    ("wrong_version", "this port speaks no TLS: use redis://, or the port of the server that does"),
    ("ssl", "use rediss:// and name the CA: ?ssl_ca_certs=/path/to/ca.pem"),
    ("cluster support disabled", "this server is no cluster: use redis:// without +cluster"),
    ("cluster is down", "start the lost masters, or set cluster-require-full-coverage no"),
    ("'sentinel'", "this is not a Sentinel: use redis://, or the port of a Sentinel (26379)"),
    ("db index", "the server has fewer databases: end the URL with a smaller number (0 to 15)"),
    ("refused", "start the server, or correct host and port; a container must publish its port"),
    ("timed out", "the server does not answer: check firewalls and the server's load"),
    ("timeout", "the server does not answer: check firewalls and the server's load"),
    ("name or service", _UNKNOWN_HOST),
    ("resolution", _UNKNOWN_HOST),
    ("nodename", _UNKNOWN_HOST),
    ("http/", "an HTTP server answers here: correct host and port"),
    ("names no master", "correct the name of the master, the last part of the URL"),
    ("read only replica", "this server is a replica: name its master"),
    ("unix socket", "run this on the engine's host, on its socket: unix:///PATH/TO/NAME.sock"),
    (
        "closed",
        "is this a Redis? It hangs up: it may need TLS (rediss://), or be in protected mode",
    ),
    ("reset", "is this a Redis? It hangs up: it may need TLS (rediss://), or be in protected mode"),
)


class RedisAdminError(Exception):
    """A failed operation; ``hint`` says what the user can do."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """A server's own figures. Sizes in bytes; None for figures it does not report."""

    node: Node
    version: str | None
    used_bytes: int | None
    max_bytes: int | None
    policy: str | None
    evicted_keys: int | None


class Unreadable(Enum):
    """Why a value cannot be one of ours, named as the metrics name such faults."""

    WRONG_TYPE = "wrong_type"
    OVERSIZED = "oversized_payload"


@dataclass(frozen=True, slots=True)
class StoredValue:
    """``header`` is the value's first 128 bytes. ``ttl_seconds`` is None if it does not expire.
    ``idle_seconds``: since its last use; None if the server does not tell."""

    node: Node
    raw_name: bytes
    name: ValueName
    num_bytes: int
    ttl_seconds: float | None
    idle_seconds: int | None
    header: bytes


class RedisAdmin:
    """A context manager. Methods may raise `RedisAdminError`. ``clock`` returns seconds."""

    def __init__(
        self, config: RedisTierConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config
        greeting = replace(config, read_timeout_seconds=_GREETING_SECONDS)
        self._topology = make_topology(greeting, clock)
        self._clients: dict[Node, Client] = {}

    def __enter__(self) -> RedisAdmin:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for client in self._clients.values():
            client.close()

    def nodes(self) -> tuple[Node, ...]:
        """Connect to every server that holds values, and return their nodes."""
        with self._translated():
            self._topology.prepare()
        for node in self._topology.nodes():
            self._client(node)
        return self._topology.nodes()

    def facts(self, node: Node) -> ServerFacts:
        with self._translated():
            try:
                info = self._client(node).info("everything")
            except ResponseError:
                info = {}
        return ServerFacts(
            node=node,
            version=info.get("valkey_version") or info.get("redis_version"),
            used_bytes=info.get("used_memory"),
            max_bytes=info.get("maxmemory"),
            policy=info.get("maxmemory_policy"),
            evicted_keys=info.get("evicted_keys"),
        )

    def num_keys(self) -> int:
        """The number of all keys on all servers: an upper bound for a progress bar."""
        with self._translated():
            return sum(self._client(node).dbsize() for node in self.nodes())

    def values(self, namespace: str | None, key_prefix: str = "") -> Iterator[StoredValue]:
        """All values without payload. Skips those that expire meanwhile or are no strings."""
        for node in self.nodes():
            for names in _batches(self._names(node, namespace, key_prefix), _BATCH):
                yield from self._describe(node, names)

    def payloads(
        self, namespace: str | None
    ) -> Iterator[tuple[bytes, ValueName, bytes | Unreadable | None]]:
        """``(raw name, name, whole value)`` of all values; None for one that has expired meanwhile,
        or moves to another node."""
        for node in self.nodes():
            for names in _batches(self._names(node, namespace), _READ_BATCH):
                with self._translated():
                    pipe = self._client(node).pipeline(transaction=False)
                    for raw, _ in names:
                        pipe.strlen(raw)
                    lengths = pipe.execute(raise_on_error=False)
                    for (raw, name), length in zip(names, lengths, strict=True):
                        try:
                            yield raw, name, self._payload(node, raw, length)
                        except REDIRECTIONS:
                            yield raw, name, None

    def _names(
        self, node: Node, namespace: str | None, key_prefix: str = ""
    ) -> Iterator[tuple[bytes, ValueName]]:
        """Raw and parsed names of the node's values, each once."""
        pattern, seen = scan_pattern(namespace, key_prefix), set[bytes]()
        with self._translated():
            for raw in self._client(node).scan_iter(pattern, count=_SCAN_COUNT):
                name = None if raw in seen else parse_value_name(raw)  # SCAN may repeat a name
                # The pattern "a:*" also matches the namespace "a:b".
                if name is not None and name.is_in(namespace, key_prefix):
                    seen.add(raw)
                    yield raw, name

    def _payload(self, node: Node, raw: bytes, length: Any) -> bytes | Unreadable | None:
        if is_wrong_type(length):
            return Unreadable.WRONG_TYPE
        if isinstance(length, Exception):
            raise length
        if length > HEADER_BYTES + MAX_PAYLOAD_BYTES:
            return Unreadable.OVERSIZED
        client, starts = self._client(node), range(0, length, _PIECE_BYTES)
        if len(starts) > 1:
            return b"".join(client.getrange(raw, i, i + _PIECE_BYTES - 1) for i in starts)
        value: bytes | None = client.get(raw)
        return value

    def unlink_anywhere(self, names: Sequence[bytes]) -> int:
        """Remove values on any node; returns how many existed. One command per value, since a
        cluster node accepts only keys of one slot per command."""
        by_node: dict[Node, list[bytes]] = {}
        for name in names:
            node = self._topology.node_of(name)
            if node is not None:
                by_node.setdefault(node, []).append(name)
        num_removed = 0
        with self._translated():
            for node, group in by_node.items():
                pipe = self._client(node).pipeline(transaction=False)
                for name in group:
                    pipe.unlink(name)
                num_removed += sum(pipe.execute())
        return num_removed

    def _describe(
        self, node: Node, names: Sequence[tuple[bytes, ValueName]]
    ) -> Iterator[StoredValue]:
        with self._translated():
            pipe = self._client(node).pipeline(transaction=False)
            for raw, _ in names:
                # IDLETIME first: on old servers the other commands reset it.
                pipe.object("IDLETIME", raw).pttl(raw).strlen(raw).getrange(
                    raw, 0, HEADER_BYTES - 1
                )
            replies = iter(pipe.execute(raise_on_error=False))
        for raw, name in names:
            idle, ttl, length, header = islice(replies, 4)
            for reply in (ttl, length, header):
                has_no_pttl = reply is ttl and not isinstance(reply, NoPermissionError)
                is_skipped = isinstance(reply, REDIRECTIONS) or is_wrong_type(reply)
                if isinstance(reply, ResponseError) and not (has_no_pttl or is_skipped):
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

    def _client(self, node: Node) -> Client:
        if node not in self._clients:
            with self._translated():
                self._clients[node] = self._topology.connect(node, _MAX_BYTES, _prepare)
        return self._clients[node]

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except CONNECTION_ERRORS as error:
            raise self._translate(error) from error

    def _translate(self, error: Exception) -> RedisAdminError:
        address = self._config.address
        return RedisAdminError(f"{address}: {address.redact(error)}", _hint(error))


def _prepare(client: Client) -> None:
    with suppress(ResponseError):  # unknown before Redis 7.2
        client.client_no_touch("ON")
    with suppress(NoPermissionError):  # an engine's user
        client.ping()  # raises while the server loads its data
    set_reply_timeout(client, _ANSWER_SECONDS)


def _hint(error: Exception) -> str:
    text = str(error).lower()
    if isinstance(error, NoPermissionError):
        return (
            "give --redis-url with a user that has these rights (from Redis 7.2 on, "
            "+client|no-touch too): ACL SETUSER NAME ~lmc:* +get +getex +set +strlen +exists "
            "+pexpire +unlink +select +getrange +pttl +object|idletime +scan "
            "+dbsize +info +ping"
        )
    if isinstance(error, AuthenticationError):
        return (
            "set the password in the URL: redis://:PASSWORD@HOST, or redis://USER:PASSWORD@HOST "
            "(best as env:NAME)"
        )
    for words, hint in _HINTS:
        if words in text:
            return hint
    return "see the server's own log"


def _batches(items: Iterator[_T], size: int) -> Iterator[list[_T]]:
    while batch := list(islice(items, size)):
        yield batch
