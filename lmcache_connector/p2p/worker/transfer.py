"""One prompt's KV on its way: :class:`Outgoing` at the producer, :class:`Incoming` at the consumer.

On both sides it lies in one piece of memory in the canonical form ``[head][layer][block]`` of the
rank's own heads and layers, in which some blocks of one layer and head are one run of bytes. Layers
and heads are counted over the whole model, blocks over the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from lmcache_connector.p2p.control.messages import Offer
from lmcache_connector.p2p.control.peers import Overlap
from lmcache_connector.p2p.data.frame import Frame
from lmcache_connector.p2p.errors import PeerError
from lmcache_connector.p2p.plans import HandoverLoad, Start
from lmcache_connector.p2p.reasons import Cause
from lmcache_connector.p2p.worker.host_buffer import Region
from lmcache_connector.storage.geometry import ChunkGeometry


def run_of(
    geometry: ChunkGeometry, num_blocks: int, layer: int, head: int, first: int, last: int
) -> slice:
    """The bytes of blocks ``[first, last)``, of the transfer's ``num_blocks``, in its memory.

    Raises ``ValueError`` for what is not in there.
    """
    if not geometry.layer_start <= layer < geometry.layer_end or head not in geometry.shards:
        raise ValueError(f"layer {layer}, head {head} are not in this part of the model")
    if not 0 <= first < last <= num_blocks:
        raise ValueError(f"no blocks {first} to {last} among {num_blocks}")
    index = layer - geometry.layer_start
    start = geometry.shards.index(head) * geometry.shard_bytes + geometry.layer_offsets[index]
    block = geometry.layer_widths[index] * (geometry.num_tokens // num_blocks)
    return slice(start + first * block, start + last * block)


# -- the producer ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Piece:
    """Copied blocks ``[first_block, last_block)`` of a layer. ``checksums`` by head, or empty."""

    layer: int
    first_block: int
    last_block: int
    checksums: tuple[int, ...]


@dataclass(frozen=True, slots=True, order=True)
class Destination:
    """A consumer rank."""

    engine_id: str
    rank: int


@dataclass(eq=False)
class Delivery:
    """What goes to one consumer rank. ``sent`` counts pieces. Guarded by the send buffer's lock."""

    transfer: Outgoing
    to: Destination
    part: Overlap
    first_block: int
    sent: int = 0
    ticket: int | None = None
    over: bool = False

    @property
    def is_behind(self) -> bool:
        """Whether there are pieces that it has not sent."""
        return self.sent < len(self.transfer.pieces)


@dataclass(eq=False)
class Outgoing:
    """Guarded by the send buffer's lock. ``pins`` keep the memory while it is read.

    ``audience``: the consumer ranks that will need a part, once known. ``expires_at``: on the
    buffer's clock. ``superseded``: the same transfer was begun anew, so consumers are not told.
    """

    start: Start
    geometry: ChunkGeometry
    num_blocks: int
    region: Region
    pieces: list[Piece] = field(default_factory=list)
    complete: bool = False
    failed: Cause | None = None
    audience: frozenset[Destination] = frozenset()
    deliveries: dict[Destination, Delivery] = field(default_factory=dict)
    pending_saves: int = 0
    pins: int = 0
    expires_at: float = float("inf")
    released: bool = False
    superseded: bool = False

    @property
    def transfer_id(self) -> str:
        return self.start.transfer_id

    @property
    def is_settled(self) -> bool:
        """Whether all that was saved has been copied, and sent on where it can be."""
        return not self.pending_saves and not any(
            delivery.is_behind and not delivery.over for delivery in self.deliveries.values()
        )

    @property
    def is_delivered(self) -> bool:
        if not self.complete or not self.audience:
            return False
        return all(to in self.deliveries and self.deliveries[to].over for to in self.audience)

    def run(self, layer: int, head: int, first_block: int, last_block: int) -> memoryview:
        """The bytes of some blocks of one layer and head."""
        place = run_of(self.geometry, self.num_blocks, layer, head, first_block, last_block)
        return self.region.view[place]


