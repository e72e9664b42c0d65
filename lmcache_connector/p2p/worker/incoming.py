"""One prompt's KV at its consumer, as it arrives, and the requests that wait for it.

It lies in memory as at its producer, see :mod:`lmcache_connector.p2p.memory.outgoing`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from lmcache_connector.p2p.control.messages import Offer
from lmcache_connector.p2p.control.peers import Overlap
from lmcache_connector.p2p.data.frame import Frame
from lmcache_connector.p2p.errors import PeerError
from lmcache_connector.p2p.memory.outgoing import RingMemory
from lmcache_connector.p2p.plans import HandoverLoad
from lmcache_connector.p2p.reasons import Cause, Reason

_NOTHING, _CLAIMED, _RECEIVED = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Check:
    """The digest that the producer sent for blocks of one layer and head."""

    layer: int
    head: int
    first_block: int
    last_block: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Ticket:
    number: int
    part: Overlap


@dataclass(eq=False)
class Incoming:
    """Memory, and a map of what has arrived in it. Guarded by the receive buffer's lock.

    ``cells``: uint8 ``[heads, layers, blocks]``, under way or there. ``num_missing``: int32
    ``[blocks]``, heads and layers of a block that are not there. ``num_loaded``: segments that the
    request has, or does not need; frames of those and of segments without a place yet are not
    taken. ``tickets``: by session. ``checks``: by segment. Times are on the buffer's clock.
    ``pins`` keep the memory while it is written or read.
    """

    offer: Offer
    memory: RingMemory
    expires_at: float
    cells: npt.NDArray[np.uint8] = field(init=False)
    num_missing: npt.NDArray[np.int32] = field(init=False)
    num_loaded: int = 0
    tickets: dict[bytes, Ticket] = field(default_factory=dict)
    checks: defaultdict[int, list[Check]] = field(default_factory=lambda: defaultdict(list))
    first_byte_at: float | None = None
    last_byte_at: float = 0.0
    num_bytes: int = 0
    pins: int = 0
    dropped: bool = False
    freed: bool = False

    def __post_init__(self) -> None:
        geometry = self.memory.geometry
        num_heads, num_layers = len(geometry.shards), len(geometry.layer_widths)
        self.cells = np.zeros((num_heads, num_layers, self.num_blocks), np.uint8)
        self.num_missing = np.full(self.num_blocks, num_heads * num_layers, np.int32)

    @property
    def num_blocks(self) -> int:
        return self.memory.ring.num_blocks

    @property
    def num_granted(self) -> int:
        """Blocks before this one may be sent."""
        ring = self.memory.ring
        return min(ring.num_blocks, (self.num_loaded + ring.num_slots) * ring.segment_blocks)

    @property
    def wire_seconds(self) -> float:
        """From the first to the last byte received."""
        first = self.last_byte_at if self.first_byte_at is None else self.first_byte_at
        return max(0.0, self.last_byte_at - first)

    def skip(self, first_block: int) -> None:
        """The request needs nothing before this block."""
        if not self.memory.ring.is_whole:
            self.num_loaded = max(self.num_loaded, self.memory.ring.segment_of(first_block))

    def usable_end(self, first_block: int) -> int:
        """The block up to which all layers and heads are there, from ``first_block`` on."""
        missing = self.num_missing[first_block:] > 0
        return first_block + (int(missing.argmax()) if missing.any() else len(missing))

    def has(self, first_block: int, last_block: int) -> bool:
        """Whether all of these blocks is there."""
        return not self.num_missing[first_block:last_block].any()

    def has_segment(self, first_block: int) -> bool:
        """Whether the segment that is to be loaded next has arrived, from ``first_block`` on."""
        ring = self.memory.ring
        if ring.is_whole or self.num_loaded >= ring.num_segments:
            return False
        start, end = self.num_loaded * ring.segment_blocks, ring.end_of(self.num_loaded)
        return self.has(max(start, first_block), end)

    def has_part(self, part: Overlap) -> bool:
        """Whether all that one producer rank sends is there."""
        return bool((self._cells_of(part) == _RECEIVED).all())

    def _cells_of(self, part: Overlap) -> npt.NDArray[np.uint8]:
        first = self.memory.geometry.shards.index(part.heads[0])
        start = self.memory.geometry.layer_start
        layers = slice(part.first_layer - start, part.last_layer - start)
        return self.cells[first : first + len(part.heads), layers]

    def claim(self, frame: Frame) -> list[slice] | None:
        """Where a frame's payload goes, head by head; ``None`` if it is not needed any more.

        Raises ``PeerError`` if it does not fit, or was sent before.
        """
        try:
            runs = [
                self.memory.run(frame.layer, head, frame.first_block, frame.last_block)
                for head in frame.heads
            ]
        except ValueError as error:
            raise _bad_frame(f"a frame of something else: {error}") from error
        if any(run.stop - run.start != frame.head_bytes for run in runs):
            raise _bad_frame("a frame whose size is not that of its blocks")
        if frame.last_block > self.num_granted:
            raise _bad_frame("a frame for which there is no room yet")
        if self.memory.ring.segment_of(frame.first_block) < self.num_loaded:
            return None
        place = self._place(frame)
        if self.cells[place].any():
            raise _bad_frame("a frame that was sent before")
        self.cells[place] = _CLAIMED
        return runs

    def unclaim(self, frame: Frame) -> None:
        """The frame did not arrive."""
        self.cells[self._place(frame)] = _NOTHING

    def mark(self, frame: Frame, now: float) -> None:
        """The frame's payload is in its place."""
        self.cells[self._place(frame)] = _RECEIVED
        self.num_missing[frame.first_block : frame.last_block] -= frame.num_heads
        checks = self.checks[self.memory.ring.segment_of(frame.first_block)]
        for head, digest in zip(frame.heads, frame.digests, strict=False):
            checks.append(Check(frame.layer, head, frame.first_block, frame.last_block, digest))
        self.num_bytes += frame.num_bytes
        self.last_byte_at = now

    def begin_anew(self, part: Overlap) -> None:
        """What one producer rank has sent does not count any more."""
        cells = self._cells_of(part)
        self.num_missing += (cells == _RECEIVED).sum(axis=(0, 1), dtype=np.int32)
        cells[:] = _NOTHING
        for segment, checks in self.checks.items():
            self.checks[segment] = [
                c for c in checks if c.layer not in part.layers() or c.head not in part.heads
            ]

    def _place(self, frame: Frame) -> tuple[slice, int, slice]:
        head = self.memory.geometry.shards.index(frame.first_head)
        layer = frame.layer - self.memory.geometry.layer_start
        blocks = slice(frame.first_block, frame.last_block)
        return slice(head, head + frame.num_heads), layer, blocks


