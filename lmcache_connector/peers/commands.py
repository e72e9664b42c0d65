"""What a peer server answers: a read-only Redis whose values are the chunks of one rank's CPU tier.

====================================  ==========================================================
``GET NAME``, ``GETRANGE``            a value, see docs/formats.md; ``nil`` for what is not here
``EXISTS NAME...``, ``STRLEN NAME``   rank 0 answers ``EXISTS`` for the values of all ranks
``HOLDS NAMESPACE KEYS``              for each of up to 512 keys, one after the other, whether its
                                      chunk is here, or is to be with another rank: ``1`` or ``0``
``PEER``                              a line about this instance, see :class:`Greeting`
``TRANSFER MS READER ID...``          of each KV transfer how the keys of its chunks begin, once it
                                      is over; 0 before, ``nil`` if it is unknown. While none is
                                      over, the answer takes up to ``MS``
``DONE READER ID...``                 the reader needs these no more
``MAP``                               on a Unix socket: the memory of the CPU tier, as a descriptor
``LEASE NAME...``                     where in it each value lies (8 bytes), and its header, or
                                      ``nil``; they stay until the next ``LEASE``, or ``RELEASE``
``SCAN``, ``DBSIZE``                  names of whole heads, after ``AUTH`` alone
``PING``, ``AUTH``, ``SELECT 0``      as in Redis
``PTTL``, ``INFO``                    values have no lifetime; nothing is told of the server
====================================  ==========================================================

All else is an error reply. Pure but for the chunks that it leases.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import chain
from typing import TYPE_CHECKING, Protocol

from lmcache_connector.keys.prefix_hash import CHUNK_KEY_BYTES
from lmcache_connector.storage.chunk_codec import (
    HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    Sealer,
    encode_header,
    stripe_header,
)
from lmcache_connector.storage.geometry import ChunkGeometry, PartGeometries, Stripe
from lmcache_connector.storage.redis.client.resp import CRLF, bulk_length, bulk_line
from lmcache_connector.storage.redis.value_names import chunk_tag, parse_value_name, stripe_suffix

if TYPE_CHECKING:
    from lmcache_connector.peers.transfers import Transfers

MAX_COMMAND_BYTES = 1 << 18
MAX_WORDS = 2_500
"""Of one command: the names of 128 heads in 19 pieces each."""
MAX_ASKED = 512
"""Keys in one ``HOLDS``: no line is longer than the answer."""
KEY_PREFIX_BYTES = 8
"""Of a chunk's key, told to readers of a KV transfer: who knows the prompt knows the rest, and
nobody else learns the name of a chunk."""
_MAX_PATTERN_BYTES = 256
_SCAN_MOST = 1024
_MAX_WAIT_MS = 10_000
_MAX_HEADERS = 256  # kept of a chunk: readers may ask for any run of its layers
_MAX_LEASED_BYTES = 64 << 20  # by one command, or one value
# Matching takes time to that power of a name's length, and nobody else runs meanwhile.
_MAX_STARS = 2
_STAR = re.compile(rb"(?<!\\)\*")
_ENGINE_ID = re.compile(r"[\x21-\x7e]{1,256}")


class ProtocolError(Exception):
    """A client does not speak RESP2, or says too much at once. The message is for the client."""


class Lease(Protocol):
    """A chunk that stays as it is, and where it is, until it is released once."""

    @property
    def view(self) -> memoryview: ...

    @property
    def offset(self) -> int:
        """Of the view in the memory that `Chunks.memory` is."""
        ...

    @property
    def headers(self) -> dict[Stripe, bytes]:
        """Those made so far, of values of this chunk: kept as long as its memory."""
        ...

    def release(self) -> None: ...


class Chunks(Protocol):
    """The chunks of one rank's CPU tier. Thread-safe. Keys name parts of chunks. ``memory``: the
    descriptor of all of their memory, if others may map it."""

    @property
    def memory(self) -> int | None: ...

    def holds(self, key: bytes) -> bool: ...

    def is_elsewhere(self, key: bytes) -> bool:
        """Whether another rank stores it for this one too."""
        ...

    def lease(self, key: bytes) -> Lease | None:
        """``None`` if it is not there."""
        ...

    def all_keys(self) -> list[bytes]:
        """The keys of all chunks."""
        ...


class NotOver(Enum):
    """What is known of a KV transfer before its end."""

    UNKNOWN = "unknown"
    COMING = "coming"


@dataclass(frozen=True, slots=True)
class Greeting:
    """Whom a reader has reached: ``num_ranks`` serve the instance's chunks, at as many ports.
    ``engine_id`` is vLLM's, the same for all ranks of an engine."""

    num_ranks: int
    engine_id: str

    def pack(self) -> bytes:
        return f"lmcache-connector {self.num_ranks} {self.engine_id}".encode()

    @classmethod
    def parse(cls, line: object) -> Greeting:
        """Raises ``ValueError`` for what no peer server says."""
        words = line.decode("ascii", "replace").split(" ") if isinstance(line, bytes) else []
        if len(words) != 3 or words[0] != "lmcache-connector" or not words[1].isdecimal():
            raise ValueError("it is no peer server")
        if len(words[1]) > 6 or int(words[1]) == 0 or not _ENGINE_ID.fullmatch(words[2]):
            raise ValueError("it is no peer server")
        return cls(int(words[1]), words[2])


