"""Commands of a peer server: a read-only Redis whose values are the chunks of one rank's CPU tier.

====================================  ==========================================================
``GET NAME``, ``GETRANGE``            a value (docs/formats.md); ``nil`` if its chunk is not cached
``EXISTS NAME...``, ``STRLEN NAME``   as in Redis
``HOLDS NAMESPACE KEYS``              for each of up to 512 concatenated keys ``1`` if this rank
                                      caches the chunk or leaves it to its owner rank, else ``0``
``PEER``                              one line about this instance, see :class:`Greeting`
``TRANSFER MS READER ID...``          per KV transfer: the key prefixes of its pinned chunks if it
                                      is complete, 0 if it is not yet, ``nil`` if it is unknown. The
                                      reply waits up to ``MS`` for the first complete transfer
``DONE READER ID...``                 the reader no longer needs these transfers
``MAP``                               Unix socket only: the descriptor of the CPU tier's memory
``LEASE NAME...``                     Unix socket only: one string, per value its offset in that
                                      memory and its header, see ``PLACE``. The chunks stay until
                                      the next ``LEASE`` but one or ``RELEASE``
``SCAN``, ``DBSIZE``                  Unix socket only: names, and number, of the values
``PING``, ``SELECT 0``, ``QUIT``      as in Redis
``PTTL``, ``INFO``                    no expiry; an empty string
====================================  ==========================================================

Any other command gets an error reply. The only side effect is on leases and KV transfers.
"""

from __future__ import annotations

import fnmatch
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import chain
from typing import TYPE_CHECKING, Protocol
from urllib.parse import quote, unquote

from lmcache_connector.keys.prefix_hash import CHUNK_KEY_BYTES
from lmcache_connector.storage.chunk_codec import (
    HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    Sealer,
    encode_header,
    stripe_header,
)
from lmcache_connector.storage.geometry import PartGeometries, Stripe
from lmcache_connector.storage.redis.client.resp import CRLF, bulk_line
from lmcache_connector.storage.redis.value_names import chunk_tag, parse_value_name, stripe_suffix

if TYPE_CHECKING:
    from lmcache_connector.peers.transfers import Transfers

MAX_ASKED = 512
"""Keys in one ``HOLDS``, so that the reply fits into one line."""
KEY_PREFIX_BYTES = 8
"""Readers of a KV transfer get only this much of each chunk key. A reader that knows the prompt
can derive the rest; nobody else learns a chunk's name."""
PLACE, NOWHERE = struct.Struct(f"<Q{HEADER_BYTES}s"), (1 << 64) - 1
"""Where a value lies in mapped memory, or ``NOWHERE``, and its header."""
_MAX_NAME_BYTES = 256
_SCAN_MOST = 1024
_MAX_WAIT_MS = 10_000
_MAX_HEADERS = 256  # cached per chunk: readers may ask for any run of its layers
# Beyond these bytes a ``LEASE`` pins no more chunks, but always two: a batch may span two.
_MAX_LEASED_BYTES, _LEAST_LEASED_CHUNKS = 64 << 20, 2
_ENGINE_ID = re.compile(r"[\x21-\x7e]{1,256}")


class Lease(Protocol):
    """Pins a chunk: its bytes and address do not change until `release`, called once."""

    @property
    def view(self) -> memoryview: ...

    @property
    def offset(self) -> int:
        """Where `view` begins in `Chunks.memory`."""
        ...

    @property
    def headers(self) -> dict[Stripe, bytes]:
        """Encoded headers of this chunk's values, cached as long as the chunk."""
        ...

    def release(self) -> None: ...


class Chunks(Protocol):
    """The chunks of one rank's CPU tier. Thread-safe. Keys name parts of chunks. ``memory``: the
    descriptor of the whole pool if peers may map it."""

    @property
    def memory(self) -> int | None: ...

    def holds(self, key: bytes) -> bool: ...

    def is_read_from_owner(self, key: bytes) -> bool:
        """Whether another rank stores the chunk on behalf of this one."""
        ...

    def lease(self, key: bytes) -> Lease | None: ...

    def all_keys(self) -> list[bytes]: ...


class IncompleteTransfer(Enum):
    """State of a KV transfer that is not complete."""

    UNKNOWN = "unknown"
    COMING = "coming"


