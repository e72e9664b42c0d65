"""The producer's transfers: KV that was saved and is not yet delivered.

An :class:`Outgoing` fills layer by layer and step by step. Every consumer rank that needs a part of
it has a :class:`Delivery`, which sends what is there and waits for the rest. The memory is free
again when all deliveries are over, when the transfer failed, or when its lease has ended.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable

from lmcache_connector.p2p.control import messages
from lmcache_connector.p2p.control.messages import Message
from lmcache_connector.p2p.control.peers import Overlap
from lmcache_connector.p2p.plans import Start
from lmcache_connector.p2p.reasons import Cause, Reason
from lmcache_connector.p2p.worker.host_buffer import HostBuffer
from lmcache_connector.p2p.worker.transfer import Delivery, Destination, Outgoing, Piece
from lmcache_connector.storage.geometry import ChunkGeometry

_MAX_REMEMBERED = 4096


class SendBuffer:
    """All transfers of one rank that are not over yet. Thread-safe.

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
        self._ended: OrderedDict[str, Message] = OrderedDict()
        """What to answer to whom wants a transfer that is not here any more."""
        self._released: list[str] = []
        self._unsent: list[tuple[str, Reason]] = []

    # -- the engine's step thread --------------------------------------------------------------

    def announce(self, transfer_ids: Iterable[str]) -> None:
        """Their requests wait to be computed."""
        with self.changed:
            self._announced.update(transfer_ids)

    def open(self, start: Start, geometry: ChunkGeometry, num_blocks: int) -> Outgoing | None:
        """``None``: there is no memory for it, and it is over before it began.

        A prompt that is computed once more, after a preemption, begins its transfer anew.
        """
        with self.changed:
            self._expire()
            self._announced.discard(start.transfer_id)
            former = self._transfers.pop(start.transfer_id, None)
            if former is not None:
                former.failed = former.failed or Cause(Reason.PREEMPTED, "it was begun anew")
                former.superseded = True
                self._tidy(former)
                self.changed.notify_all()
            region = self._host_buffer.take(geometry.chunk_bytes)
            if region is None:
                full = Cause(Reason.BUFFER_FULL, "the producer's buffer is full")
                self._release(start.transfer_id, full)
                return None
            outgoing = Outgoing(start, geometry, num_blocks, region)
            self._transfers[start.transfer_id] = outgoing
            self._ended.pop(start.transfer_id, None)
            return outgoing

    def decline(self, transfer_id: str, cause: Cause) -> None:
        """End a transfer, or remember that it never was."""
        with self.changed:
            self._announced.discard(transfer_id)
            outgoing = self._transfers.get(transfer_id)
            if outgoing is not None:
                self._end(outgoing, cause)
            else:
                self._remember(transfer_id, cause)

    def get(self, transfer_id: str) -> Outgoing | None:
        with self.changed:
            return self._transfers.get(transfer_id)

    def take_released(self) -> tuple[tuple[str, ...], tuple[tuple[str, Reason], ...]]:
        """Transfers that ended since the last call, and those of them that were not delivered."""
        with self.changed:
            self._expire()
            released, self._released = tuple(self._released), []
            unsent, self._unsent = tuple(self._unsent), []
            return released, unsent

    @property
    def transfer_ids(self) -> list[str]:
        """Of all that have memory here."""
        with self.changed:
            return list(self._transfers)

    def save_planned(self, outgoing: Outgoing) -> None:
        """A save was handed to the saver, which will report its end once."""
        with self.changed:
            outgoing.pending_saves += 1

    def settle(self, seconds: float) -> bool:
        """Wait until all that was saved so far has been copied and sent on, where it can be."""
        with self.changed:
            return self.changed.wait_for(
                lambda: all(outgoing.is_settled for outgoing in self._transfers.values()), seconds
            )

    def settle_copies(self, transfer_ids: Iterable[str], seconds: float) -> bool:
        """Wait until no copy reads the blocks of these transfers."""
        with self.changed:
            return self.changed.wait_for(
                lambda: not any(self._num_copies(name) for name in transfer_ids), seconds
            )

    def is_copied(self, transfer_id: str) -> bool:
        """Whether no copy reads its blocks any more."""
        with self.changed:
            return not self._num_copies(transfer_id)

    def _num_copies(self, transfer_id: str) -> int:
        outgoing = self._transfers.get(transfer_id)
        return outgoing.pending_saves if outgoing is not None else 0

    # -- the saver's thread --------------------------------------------------------------------

    def saved(self, outgoing: Outgoing, piece: Piece) -> None:
        """A layer's blocks are in the transfer's memory."""
        with self.changed:
            if outgoing.failed is None:
                outgoing.pieces.append(piece)
            self._save_ended(outgoing)

    def sealed(self, outgoing: Outgoing) -> None:
        """Everything was saved. From now on the lease counts."""
        with self.changed:
            outgoing.complete = True
            outgoing.expires_at = self._clock() + self._lease_seconds
            for delivery in outgoing.deliveries.values():
                delivery.over |= not delivery.is_behind
            self._save_ended(outgoing)

    def not_saved(self, outgoing: Outgoing) -> None:
        """A save was given up."""
        with self.changed:
            self._end(outgoing, Cause(Reason.COPY_FAILED, "a copy out of the KV cache failed"))
            self._save_ended(outgoing)

    def _save_ended(self, outgoing: Outgoing) -> None:
        outgoing.pending_saves -= 1
        self._tidy(outgoing)
        self.changed.notify_all()

    # -- the sender's threads, and the control server ------------------------------------------

    def find(self, transfer_id: str) -> Outgoing | Message:
        """A transfer, or what to answer to whom wants it."""
        with self.changed:
            if transfer_id in self._announced:
                return messages.Coming()
            gone = self._ended.get(transfer_id, messages.Unknown())
            return self._transfers.get(transfer_id, gone)

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
            if outgoing is None or outgoing.failed is not None:
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
            if outgoing.failed is not None or delivery.over or not delivery.is_behind:
                return None
            outgoing.pins += 1
            return outgoing.pieces[delivery.sent]

    def piece_sent(self, delivery: Delivery) -> None:
        """The memory of the piece is not read any more."""
        with self.changed:
            delivery.transfer.pins -= 1
            delivery.sent += 1
            if delivery.transfer.complete and not delivery.is_behind:
                delivery.over = True
            self._tidy(delivery.transfer)
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
        """End all transfers."""
        with self.changed:
            for outgoing in list(self._transfers.values()):
                self._end(outgoing, Cause(Reason.SHUTDOWN, "the producer is shutting down"))

    # -- details, under the lock ---------------------------------------------------------------

    def _expire(self) -> None:
        now = self._clock()
        for outgoing in [o for o in self._transfers.values() if now >= o.expires_at]:
            self._end(outgoing, Cause(Reason.EXPIRED, "nobody fetched it in time"))

    def _end(self, outgoing: Outgoing, cause: Cause) -> None:
        if outgoing.failed is None:
            outgoing.failed = cause
            self._unsent.append((outgoing.transfer_id, cause.reason))
            self.changed.notify_all()
        self._tidy(outgoing)

    def _tidy(self, outgoing: Outgoing) -> None:
        """Free the memory of what is over."""
        if outgoing.released or outgoing.pins or outgoing.pending_saves:
            return
        if outgoing.failed is None and not outgoing.is_delivered:
            return
        outgoing.released = True
        self._host_buffer.give(outgoing.region)
        if self._transfers.get(outgoing.transfer_id) is outgoing:  # and not begun anew
            del self._transfers[outgoing.transfer_id]
            self._release(outgoing.transfer_id, outgoing.failed)

    def _release(self, transfer_id: str, cause: Cause | None) -> None:
        self._released.append(transfer_id)
        self._remember(transfer_id, cause)

    def _remember(self, transfer_id: str, cause: Cause | None) -> None:
        gone = messages.Sent() if cause is None else messages.Gone(cause.to_wire())
        self._ended[transfer_id] = gone
        while len(self._ended) > _MAX_REMEMBERED:
            self._ended.popitem(last=False)