# -- the consumer ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Check:
    """The checksum (xxh3-64) that the producer sent for a run of bytes."""

    run: slice
    first_block: int
    last_block: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Ticket:
    number: int
    part: Overlap


@dataclass(eq=False)
class Incoming:
    """Memory, and a map of what has arrived in it. Guarded by the receive buffer's lock.

    ``received``: bool ``[heads, layers, blocks]``. ``tickets``: by session. Times are on the
    buffer's clock. ``pins`` keep the memory while it is written or read.
    """

    offer: Offer
    geometry: ChunkGeometry
    region: Region
    received: npt.NDArray[np.bool_]
    expires_at: float
    tickets: dict[bytes, Ticket] = field(default_factory=dict)
    checks: dict[tuple[int, int, int], Check] = field(default_factory=dict)
    first_byte_at: float | None = None
    last_byte_at: float = 0.0
    num_bytes: int = 0
    pins: int = 0
    dropped: bool = False
    freed: bool = False

    @property
    def num_blocks(self) -> int:
        return int(self.received.shape[2])

    @property
    def wire_seconds(self) -> float:
        """From the first to the last byte received."""
        first = self.last_byte_at if self.first_byte_at is None else self.first_byte_at
        return max(0.0, self.last_byte_at - first)

    def num_usable(self, first_block: int) -> int:
        """Blocks from ``first_block`` on that are there in all layers and heads."""
        there = np.asarray(self.received[:, :, first_block:].all(axis=(0, 1)))
        return len(there) if there.all() else int(there.argmin())

    def part_of(self, part: Overlap) -> npt.NDArray[np.bool_]:
        """The view of ``received`` that one producer rank fills."""
        first = self.geometry.shards.index(part.heads[0])
        start = self.geometry.layer_start
        layers = slice(part.first_layer - start, part.last_layer - start)
        return self.received[first : first + len(part.heads), layers]

    def runs(self, frame: Frame) -> list[slice]:
        """Where a frame's payload goes, head by head. Raises ``PeerError`` if it does not fit."""
        last = frame.first_block + frame.num_blocks
        place = (self.geometry, self.num_blocks, frame.layer)
        try:
            runs = [run_of(*place, head, frame.first_block, last) for head in frame.heads]
        except ValueError as error:
            raise PeerError(f"a frame of something else: {error}") from error
        if any(run.stop - run.start != frame.head_bytes for run in runs):
            raise PeerError("a frame whose size is not that of its blocks")
        return runs

    def mark(self, frame: Frame, runs: Sequence[slice], now: float) -> None:
        """The frame's payload is in its ``runs``."""
        place = self.geometry.shards.index(frame.first_head)
        layer = frame.layer - self.geometry.layer_start
        last = frame.first_block + frame.num_blocks
        self.received[place : place + frame.num_heads, layer, frame.first_block : last] = True
        for head, run, checksum in zip(frame.heads, runs, frame.checksums, strict=False):
            key = (frame.layer, head, frame.first_block)
            self.checks[key] = Check(run, frame.first_block, last, checksum)
        self.num_bytes += frame.num_bytes
        self.last_byte_at = now

    def begin_anew(self, part: Overlap) -> None:
        """What one producer rank has sent does not count any more."""
        self.part_of(part)[:] = False
        self.checks = {
            (layer, head, block): check
            for (layer, head, block), check in self.checks.items()
            if layer not in part.layers() or head not in part.heads
        }


@dataclass(eq=False)
class Waiting:
    """A request whose blocks are allocated. ``since``: on the buffer's clock.

    ``cause``: what ended the wait early. ``unusable``: what has arrived must not be used for it.
    ``taken``: the loader has it.
    """

    load: HandoverLoad
    since: float
    cause: Cause | None = None
    unusable: bool = False
    taken: bool = False

    @property
    def deadline(self) -> float:
        return self.since + self.load.deadline_seconds

    @property
    def is_open(self) -> bool:
        return self.cause is None and not self.taken


@dataclass(frozen=True, slots=True)
class Arrived:
    """A request that is over, for the loader. ``incoming`` is pinned if there is one."""

    waiting: Waiting
    incoming: Incoming | None
    num_blocks: int
    checks: Sequence[Check] = ()