def _bad_frame(text: str) -> PeerError:
    return PeerError(text, Reason.PROTOCOL)


@dataclass(eq=False)
class Waiting:
    """A request whose blocks are allocated. ``since``: on the buffer's clock.

    ``num_blocks``: of its blocks are in the cache, from the first on. ``cause``: what ended the
    wait early. ``unusable``: what has arrived must not be used for it. ``taken``: the loader or a
    reader has it. ``read_bytes`` were read at the producer, in ``read_seconds``.
    """

    load: HandoverLoad
    since: float
    num_blocks: int = 0
    cause: Cause | None = None
    unusable: bool = False
    taken: bool = False
    read_bytes: int = 0
    read_seconds: float = 0.0

    @property
    def is_whole(self) -> bool:
        """Whether all of its blocks are in the cache."""
        return self.num_blocks == len(self.load.block_ids)

    def has_read(self, num_bytes: int, seconds: float, cause: Cause | None) -> None:
        """The blocks were read at the producer; ``cause``: why not. Whoever took it gives it
        back."""
        self.taken = False
        self.read_bytes, self.read_seconds = num_bytes, seconds
        if cause is None and not self.unusable:
            self.num_blocks = len(self.load.block_ids)
        else:
            self.cause = self.cause or cause

    @property
    def deadline(self) -> float:
        return self.since + self.load.deadline_seconds

    @property
    def is_open(self) -> bool:
        return self.cause is None and not self.taken


@dataclass(frozen=True, slots=True)
class Stretch:
    """Blocks of one segment that can go into the cache, with the digests they must have."""

    segment: int
    first_block: int
    last_block: int
    checks: Sequence[Check]


@dataclass(frozen=True, slots=True)
class Arrived:
    """What the loader is to do for a request. ``incoming`` is pinned if there is one. ``is_last``:
    nothing more will come."""

    waiting: Waiting
    incoming: Incoming | None
    stretches: tuple[Stretch, ...]
    is_last: bool