@dataclass(frozen=True, slots=True)
class Reply:
    """``parts`` are sent one after the other; ``lease`` is released when all of them are sent.
    ``is_early``: later it would say more. ``held``: leases that the client has from now on, until
    a later answer ``releases`` them. ``descriptor`` goes with the parts."""

    parts: tuple[bytes | memoryview, ...]
    lease: Lease | None = None
    is_early: bool = False
    held: tuple[Lease, ...] = ()
    releases: bool = False
    descriptor: int | None = None


@dataclass(slots=True)
class Client:
    """What is known of one connection. ``is_local``: it is the same user's, on this host.
    ``names``: of a ``SCAN`` that goes on."""

    is_trusted: bool = False
    is_local: bool = False
    num_refused: int = 0
    names: list[bytes] = field(default_factory=list)


OK = Reply((b"+OK\r\n",))
NIL = Reply((b"$-1\r\n",))
_NOT_OVER = {NotOver.UNKNOWN: b"$-1\r\n", NotOver.COMING: b":0\r\n"}


def _error(message: str) -> Reply:
    return Reply((f"-ERR {message}\r\n".encode("ascii", "backslashreplace"),))


def _number(value: int) -> Reply:
    return Reply((b":%d\r\n" % value,))


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def _is_number(word: bytes) -> bool:
    """One that is quick to read: Python refuses thousands of digits, and takes long for fewer."""
    return word.isdigit() and len(word) <= 18


def _bulk(value: bytes) -> bytes:
    return bulk_line(len(value)) + value + CRLF