@dataclass(frozen=True, slots=True)
class Greeting:
    """Reply to ``PEER``: ``num_ranks`` peer servers of the instance listen on consecutive ports.
    ``engine_id`` is vLLM's, equal on all ranks."""

    num_ranks: int
    engine_id: str

    def pack(self) -> bytes:
        return f"lmcache-connector {self.num_ranks} {quote(self.engine_id, '')}".encode()

    @classmethod
    def parse(cls, line: object) -> Greeting:
        """Raises ``ValueError`` if ``line`` is not a greeting."""
        words = line.decode("ascii", "replace").split(" ") if isinstance(line, bytes) else []
        if len(words) != 3 or words[0] != "lmcache-connector" or not words[1].isdecimal():
            raise ValueError("it is not a peer server")
        if len(words[1]) > 6 or int(words[1]) == 0 or not _ENGINE_ID.fullmatch(words[2]):
            raise ValueError("it is not a peer server")
        return cls(int(words[1]), unquote(words[2]))


@dataclass(frozen=True, slots=True)
class Reply:
    """``parts`` are sent in order, then ``lease`` is released. ``is_early``: a later reply may
    contain more. ``held``: leases that the client keeps. ``kept``: number of the latest earlier
    replies whose ``held`` leases it keeps; ``None``: all. ``descriptor`` is sent with the parts."""

    parts: tuple[bytes | memoryview, ...]
    lease: Lease | None = None
    is_early: bool = False
    held: tuple[Lease, ...] = ()
    kept: int | None = None
    descriptor: int | None = None


@dataclass(slots=True)
class Client:
    """State of one connection. ``is_local``: over the Unix socket. ``names``: of an unfinished
    ``SCAN``."""

    is_local: bool = False
    names: list[bytes] = field(default_factory=list)


OK = Reply((b"+OK\r\n",))
NIL = Reply((b"$-1\r\n",))
_LOCAL_ONLY = Reply((b"-ERR names are listed on the Unix socket only\r\n",))
_INCOMPLETE = {IncompleteTransfer.UNKNOWN: b"$-1\r\n", IncompleteTransfer.COMING: b":0\r\n"}


def _error(message: str) -> Reply:
    return Reply((f"-ERR {message}\r\n".encode("ascii", "backslashreplace"),))


def _number(value: int) -> Reply:
    return Reply((b":%d\r\n" % value,))


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def _is_number(word: bytes) -> bool:
    """Bounded: Python converts long digit strings slowly, and refuses thousands of digits."""
    return word.isdigit() and len(word) <= 18


def _bulk(value: bytes) -> bytes:
    return bulk_line(len(value)) + value + CRLF


