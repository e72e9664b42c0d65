"""One prompt's KV at its producer, on the way to its consumers.

It lies in memory in the canonical form ``[head][layer][block]`` of the rank's own heads and
layers, segment by segment (see :mod:`lmcache_connector.p2p.ring`), so that some blocks of one layer
and head are one run of bytes. Layers and heads are counted over the whole model, blocks over the
prompt.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from heapq import heappush
from typing import TYPE_CHECKING

from lmcache_connector.p2p.control.address import PeerAddress
from lmcache_connector.p2p.control.peers import Overlap
from lmcache_connector.p2p.memory.host_buffer import Region
from lmcache_connector.p2p.plans import Start
from lmcache_connector.p2p.reasons import Cause
from lmcache_connector.p2p.ring import Ring
from lmcache_connector.storage.geometry import ChunkGeometry

if TYPE_CHECKING:
    from lmcache_connector.copy_kv_blocks.copier import Fence


@dataclass(frozen=True, slots=True)
class RingMemory:
    """The memory of one prompt. ``geometry``: of one segment."""

    ring: Ring
    geometry: ChunkGeometry
    region: Region

    def address_of(self, segment: int) -> int:
        return self.region.address + self._start_of(segment)

    def run(self, layer: int, head: int, first_block: int, last_block: int) -> slice:
        """The bytes of some blocks of one segment. Raises ``ValueError`` for what is not in there,
        but for the segment, which the caller knows to be in memory."""
        geometry, ring = self.geometry, self.ring
        if not geometry.layer_start <= layer < geometry.layer_end or head not in geometry.shards:
            raise ValueError(f"layer {layer}, head {head} are not in this part of the model")
        segment = ring.segment_of(first_block)
        if not 0 <= first_block < last_block <= ring.end_of(segment):
            raise ValueError(f"no blocks {first_block} to {last_block} in one segment")
        index = layer - geometry.layer_start
        start = geometry.shards.index(head) * geometry.shard_bytes + geometry.layer_offsets[index]
        start += self._start_of(segment)
        block = geometry.layer_widths[index] * (geometry.num_tokens // ring.segment_blocks)
        base = segment * ring.segment_blocks
        return slice(start + (first_block - base) * block, start + (last_block - base) * block)

    def _start_of(self, segment: int) -> int:
        return segment % self.ring.num_slots * self.geometry.chunk_bytes


@dataclass(frozen=True, slots=True)
class LayerSave:
    """Blocks ``first_block`` and on of one layer (counted over this rank), in ``block_ids``."""

    outgoing: Outgoing
    layer: int
    first_block: int
    block_ids: tuple[int, ...]
    fence: Fence | None

    @property
    def last_block(self) -> int:
        return self.first_block + len(self.block_ids)


@dataclass(frozen=True, slots=True)
class Piece:
    """Copied blocks ``[first_block, last_block)`` of a layer. ``digests`` by head, or empty."""

    layer: int
    first_block: int
    last_block: int
    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, order=True)
class Destination:
    """A consumer rank, at the address of its own card."""

    address: PeerAddress
    engine_id: str
    rank: int


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """What one frame carries: blocks of piece ``index``. ``segment``: of the consumer's memory."""

    segment: int
    index: int
    first_block: int
    last_block: int


@dataclass(eq=False)
class Delivery:
    """What goes to one consumer rank. Guarded by the send buffer's lock.

    ``granted``: the consumer has room for blocks before this one, in segments of
    ``segment_blocks``. ``parts``: to be sent, a heap. ``taken``: pieces that have been cut into
    parts. ``unsent``: parts left by segment of the producer. ``blocked``: there is no room for the
    next part.
    """

    transfer: Outgoing
    to: Destination
    overlap: Overlap
    first_block: int
    ticket: int | None = None
    granted: int = 0
    segment_blocks: int = 1
    parts: list[Part] = field(default_factory=list)
    taken: int = 0
    unsent: Counter[int] = field(default_factory=Counter)
    blocked: bool = False
    over: bool = False

    @property
    def is_behind(self) -> bool:
        """Whether there may be something that it has not sent."""
        return bool(self.parts) or self.taken < len(self.transfer.pieces)

    def cut(self) -> None:
        """Cut new pieces into parts that fit the consumer's segments."""
        pieces = self.transfer.pieces
        for index in range(self.taken, len(pieces)):
            piece = pieces[index]
            if piece.layer in self.overlap.layers():
                ring = Ring(self.transfer.memory.ring.num_blocks, self.segment_blocks, 1)
                for first, last in ring.split(
                    max(piece.first_block, self.first_block), piece.last_block
                ):
                    heappush(self.parts, Part(ring.segment_of(first), index, first, last))
                    self.unsent[self.transfer.segment_of(piece)] += 1
        self.taken = len(pieces)

    def has_sent(self, segment: int, num_pieces: int) -> bool:
        """Whether all that concerns it of a producer's segment, ``num_pieces`` in, has left."""
        return self.over or (self.taken >= num_pieces and not self.unsent[segment])