class Commands:
    """Answers the commands of all clients. One thread calls it, but for `seal`.

    ``geometries``: of all ranks, ``rank`` the one whose ``chunks`` these are. Values are sealed
    when they are first sent: their bytes have not changed since they were stored.
    ``max_payload_bytes``: of the values that ``SCAN`` names, and that readers ask for.
    ``secret``: what ``AUTH`` wants; without one nobody is trusted.
    """

    def __init__(
        self,
        chunks: Chunks,
        geometries: Sequence[PartGeometries],
        rank: int,
        *,
        namespace: str,
        sealer: Sealer,
        greeting: Greeting,
        max_payload_bytes: int,
        transfers: Transfers,
        secret: bytes | None = None,
    ) -> None:
        self._chunks = chunks
        self._transfers = transfers
        self._own = geometries[rank]
        # Rank 0 speaks for the others: what it holds they hold, but for the last moments.
        self._known = geometries if rank == 0 else (self._own,)
        self._namespace = namespace
        self._sealer = sealer
        self._greeting = greeting
        self._max_payload_bytes = max_payload_bytes
        self._secret = secret
        self._verbs: Mapping[bytes, Callable[[Client, list[bytes]], Reply]] = {
            b"GET": self._get,
            b"GETRANGE": self._getrange,
            b"EXISTS": self._exists,
            b"STRLEN": self._strlen,
            b"HOLDS": self._holds,
            b"PEER": lambda client, words: Reply((_bulk(self._greeting.pack()),)),
            b"PING": lambda client, words: Reply((b"+PONG\r\n",)),
            b"AUTH": self._auth,
            b"SELECT": lambda client, words: OK if words == [b"0"] else _error("one database"),
            b"PTTL": lambda client, words: _number(-1),
            b"INFO": lambda client, words: Reply((_bulk(b""),)),
            b"SCAN": self._scan,
            b"DBSIZE": self._dbsize,
            b"TRANSFER": self._transfer,
            b"DONE": self._done,
            b"MAP": self._map,
            b"LEASE": self._lease,
            b"RELEASE": lambda client, words: replace(OK, releases=True),
        }

    def seal(self, keys: Iterable[bytes]) -> None:
        """Make the headers that whole chunks will be sent with, ahead of need. From any thread."""
        for key in keys:
            if (lease := self._chunks.lease(key)) is not None:
                try:
                    for stripe in self._own.of(key).stripes(self._max_payload_bytes):
                        self._header(lease, key, stripe)
                finally:
                    lease.release()

    def answer(self, client: Client, words: list[bytes]) -> Reply:
        """``words``: a command and its arguments. Raises :class:`ProtocolError` for a client that
        guesses secrets."""
        verb = self._verbs.get(words[0].upper())
        if verb is None:
            return _error("unknown command; this server only serves chunks to read")
        return verb(client, words[1:])

    @staticmethod
    def patience(words: list[bytes]) -> float:
        """Seconds that a client waits for an answer that would say more later."""
        if words[0].upper() != b"TRANSFER" or len(words) < 2 or not words[1].isdigit():
            return 0.0
        return min(int(words[1][:6]), _MAX_WAIT_MS) / 1000

    def tend(self) -> None:
        """Called once in a while."""
        self._transfers.tend()

    # -- KV transfers ----------------------------------------------------------------------------

    def _transfer(self, client: Client, words: list[bytes]) -> Reply:
        if len(words) < 3:
            return _error("how long, who, and which")
        states = [self._transfers.state(words[1], _text(name)) for name in words[2:]]
        parts = (_bulk(s) if isinstance(s, bytes) else _NOT_OVER[s] for s in states)
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
        """Both ends count, as in Redis; none of them from the end."""
        if len(words) != 3 or not (_is_number(words[1]) and _is_number(words[2])):
            return _error("a name, and two places from the beginning")
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
        self, name: bytes, leases: dict[bytes, Lease]
    ) -> tuple[Lease, Stripe, bytes] | None:
        """A chunk, which may be among the ``leases`` by key already, what the name says of it, and
        the header of that."""
        found = self._find(name, (self._own,))
        if found is None or found[2].num_bytes > MAX_PAYLOAD_BYTES:
            return None
        key, _, stripe = found
        if (lease := leases.get(key) or self._chunks.lease(key)) is None:
            return None
        leases[key] = lease
        return lease, stripe, self._header(lease, key, stripe)

    def _header(self, lease: Lease, key: bytes, stripe: Stripe) -> bytes:
        if (known := lease.headers.get(stripe)) is not None:
            return known
        payload = lease.view[stripe.offset : stripe.offset + stripe.num_bytes]
        expected = stripe_header(self._own.of(key), stripe, key, keyed=self._sealer.keyed)
        header = encode_header(expected, payload, self._sealer)
        if len(lease.headers) < _MAX_HEADERS:
            lease.headers[stripe] = header
        return header

    def _map(self, client: Client, words: list[bytes]) -> Reply:
        if not client.is_local or self._chunks.memory is None:
            return _error("no memory is handed over here")
        return replace(OK, descriptor=self._chunks.memory)

    def _lease(self, client: Client, words: list[bytes]) -> Reply:
        if not client.is_local or self._chunks.memory is None:
            return _error("no memory is handed over here")
        leases, answers = dict[bytes, Lease](), [b"*%d\r\n" % len(words)]
        for name in words:
            is_much = sum(len(lease.view) for lease in leases.values()) >= _MAX_LEASED_BYTES
            if is_much or (found := self._leased(name, leases)) is None:
                answers.append(b"$-1\r\n")
                continue
            lease, stripe, header = found
            answers.append(_bulk((lease.offset + stripe.offset).to_bytes(8, "little") + header))
        return Reply((b"".join(answers),), held=tuple(leases.values()), releases=True)

    def _exists(self, client: Client, words: list[bytes]) -> Reply:
        found = (self._find(name, self._known) for name in words)
        return _number(sum(each is not None and self._chunks.holds(each[0]) for each in found))

    def _holds(self, client: Client, words: list[bytes]) -> Reply:
        if len(words) != 2 or not words[1] or len(words[1]) % CHUNK_KEY_BYTES:
            return _error("a namespace, and whole keys")
        if len(words[1]) > MAX_ASKED * CHUNK_KEY_BYTES:
            return _error("fewer keys")
        keys = (words[1][i : i + CHUNK_KEY_BYTES] for i in range(0, len(words[1]), CHUNK_KEY_BYTES))
        is_ours, chunks = words[0] == self._namespace.encode(), self._chunks
        held = (is_ours and (chunks.holds(key) or chunks.is_elsewhere(key)) for key in keys)
        return Reply((b"+", bytes(b"01"[each] for each in held), CRLF))

    def _strlen(self, client: Client, words: list[bytes]) -> Reply:
        found = self._find(words[0], (self._own,)) if words else None
        if found is None or not self._chunks.holds(found[0]):
            return _number(0)
        return _number(HEADER_BYTES + found[2].num_bytes)

    def _find(
        self, name: bytes, ranks: Sequence[PartGeometries]
    ) -> tuple[bytes, ChunkGeometry, Stripe] | None:
        """What a name says, if these ranks may have it: any run of their layers, of one head."""
        value = parse_value_name(name) if len(name) <= _MAX_PATTERN_BYTES else None
        if value is None or value.namespace != self._namespace:
            return None
        for rank in ranks:
            try:
                geometry = rank.of(value.key)
                return (
                    value.key,
                    geometry,
                    geometry.stripe(value.layer_start, value.layer_end, value.shard),
                )
            except ValueError:
                continue
        return None

    # -- who asks, and what there is ---------------------------------------------------------------

    def _auth(self, client: Client, words: list[bytes]) -> Reply:
        if self._secret is None:
            return _error("no secret is set here")
        if words and len(words) <= 2 and hmac.compare_digest(words[-1], self._secret):
            client.is_trusted = True
            return OK
        client.num_refused += 1
        if client.num_refused >= 3:
            raise ProtocolError("too many wrong secrets")
        return Reply((b"-WRONGPASS invalid secret\r\n",))

    def _scan(self, client: Client, words: list[bytes]) -> Reply:
        if not client.is_trusted:
            return Reply((b"-NOPERM names are told after AUTH\r\n",))
        options = dict(zip((w.upper() for w in words[1::2]), words[2::2], strict=False))
        cursor, count = words[0] if words else b"", options.get(b"COUNT", b"10")
        pattern = options.get(b"MATCH", b"*")
        if not (_is_number(cursor) and _is_number(count)):
            return _error("a cursor and a count")
        if len(pattern) > _MAX_PATTERN_BYTES or len(_STAR.findall(pattern)) > _MAX_STARS:
            return _error("a shorter pattern")
        if cursor == b"0":
            client.names = list(chain.from_iterable(map(self._names, self._chunks.all_keys())))
        first = int(cursor)
        end = first + max(1, min(int(count), _SCAN_MOST))
        matches = re.compile(_as_regex(pattern), re.DOTALL).fullmatch
        found = [name for name in client.names[first:end] if matches(name)]
        if end >= len(client.names):
            client.names, end = [], 0
        after = _bulk(b"%d" % end)
        listed = b"*%d\r\n" % len(found) + b"".join(map(_bulk, found))
        return Reply((b"*2\r\n" + after + listed,))

    def _dbsize(self, client: Client, words: list[bytes]) -> Reply:
        if not client.is_trusted:
            return Reply((b"-NOPERM numbers are told after AUTH\r\n",))
        return _number(sum(1 for key in self._chunks.all_keys() for _ in self._names(key)))

    def _names(self, key: bytes) -> Iterator[bytes]:
        tag = chunk_tag(self._namespace, key)
        for stripe in self._own.of(key).stripes(self._max_payload_bytes):
            yield tag + stripe_suffix(stripe)