class Commands:
    """Answers the commands of all clients. One thread calls everything except `seal`.

    ``geometries``: of this rank's chunks. `seal` or the first read seals a value; the header is
    kept, up to a limit per chunk, since stored bytes do not change. ``max_payload_bytes``: of the
    values that ``SCAN`` lists and readers request.
    """

    def __init__(
        self,
        chunks: Chunks,
        geometries: PartGeometries,
        *,
        namespace: str,
        sealer: Sealer,
        greeting: Greeting,
        max_payload_bytes: int,
        transfers: Transfers,
    ) -> None:
        self._chunks = chunks
        self._transfers = transfers
        self._geometries = geometries
        self._namespace = namespace
        self._sealer = sealer
        self._greeting = greeting
        self._max_payload_bytes = max_payload_bytes
        self._verbs: Mapping[bytes, Callable[[Client, list[bytes]], Reply]] = {
            b"GET": self._get,
            b"GETRANGE": self._getrange,
            b"EXISTS": self._exists,
            b"STRLEN": self._strlen,
            b"HOLDS": self._holds,
            b"PEER": lambda client, words: Reply((_bulk(self._greeting.pack()),)),
            b"PING": lambda client, words: Reply((b"+PONG\r\n",)),
            b"SELECT": lambda client, words: OK if words == [b"0"] else _error("one database"),
            b"PTTL": lambda client, words: _number(-1),
            b"INFO": lambda client, words: Reply((_bulk(b""),)),
            b"SCAN": self._scan,
            b"DBSIZE": self._dbsize,
            b"TRANSFER": self._transfer,
            b"DONE": self._done,
            b"MAP": self._map,
            b"LEASE": self._lease,
            b"RELEASE": lambda client, words: replace(OK, kept=0),
        }

    def seal(self, keys: Iterable[bytes]) -> None:
        """Encode headers of whole chunks ahead of the first read. Thread-safe."""
        for key in keys:
            if (lease := self._chunks.lease(key)) is not None:
                try:
                    for stripe in self._geometries.of(key).stripes(self._max_payload_bytes):
                        self._header(lease, key, stripe)
                finally:
                    lease.release()

    def answer(self, client: Client, words: list[bytes]) -> Reply:
        """``words``: command name and arguments."""
        verb = self._verbs.get(words[0].upper())
        if verb is None:
            return _error("unknown command: this server only serves chunks")
        return verb(client, words[1:])

    @staticmethod
    def max_wait_seconds(words: list[bytes]) -> float:
        """Seconds the client is willing to wait for a reply that contains more."""
        if words[0].upper() != b"TRANSFER" or len(words) < 2 or not words[1].isdigit():
            return 0.0
        return min(int(words[1][:6]), _MAX_WAIT_MS) / 1000

    def maintain(self) -> None:
        self._transfers.maintain()

    # -- KV transfers ----------------------------------------------------------------------------

    def _transfer(self, client: Client, words: list[bytes]) -> Reply:
        if len(words) < 3:
            return _error("TRANSFER takes MS READER ID...")
        states = [self._transfers.state(words[1], _text(name)) for name in words[2:]]
        parts = (_bulk(s) if isinstance(s, bytes) else _INCOMPLETE[s] for s in states)
        is_early = not any(isinstance(state, bytes) for state in states)
        return Reply((b"*%d\r\n" % len(states) + b"".join(parts),), is_early=is_early)

    def _done(self, client: Client, words: list[bytes]) -> Reply:
        for name in words[1:]:
            self._transfers.done(words[0], _text(name))
        return OK

    # -- values ----------------------------------------------------------------------------------

    def _get(self, client: Client, words: list[bytes]) -> Reply:
        return self._value(words[0]) if len(words) == 1 else _error("one name")

    def _getrange(self, client: Client, words: list[bytes]) -> Reply:
        """Both ends are inclusive, as in Redis; negative offsets are refused."""
        if len(words) != 3 or not (_is_number(words[1]) and _is_number(words[2])):
            return _error("GETRANGE takes NAME START END, none negative")
        reply = self._value(words[0])
        if reply is NIL or reply.lease is None:
            return Reply((_bulk(b""),))
        first, end = int(words[1]), int(words[2]) + 1
        _, header, payload, _ = reply.parts
        cut = header[first:end], payload[max(0, first - HEADER_BYTES) : max(0, end - HEADER_BYTES)]
        return Reply((bulk_line(sum(map(len, cut))), *cut, CRLF), reply.lease)

    def _value(self, name: bytes) -> Reply:
        if (found := self._leased(name, {})) is None:
            return NIL
        lease, stripe, header = found
        payload = lease.view[stripe.offset : stripe.offset + stripe.num_bytes]
        return Reply((bulk_line(HEADER_BYTES + len(payload)), header, payload, CRLF), lease)

    def _leased(
        self, name: bytes, leases: dict[bytes, Lease], *, may_add: bool = True
    ) -> tuple[Lease, Stripe, bytes] | None:
        """The chunk's lease, and the stripe and header that ``name`` selects. Chunks that are not
        in ``leases`` are pinned and added if ``may_add``."""
        found = self._find(name)
        if found is None or found[1].num_bytes > MAX_PAYLOAD_BYTES:
            return None
        key, stripe = found
        lease = leases.get(key) or (self._chunks.lease(key) if may_add else None)
        if lease is None:
            return None
        leases[key] = lease
        return lease, stripe, self._header(lease, key, stripe)

    def _header(self, lease: Lease, key: bytes, stripe: Stripe) -> bytes:
        if (known := lease.headers.get(stripe)) is not None:
            return known
        payload = lease.view[stripe.offset : stripe.offset + stripe.num_bytes]
        expected = stripe_header(self._geometries.of(key), stripe, key, keyed=self._sealer.keyed)
        header = encode_header(expected, payload, self._sealer)
        if len(lease.headers) < _MAX_HEADERS:
            lease.headers[stripe] = header
        return header

    def _map(self, client: Client, words: list[bytes]) -> Reply:
        if not client.is_local or self._chunks.memory is None:
            return _error("this connection cannot map memory")
        return replace(OK, descriptor=self._chunks.memory)

    def _lease(self, client: Client, words: list[bytes]) -> Reply:
        if not client.is_local or self._chunks.memory is None:
            return _error("this connection cannot map memory")
        leases, num_bytes, answer = dict[bytes, Lease](), 0, bytearray()
        for name in words:
            before = len(leases)
            may_add = before < _LEAST_LEASED_CHUNKS or num_bytes < _MAX_LEASED_BYTES
            if (found := self._leased(name, leases, may_add=may_add)) is None:
                answer += PLACE.pack(NOWHERE, b"")
                continue
            lease, stripe, header = found
            num_bytes += len(lease.view) if len(leases) > before else 0
            answer += PLACE.pack(lease.offset + stripe.offset, header)
        return Reply((_bulk(bytes(answer)),), held=tuple(leases.values()), kept=1)

    def _exists(self, client: Client, words: list[bytes]) -> Reply:
        found = map(self._find, words)
        return _number(sum(each is not None and self._chunks.holds(each[0]) for each in found))

    def _holds(self, client: Client, words: list[bytes]) -> Reply:
        if len(words) != 2 or not words[1] or len(words[1]) % CHUNK_KEY_BYTES:
            return _error("HOLDS takes NAMESPACE and whole keys")
        if len(words[1]) > MAX_ASKED * CHUNK_KEY_BYTES:
            return _error("too many keys")
        keys = (words[1][i : i + CHUNK_KEY_BYTES] for i in range(0, len(words[1]), CHUNK_KEY_BYTES))
        is_ours, chunks = words[0] == self._namespace.encode(), self._chunks
        held = (is_ours and (chunks.holds(key) or chunks.is_read_from_owner(key)) for key in keys)
        return Reply((b"+", bytes(b"01"[each] for each in held), CRLF))

    def _strlen(self, client: Client, words: list[bytes]) -> Reply:
        found = self._find(words[0]) if words else None
        if found is None or not self._chunks.holds(found[0]):
            return _number(0)
        return _number(HEADER_BYTES + found[1].num_bytes)

    def _find(self, name: bytes) -> tuple[bytes, Stripe] | None:
        """Parse ``name``: one head and any run of layers of this rank."""
        value = parse_value_name(name) if len(name) <= _MAX_NAME_BYTES else None
        if value is None or value.namespace != self._namespace:
            return None
        try:
            geometry = self._geometries.of(value.key)
            return value.key, geometry.stripe(value.layer_start, value.layer_end, value.shard)
        except ValueError:
            return None

    # -- listing ---------------------------------------------------------------------------------

    def _scan(self, client: Client, words: list[bytes]) -> Reply:
        if not client.is_local:
            return _LOCAL_ONLY
        options = dict(zip((w.upper() for w in words[1::2]), words[2::2], strict=False))
        cursor, count = words[0] if words else b"", options.get(b"COUNT", b"10")
        pattern = options.get(b"MATCH", b"*")
        if not (_is_number(cursor) and _is_number(count)):
            return _error("a cursor and COUNT must be numbers")
        if len(pattern) > _MAX_NAME_BYTES:
            return _error("the pattern is too long")
        if cursor == b"0":
            client.names = list(chain.from_iterable(map(self._names, self._chunks.all_keys())))
        first = int(cursor)
        end = first + max(1, min(int(count), _SCAN_MOST))
        found = fnmatch.filter(client.names[first:end], pattern)
        if end >= len(client.names):
            client.names, end = [], 0
        after = _bulk(b"%d" % end)
        listed = b"*%d\r\n" % len(found) + b"".join(map(_bulk, found))
        return Reply((b"*2\r\n" + after + listed,))

    def _dbsize(self, client: Client, words: list[bytes]) -> Reply:
        if not client.is_local:
            return _LOCAL_ONLY
        return _number(sum(1 for key in self._chunks.all_keys() for _ in self._names(key)))

    def _names(self, key: bytes) -> Iterator[bytes]:
        tag = chunk_tag(self._namespace, key)
        for stripe in self._geometries.of(key).stripes(self._max_payload_bytes):
            yield tag + stripe_suffix(stripe)