@dataclass(eq=False)
class Outgoing:
    """Guarded by the send buffer's lock. ``pins`` keep the memory while it is read.

    ``queued``: saves not yet begun, by segment. ``ends``: how many pieces there were when a segment
    was whole. ``num_freed``: segments that have been sent to all of the ``audience``, the consumer
    ranks that will need a part, once known. ``expires_at``: on the buffer's clock. ``superseded``:
    the same transfer was begun anew, so consumers are not told.
    """

    start: Start
    memory: RingMemory
    pieces: list[Piece] = field(default_factory=list)
    queued: dict[int, deque[LayerSave]] = field(default_factory=dict)
    num_copying: int = 0
    filled: Counter[int] = field(default_factory=Counter)
    ends: dict[int, int] = field(default_factory=dict)
    num_freed: int = 0
    sealed: bool = False
    failed: Cause | None = None
    audience: frozenset[Destination] = frozenset()
    deliveries: dict[Destination, Delivery] = field(default_factory=dict)
    pins: int = 0
    expires_at: float = float("inf")
    released: bool = False
    superseded: bool = False

    @property
    def transfer_id(self) -> str:
        return self.start.transfer_id

    def segment_of(self, piece: Piece) -> int:
        return self.memory.ring.segment_of(piece.first_block)

    @property
    def is_copied(self) -> bool:
        return not self.num_copying and not self.queued

    @property
    def is_complete(self) -> bool:
        return self.sealed and self.is_copied

    @property
    def next_segment(self) -> int | None:
        """Of the next save that has a place to go to."""
        segment = min(self.queued, default=None)
        has_room = segment is not None and segment < self.num_freed + self.memory.ring.num_slots
        return segment if has_room else None

    @property
    def is_settled(self) -> bool:
        """Whether all has been copied, and sent on, where there is room for it."""
        if self.num_copying or self.next_segment is not None:
            return False
        return all(
            d.over or d.blocked or not (d.is_behind or self.sealed)
            for d in self.deliveries.values()
        )

    @property
    def is_delivered(self) -> bool:
        if not self.is_complete or not self.audience:
            return False
        return all(to in self.deliveries and self.deliveries[to].over for to in self.audience)

    def add(self, piece: Piece) -> None:
        """A save has ended."""
        self.pieces.append(piece)
        segment, ring = self.segment_of(piece), self.memory.ring
        self.filled[segment] += piece.last_block - piece.first_block
        blocks = ring.end_of(segment) - segment * ring.segment_blocks
        if self.filled[segment] == blocks * len(self.memory.geometry.layer_widths):
            self.ends[segment] = len(self.pieces)

    def free_segments(self) -> bool:
        """Let further segments take the places of those that everybody has."""
        before = self.num_freed
        while not self.memory.ring.is_whole and self.audience and self.num_freed in self.ends:
            end = self.ends[self.num_freed]
            deliveries = [self.deliveries.get(to) for to in self.audience]
            if not all(d is not None and d.has_sent(self.num_freed, end) for d in deliveries):
                break
            self.num_freed += 1
        return self.num_freed > before

    def run(self, layer: int, head: int, first_block: int, last_block: int) -> memoryview:
        """The bytes of some blocks of one layer and head."""
        return self.memory.region.view[self.memory.run(layer, head, first_block, last_block)]
