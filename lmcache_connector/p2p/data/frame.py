"""The data plane's unit: some blocks of one layer, for consecutive KV heads.

::

    magic 4s | version u16 | checksums u16 | ticket u64 | layer u32 | first head u32 | heads u32 |
    first block u32 | blocks u32 | bytes per head u64 | checksums u64 each | payload, head by head

Integers are little-endian, checksums xxh3-64 of one head's payload each, or none at all. ``layer``
and heads count over the whole model, blocks over the prompt.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace

from lmcache_connector.p2p.errors import PeerError

VERSION = 1
MAX_HEADS = 4096
MAX_FRAME_BYTES = 1 << 36

_MAGIC = b"LMPF"
_HEAD = struct.Struct("<4sHHQIIIIIQ")
HEAD_BYTES = _HEAD.size


class FrameError(PeerError):
    """These bytes are no frame; the connection is of no more use."""


@dataclass(frozen=True, slots=True)
class Frame:
    """``checksums``: one per head, or none."""

    ticket: int
    layer: int
    first_head: int
    num_heads: int
    first_block: int
    num_blocks: int
    head_bytes: int
    checksums: tuple[int, ...] = ()

    @property
    def heads(self) -> range:
        return range(self.first_head, self.first_head + self.num_heads)

    @property
    def num_bytes(self) -> int:
        return self.num_heads * self.head_bytes

    def pack(self) -> bytes:
        head = _HEAD.pack(
            _MAGIC,
            VERSION,
            len(self.checksums),
            self.ticket,
            self.layer,
            self.first_head,
            self.num_heads,
            self.first_block,
            self.num_blocks,
            self.head_bytes,
        )
        return head + struct.pack(f"<{len(self.checksums)}Q", *self.checksums)


@dataclass(frozen=True, slots=True)
class FrameHead:
    """A frame whose checksums are still to come, ``tail_bytes`` of them."""

    frame: Frame
    num_checksums: int

    @property
    def tail_bytes(self) -> int:
        return 8 * self.num_checksums

    def with_tail(self, tail: bytes) -> Frame:
        checksums = struct.unpack(f"<{self.num_checksums}Q", tail)
        return replace(self.frame, checksums=checksums)


def unpack_head(data: bytes) -> FrameHead:
    """Parses ``HEAD_BYTES`` bytes. Raises :class:`FrameError`, also for sizes out of bounds."""
    magic, version, num_checksums, *numbers = _HEAD.unpack(data)
    if magic != _MAGIC:
        raise FrameError("these bytes are not a frame")
    if version != VERSION:
        raise FrameError(f"a frame of version {version}, this side knows {VERSION}")
    frame = Frame(*numbers)
    if not 0 < frame.num_heads <= MAX_HEADS or not frame.num_blocks or not frame.head_bytes:
        raise FrameError("a frame without content, or of too many heads")
    if num_checksums not in (0, frame.num_heads) or frame.num_bytes > MAX_FRAME_BYTES:
        raise FrameError("a frame whose sizes do not fit together")
    return FrameHead(frame, num_checksums)
