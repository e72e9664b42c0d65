"""The data plane's unit: some blocks of one layer, for consecutive KV heads.

::

    magic 4s | version u16 | digests u16 | bytes per digest u16 | reserved u16 | sequence u64 |
    ticket u64 | layer u32 | first head u32 | heads u32 | first block u32 | blocks u32 |
    bytes per head u64 | digests | tag 32s | payload, head by head

Integers are little-endian. ``layer`` and heads count over the whole model, blocks over the prompt.
Digests are of one head's payload each: 32 bytes of BLAKE3, 8 of xxh3-64, or none at all. The tag is
a BLAKE3 keyed with the connection's own key over everything before it. ``sequence`` counts the
frames of a connection, so that none can be left out, repeated, or moved to another place.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace

import xxhash
from blake3 import blake3

from lmcache_connector.p2p.errors import PeerError
from lmcache_connector.p2p.reasons import Reason

VERSION = 2
MAX_HEADS = 4096
MAX_FRAME_BYTES = 1 << 36
NO_DIGEST, XXH3_BYTES, BLAKE3_BYTES = 0, 8, 32
_TAG_BYTES = 32

_MAGIC = b"LMPF"
_HEAD = struct.Struct("<4sHHHHQQIIIIIQ")
HEAD_BYTES = _HEAD.size


class FrameError(PeerError):
    """These bytes are no frame; the connection is of no more use."""

    def __init__(self, text: str) -> None:
        super().__init__(text, Reason.PROTOCOL)


@dataclass(frozen=True, slots=True)
class Frame:
    """``digests``: one per head, or none."""

    ticket: int
    layer: int
    first_head: int
    num_heads: int
    first_block: int
    num_blocks: int
    head_bytes: int
    digests: tuple[bytes, ...] = ()

    @property
    def heads(self) -> range:
        return range(self.first_head, self.first_head + self.num_heads)

    @property
    def last_block(self) -> int:
        return self.first_block + self.num_blocks

    @property
    def num_bytes(self) -> int:
        return self.num_heads * self.head_bytes

    def pack(self, sequence: int) -> bytes:
        """All but the tag and the payload."""
        head = _HEAD.pack(
            _MAGIC,
            VERSION,
            len(self.digests),
            len(self.digests[0]) if self.digests else NO_DIGEST,
            0,
            sequence,
            self.ticket,
            self.layer,
            self.first_head,
            self.num_heads,
            self.first_block,
            self.num_blocks,
            self.head_bytes,
        )
        return head + b"".join(self.digests)


@dataclass(frozen=True, slots=True)
class FrameHead:
    """A frame whose digests and tag are still to come, ``tail_bytes`` of them."""

    data: bytes
    sequence: int
    frame: Frame
    num_digests: int
    digest_bytes: int

    @property
    def tail_bytes(self) -> int:
        return self.num_digests * self.digest_bytes + _TAG_BYTES


def unpack_head(data: bytes) -> FrameHead:
    """Parses ``HEAD_BYTES`` bytes. Raises :class:`FrameError`, also for sizes out of bounds."""
    magic, version, num_digests, digest_bytes, _, sequence, *numbers = _HEAD.unpack(data)
    if magic != _MAGIC:
        raise FrameError("these bytes are not a frame")
    if version != VERSION:
        raise FrameError(f"a frame of version {version}, this side knows {VERSION}")
    frame = Frame(*numbers)
    if not 0 < frame.num_heads <= MAX_HEADS or not frame.num_blocks or not frame.head_bytes:
        raise FrameError("a frame without content, or of too many heads")
    kinds = (XXH3_BYTES, BLAKE3_BYTES) if num_digests else (NO_DIGEST,)
    if num_digests not in (0, frame.num_heads) or digest_bytes not in kinds:
        raise FrameError("a frame whose digests do not fit it")
    if frame.num_bytes > MAX_FRAME_BYTES:
        raise FrameError("a frame whose sizes do not fit together")
    return FrameHead(data, sequence, frame, num_digests, digest_bytes)


class FrameKey:
    """Tags the frames of one connection at one end, and checks them at the other."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._sequence = 0

    def seal(self, frame: Frame) -> bytes:
        """The next frame, all but its payload."""
        self._sequence += 1
        packed = frame.pack(self._sequence)
        return packed + blake3(packed, key=self._key).digest()

    def open(self, head: FrameHead, tail: bytes) -> Frame:
        """Raises :class:`FrameError` unless it is the connection's next frame, as it was sealed."""
        self._sequence += 1
        said, tag = tail[:-_TAG_BYTES], tail[-_TAG_BYTES:]
        genuine = hmac.compare_digest(tag, blake3(head.data + said, key=self._key).digest())
        if not genuine or head.sequence != self._sequence:
            raise FrameError("a frame that was not sent so on this connection")
        size = head.digest_bytes
        digests = tuple(said[i * size : (i + 1) * size] for i in range(head.num_digests))
        return replace(head.frame, digests=digests)


def digest_of(views: Iterable[memoryview], num_bytes: int) -> bytes:
    """Of bytes in several pieces, ``XXH3_BYTES`` or ``BLAKE3_BYTES`` long."""
    hasher = blake3() if num_bytes == BLAKE3_BYTES else xxhash.xxh3_64()
    for view in views:
        hasher.update(view)
    digest: bytes = hasher.digest()
    return digest
