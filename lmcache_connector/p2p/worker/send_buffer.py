"""The producer's memory: KV that was saved and not yet delivered.

An :class:`Outgoing` is one prompt's KV on this rank, in one piece of memory in the canonical form
``[head][layer][block]``, in which a layer's blocks of one head are one run of bytes. It fills layer
by layer and step by step; every consumer rank that has to do with it is a :class:`Delivery`, which
sends what is there and waits for the rest. When all have everything, or nobody came within the
lease, the memory goes back to the host_buffer.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from lmcache_connector.p2p.control.peers import Overlap
from lmcache_connector.p2p.plans import Start
from lmcache_connector.p2p.worker.host_buffer import HostBuffer, Region, run_of
from lmcache_connector.storage.geometry import ChunkGeometry

logger = logging.getLogger(__name__)

_MAX_REMEMBERED = 4096


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
    """What goes to one consumer rank. ``sent`` counts pieces. Guarded by the send_buffer's lock."""

    transfer: Outgoing
    to: Destination
    part: Overlap
    first_block: int
    sent: int = 0
    ticket: int | None = None
    over: bool = False


@dataclass(eq=False)
class Outgoing:
    """Guarded by its send_buffer's lock; ``pins`` keep the memory while it is written or read."""

    start: Start
    geometry: ChunkGeometry
    num_blocks: int
    region: Region
    pieces: list[Piece] = field(default_factory=list)
    complete: bool = False
    failed: str = ""
    audience: frozenset[Destination] = frozenset()
    """Consumer ranks that will need a part, once known."""
    deliveries: dict[Destination, Delivery] = field(default_factory=dict)
    pending_saves: int = 0
    pins: int = 0
    expires_at: float = float("inf")
    released: bool = False
    superseded: bool = False
    """The same transfer was begun anew: its end is nobody's business."""

    @property
    def transfer_id(self) -> str:
        return self.start.transfer_id

    def run(self, layer: int, head: int, first_block: int, last_block: int) -> memoryview:
        """The bytes of some blocks of one layer and head, both counted over the model."""
        place = run_of(self.geometry, self.num_blocks, layer, head, first_block, last_block)
        return self.region.view[place]