def _as_regex(pattern: bytes) -> bytes:
    """Of a glob of ``*``, ``?`` and escapes; brackets stand for themselves."""
    tokens = re.findall(rb"\\.|.", pattern, re.DOTALL)
    special = {b"*": b".*", b"?": b"."}
    return b"".join(special.get(t) or re.escape(t[1:] if len(t) == 2 else t) for t in tokens)


class CommandParser:
    """Cuts what a client sends into commands: arrays of bulk strings, within bounds."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._place = 0  # parsed up to here, as the words say
        self._words: list[bytes] = []
        self._num_left = 0

    def feed(self, data: bytes) -> None:
        self._received += data

    @property
    def num_bytes(self) -> int:
        """Received, and not yet a command that was taken."""
        return len(self._received)

    def next(self) -> list[bytes] | None:
        """The next whole command; raises :class:`ProtocolError` for what will never be one."""
        while True:
            if not self._num_left:
                line = self._line(b"*")
                if line is None:
                    return None
                self._num_left = self._length(line, b"*", MAX_WORDS)
                if not self._num_left:
                    continue
            before = self._place
            line = self._line(b"$")
            if line is None:
                return None
            num_bytes = self._length(line, b"$", MAX_COMMAND_BYTES)
            end = self._place + num_bytes
            if end + len(CRLF) > MAX_COMMAND_BYTES:
                raise ProtocolError("a command that is too long")
            if len(self._received) < end + len(CRLF):
                self._place = before
                return None
            if self._received[end : end + len(CRLF)] != CRLF:
                raise ProtocolError("a string of another length")
            self._words.append(bytes(self._received[self._place : end]))
            self._place = end + len(CRLF)
            self._num_left -= 1
            if not self._num_left:
                words, self._words = self._words, []
                del self._received[: self._place]
                self._place = 0
                return words

    def _line(self, kind: bytes) -> bytes | None:
        """Raises for a line of another kind, or without an end."""
        if len(self._received) > self._place and self._received[self._place] != kind[0]:
            raise ProtocolError("no command")
        end = self._received.find(CRLF, self._place, self._place + 32)
        if end < 0:
            if len(self._received) - self._place >= 32:
                raise ProtocolError("a line without an end")
            return None
        line = bytes(self._received[self._place : end])
        self._place = end + len(CRLF)
        return line

    def _length(self, line: bytes, kind: bytes, most: int) -> int:
        number = bulk_length(b"$" + line[1:])
        if number is None or number > most:
            raise ProtocolError("a length that is not served")
        return number