class SendBuffer:
    """All transfers of one rank that are not over yet.

    ``changed`` is the condition the sender waits on: something was saved, or a transfer ended.
    """

    def __init__(
        self, host_buffer: HostBuffer, lease_seconds: float, clock: Callable[[], float]
    ) -> None:
        self._host_buffer = host_buffer
        self._lease_seconds = lease_seconds
        self._clock = clock
        self.changed = threading.Condition()
        self._transfers: dict[str, Outgoing] = {}
        self._announced: set[str] = set()
        self._gone: OrderedDict[str, str] = OrderedDict()
        self._released: list[str] = []
        self._unsent: list[tuple[str, str]] = []

    # -- the engine's step thread --------------------------------------------------------------

    def announce(self, transfer_ids: Iterable[str]) -> None:
        """Their requests wait to be computed."""
        with self.changed:
            self._announced.update(transfer_ids)

    def is_announced(self, transfer_id: str) -> bool:
        with self.changed:
            return transfer_id in self._announced

    def open(self, start: Start, geometry: ChunkGeometry, num_blocks: int) -> Outgoing | None:
        """``None``: there is no memory for it; it is over before it began.

        A prompt that is computed once more, after a preemption, begins its transfer anew.
        """
        with self.changed:
            self._expire()
            self._announced.discard(start.transfer_id)
            former = self._transfers.pop(start.transfer_id, None)
            if former is not None:
                former.failed, former.superseded = former.failed or "begun anew", True
                self._tidy(former)
                self.changed.notify_all()
            region = self._host_buffer.take(geometry.chunk_bytes)
            if region is None:
                self._forget(start.transfer_id, "the producer's buffer is full")
                return None
            outgoing = Outgoing(start, geometry, num_blocks, region)
            self._transfers[start.transfer_id] = outgoing
            self._gone.pop(start.transfer_id, None)
            return outgoing

    def decline(self, transfer_id: str, reason: str) -> None:
        """End a transfer, or remember that it never was."""
        with self.changed:
            self._announced.discard(transfer_id)
            outgoing = self._transfers.get(transfer_id)
            if outgoing is not None:
                self._end(outgoing, reason)
            else:
                self._remember_gone(transfer_id, reason)

    def get(self, transfer_id: str) -> Outgoing | None:
        with self.changed:
            return self._transfers.get(transfer_id)

    def take_released(self) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
        """Transfers that ended since the last call, and those of them that were not delivered."""
        with self.changed:
            self._expire()
            released, self._released = tuple(self._released), []
            unsent, self._unsent = tuple(self._unsent), []
            return released, unsent

    def save_planned(self, outgoing: Outgoing) -> None:
        """A save was handed to the saver, which will answer for it once."""
        with self.changed:
            outgoing.pending_saves += 1

    def settle(self, seconds: float) -> bool:
        """Wait until all that was saved so far has been copied and sent on, where it can be."""
        with self.changed:
            return self.changed.wait_for(self._is_settled, seconds)

    def settle_copies(self, transfer_ids: tuple[str, ...], seconds: float) -> bool:
        """Wait until no copy reads the blocks of these transfers."""
        with self.changed:
            return self.changed.wait_for(
                lambda: not any(self._copies(name) for name in transfer_ids), seconds
            )

    def is_copied(self, transfer_id: str) -> bool:
        with self.changed:
            return not self._copies(transfer_id)

    def _copies(self, transfer_id: str) -> int:
        outgoing = self._transfers.get(transfer_id)
        return outgoing.pending_saves if outgoing is not None else 0

    def _is_settled(self) -> bool:
        return not any(
            outgoing.pending_saves
            or any(
                d.sent < len(outgoing.pieces) and not d.over for d in outgoing.deliveries.values()
            )
            for outgoing in self._transfers.values()
        )

    # -- the saver's thread --------------------------------------------------------------------

    def saved(self, outgoing: Outgoing, piece: Piece) -> None:
        """A layer's blocks are in the transfer's memory."""
        with self.changed:
            if not outgoing.failed:
                outgoing.pieces.append(piece)
            self._save_ended(outgoing)

    def sealed(self, outgoing: Outgoing) -> None:
        """Everything was saved. From now on the lease counts."""
        with self.changed:
            outgoing.complete = True
            outgoing.expires_at = self._clock() + self._lease_seconds
            for delivery in outgoing.deliveries.values():
                delivery.over |= delivery.sent == len(outgoing.pieces)
            self._save_ended(outgoing)

    def not_saved(self, outgoing: Outgoing) -> None:
        with self.changed:
            self._end(outgoing, "a copy out of the KV cache failed")
            self._save_ended(outgoing)

    def _save_ended(self, outgoing: Outgoing) -> None:
        outgoing.pending_saves -= 1
        self._tidy(outgoing)
        self.changed.notify_all()

    # -- the sender's threads, and the control server --------------------------------------------

    def gone(self, transfer_id: str) -> str | None:
        """Why a transfer failed, "" if it was delivered; ``None`` if it was never heard of."""
        with self.changed:
            return self._gone.get(transfer_id)

    def route(
        self,
        transfer_id: str,
        parts: dict[Destination, Overlap],
        only: Destination | None = None,
        first_block: int = 0,
    ) -> list[Delivery]:
        """Deliver to the consumer ranks in ``parts``, or now ``only`` to one of them.

        Returns the new deliveries, for the sender to carry out.
        """
        with self.changed:
            outgoing = self._transfers.get(transfer_id)
            if outgoing is None or outgoing.failed:
                return []
            outgoing.audience = frozenset(parts)
            chosen = parts if only is None else {k: v for k, v in parts.items() if k == only}
            new = [
                Delivery(outgoing, to, part, first_block)
                for to, part in chosen.items()
                if to not in outgoing.deliveries
            ]
            outgoing.deliveries |= {delivery.to: delivery for delivery in new}
            return new

    def next_piece(self, delivery: Delivery) -> Piece | None:
        """What to send next, pinned until :meth:`piece_sent` or :meth:`abandon`; ``None`` yet."""
        with self.changed:
            outgoing = delivery.transfer
            if outgoing.failed or delivery.over or delivery.sent >= len(outgoing.pieces):
                return None
            outgoing.pins += 1
            return outgoing.pieces[delivery.sent]

    def piece_sent(self, delivery: Delivery) -> None:
        """The memory of the piece is not read any more."""
        with self.changed:
            outgoing = delivery.transfer
            outgoing.pins -= 1
            delivery.sent += 1
            if outgoing.complete and delivery.sent == len(outgoing.pieces):
                delivery.over = True
            self._tidy(outgoing)
            self.changed.notify_all()

    def finish(self, delivery: Delivery) -> None:
        """The consumer needs no more of it."""
        with self.changed:
            delivery.over = True
            self._tidy(delivery.transfer)
            self.changed.notify_all()

    def abandon(self, delivery: Delivery, *, pinned: bool) -> None:
        """It could not be delivered; the transfer is kept in case the consumer asks again."""
        with self.changed:
            outgoing = delivery.transfer
            outgoing.pins -= pinned
            delivery.over = True
            if outgoing.deliveries.get(delivery.to) is delivery:
                del outgoing.deliveries[delivery.to]
            self._tidy(outgoing)
            self.changed.notify_all()

    def close(self) -> None:
        with self.changed:
            for outgoing in list(self._transfers.values()):
                self._end(outgoing, "the producer is shutting down")

    # -- details, under the lock ---------------------------------------------------------------

    def _expire(self) -> None:
        now = self._clock()
        for outgoing in [o for o in self._transfers.values() if now >= o.expires_at]:
            self._end(outgoing, "nobody fetched it in time")

    def _end(self, outgoing: Outgoing, reason: str) -> None:
        if not outgoing.failed:
            outgoing.failed = reason
            self._unsent.append((outgoing.transfer_id, reason))
            self.changed.notify_all()
        self._tidy(outgoing)

    def _tidy(self, outgoing: Outgoing) -> None:
        """Free the memory of what is over."""
        if outgoing.released or outgoing.pins or outgoing.pending_saves:
            return
        if not outgoing.failed and not self._is_delivered(outgoing):
            return
        outgoing.released = True
        self._host_buffer.give(outgoing.region)
        if self._transfers.get(outgoing.transfer_id) is outgoing:  # and not begun anew
            del self._transfers[outgoing.transfer_id]
            self._forget(outgoing.transfer_id, outgoing.failed)

    def _is_delivered(self, outgoing: Outgoing) -> bool:
        if not outgoing.complete or not outgoing.audience:
            return False
        return all(
            to in outgoing.deliveries and outgoing.deliveries[to].over for to in outgoing.audience
        )

    def _forget(self, transfer_id: str, reason: str) -> None:
        self._released.append(transfer_id)
        self._remember_gone(transfer_id, reason)

    def _remember_gone(self, transfer_id: str, reason: str) -> None:
        self._gone[transfer_id] = reason
        while len(self._gone) > _MAX_REMEMBERED:
            self._gone.popitem(last=False)
