"""The producer's transfers: KV that was saved and is not yet delivered.

An :class:`Outgoing` fills layer by layer and step by step. Every consumer rank that needs a part of
it has a :class:`Delivery`, which sends what is there and waits for the rest. The memory is free
again when all deliveries are over, when the transfer failed, or when its lease has ended. Of a
prompt that is larger than its memory, the rest stays in the paged cache until there is a place.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from heapq import heappop

from lmcache_connector.p2p.control import messages
from lmcache_connector.p2p.control.messages import Message
from lmcache_connector.p2p.control.peers import Overlap
from lmcache_connector.p2p.memory.host_buffer import HostBuffer
from lmcache_connector.p2p.memory.outgoing import (
    Delivery,
    Destination,
    LayerSave,
    Outgoing,
    Part,
    Piece,
    RingMemory,
)
from lmcache_connector.p2p.plans import Start
from lmcache_connector.p2p.reasons import Cause, Reason
from lmcache_connector.p2p.ring import Ring
from lmcache_connector.storage.geometry import ChunkGeometry

_MAX_REMEMBERED = 4096
_FULL = Cause(Reason.BUFFER_FULL, "the producer's buffer is full")
_READ = Cause(Reason.TAKEN, "another request has read it")


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
        self._saves_end = False

    # -- the engine's step thread --------------------------------------------------------------

    def announce(self, transfer_ids: Iterable[str]) -> None:
        """Their requests wait to be computed."""
        with self.changed:
            self._announced.update(transfer_ids)

    def open(self, start: Start, geometry: ChunkGeometry, ring: Ring) -> Outgoing | None:
        """``geometry``: of one segment. ``None``: there is no memory for it, and it is over before
        it began.

        A prompt that is computed once more, after a preemption, begins its transfer anew.
        """
        with self.changed:
            self._expire()
            self._announced.discard(start.transfer_id)
            former = self._transfers.pop(start.transfer_id, None)
            if former is not None:
                former.failed = former.failed or Cause(Reason.PREEMPTED, "it was begun anew")
                former.superseded = True
                former.queued.clear()
                self._tidy(former)
                self.changed.notify_all()
            region = self._host_buffer.take(geometry.chunk_bytes * ring.num_slots)
            if region is None:
                self._unsent.append((start.transfer_id, _FULL.reason))
                self._release(start.transfer_id, _FULL)
                return None
            outgoing = Outgoing(start, RingMemory(ring, geometry, region))
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

    def held_ended(self, transfer_id: str, cause: Cause | None) -> None:
        """A prompt that was held in the paged cache. Without a cause, all have read it."""
        with self.changed:
            self._announced.discard(transfer_id)
            self._remember(transfer_id, cause or _READ)  # nothing of it is still on its way
            if cause is not None:
                self._unsent.append((transfer_id, cause.reason))

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

    def plan(self, save: LayerSave) -> None:
        """Queue a save for the saver, cut at the borders of segments."""
        with self.changed:
            outgoing, ring = save.outgoing, save.outgoing.memory.ring
            if outgoing.failed is not None:
                return
            for first, last in ring.split(save.first_block, save.last_block):
                ids = save.block_ids[first - save.first_block : last - save.first_block]
                part = replace(save, first_block=first, block_ids=ids)
                outgoing.queued.setdefault(ring.segment_of(first), deque()).append(part)
            self.changed.notify_all()

    def seal(self, outgoing: Outgoing) -> None:
        """No more saves are coming. From now on the lease counts."""
        with self.changed:
            outgoing.sealed = True
            self._renew(outgoing)
            self._finish_deliveries(outgoing)

    def settle(self, seconds: float) -> bool:
        """Wait until all that was saved so far has been copied and sent on, where there is room."""
        with self.changed:
            return self.changed.wait_for(
                lambda: all(outgoing.is_settled for outgoing in self._transfers.values()), seconds
            )

    def settle_copies(self, transfer_ids: Iterable[str], cause: Cause, seconds: float) -> bool:
        """Wait until no copy reads the blocks of these transfers. Those that cannot be copied in
        time, or have no place to go to, end with ``cause``. False: a copy is still under way."""
        with self.changed:
            found = [self._transfers.get(name) for name in transfer_ids]
            transfers = [outgoing for outgoing in found if outgoing is not None]
            for outgoing in transfers:
                last = max(outgoing.queued, default=0)
                if last >= outgoing.num_freed + outgoing.memory.ring.num_slots:
                    self._end(outgoing, cause)
            if self.changed.wait_for(lambda: all(o.is_copied for o in transfers), seconds):
                return True
            for outgoing in transfers:
                self._end(outgoing, cause)
            return all(outgoing.is_copied for outgoing in transfers)

    def is_copied(self, transfer_id: str) -> bool:
        """Whether no copy reads its blocks any more."""
        with self.changed:
            outgoing = self._transfers.get(transfer_id)
            return outgoing is None or outgoing.is_copied

    # -- the saver's thread --------------------------------------------------------------------

    def next_save(self) -> LayerSave | None:
        """Waits for a save that has a place to go to. ``None``: the saver shall end."""
        with self.changed:
            while True:
                for outgoing in self._transfers.values():
                    segment = outgoing.next_segment
                    if segment is not None:
                        saves = outgoing.queued[segment]
                        save = saves.popleft()
                        if not saves:
                            del outgoing.queued[segment]
                        outgoing.num_copying += 1
                        return save
                if self._saves_end:
                    return None
                self.changed.wait()

    def saved(self, outgoing: Outgoing, piece: Piece) -> None:
        """A layer's blocks are in the transfer's memory."""
        with self.changed:
            outgoing.num_copying -= 1
            if outgoing.failed is None:
                outgoing.add(piece)
            self._finish_deliveries(outgoing)

    def not_saved(self, outgoing: Outgoing) -> None:
        """A save failed."""
        with self.changed:
            outgoing.num_copying -= 1
            self._end(outgoing, Cause(Reason.COPY_FAILED, "a copy out of the KV cache failed"))
            self.changed.notify_all()

    def end_saves(self) -> None:
        """The saver ends once it has saved what has a place to go to."""
        with self.changed:
            self._saves_end = True
            self.changed.notify_all()

    # -- the sender's threads, and the control server ------------------------------------------

    def find(self, transfer_id: str) -> Outgoing | Message:
        """A transfer, or what to answer to whom wants it. Looked up and judged at once: one that
        is begun anew right after has not failed."""
        with self.changed:
            if transfer_id in self._announced:
                return messages.Coming()
            outgoing = self._transfers.get(transfer_id)
            if outgoing is None:
                return self._ended.get(transfer_id, messages.Unknown())
            failed = outgoing.failed
            return outgoing if failed is None else messages.Gone(failed.to_wire())

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
            if outgoing.num_freed:  # whoever is not in the audience by now lacks what was freed
                return []
            outgoing.audience |= frozenset(parts)
            chosen = parts if only is None else {k: v for k, v in parts.items() if k == only}
            new = [
                Delivery(outgoing, to, part, first_block)
                for to, part in chosen.items()
                if to not in outgoing.deliveries
            ]
            outgoing.deliveries |= {delivery.to: delivery for delivery in new}
            return new

    def keep(self, transfer_ids: Iterable[str], *, in_blocks: bool) -> None:
        """Requests for these wait in line: renew leases, ``in_blocks`` also where saves wait."""
        with self.changed:
            for outgoing in filter(None, map(self._transfers.get, transfer_ids)):
                if outgoing.sealed and (in_blocks or outgoing.is_copied):
                    self._renew(outgoing)

    def accepted(self, delivery: Delivery, answer: messages.Accepted) -> None:
        """The consumer has given a ticket."""
        with self.changed:
            delivery.ticket, delivery.segment_blocks = answer.ticket, answer.segment_blocks
            self.granted(delivery, answer.num_blocks)

    def granted(self, delivery: Delivery, num_blocks: int) -> bool:
        """The consumer has room for so many blocks. Whether that helps."""
        with self.changed:
            delivery.granted = max(delivery.granted, num_blocks)
            delivery.cut()  # a later piece may have a part for which there is room
            parts = delivery.parts
            delivery.blocked = bool(parts and parts[0].last_block > delivery.granted)
            self._finish_deliveries(delivery.transfer)
            return not delivery.blocked

    def block(self, delivery: Delivery) -> None:
        """The consumer has no room."""
        with self.changed:
            delivery.blocked = True
            self.changed.notify_all()

    @contextmanager
    def next_part(self, delivery: Delivery) -> Iterator[Part | None]:
        """What to send next, ``None`` yet. Its memory is pinned inside; an error that leaves it
        means that it was not sent, and gives the delivery up."""
        part = self._take_part(delivery)
        if part is None:
            yield None
            return
        try:
            yield part
        except BaseException:
            self.abandon(delivery, pinned=True)
            raise
        self._part_sent(delivery, part)

    def finish(self, delivery: Delivery) -> None:
        """The consumer needs no more of it."""
        with self.changed:
            delivery.over = True
            self._tidy(delivery.transfer)
            self.changed.notify_all()

    def abandon(self, delivery: Delivery, *, pinned: bool = False) -> None:
        """It could not be delivered; the transfer is kept in case the consumer asks again."""
        with self.changed:
            outgoing = delivery.transfer
            outgoing.pins -= pinned
            delivery.over = True
            if outgoing.deliveries.get(delivery.to) is delivery:
                del outgoing.deliveries[delivery.to]
            if outgoing.num_freed:
                self._end(outgoing, Cause(Reason.LOST, "it was lost after a part had left"))
            self._tidy(outgoing)
            self.changed.notify_all()

    def close(self) -> None:
        """End all transfers."""
        with self.changed:
            for outgoing in list(self._transfers.values()):
                self._end(outgoing, Cause(Reason.SHUTDOWN, "the producer is shutting down"))

    # -- details, under the lock ---------------------------------------------------------------

    def _take_part(self, delivery: Delivery) -> Part | None:
        with self.changed:
            if delivery.over:
                return None
            delivery.cut()
            if not delivery.parts:
                self._finish_deliveries(delivery.transfer)
                return None
            if delivery.parts[0].last_block > delivery.granted:
                delivery.blocked = True
                self.changed.notify_all()
                return None
            delivery.transfer.pins += 1
            return heappop(delivery.parts)

    def _part_sent(self, delivery: Delivery, part: Part) -> None:
        with self.changed:
            outgoing = delivery.transfer
            outgoing.pins -= 1
            delivery.unsent[outgoing.segment_of(outgoing.pieces[part.index])] -= 1
            if outgoing.sealed:
                self._renew(outgoing)
            self._finish_deliveries(outgoing)

    def _finish_deliveries(self, outgoing: Outgoing) -> None:
        if outgoing.is_complete:
            for delivery in outgoing.deliveries.values():
                delivery.over |= not delivery.is_behind
        outgoing.free_segments()
        self._tidy(outgoing)
        self.changed.notify_all()

    def _renew(self, outgoing: Outgoing) -> None:
        outgoing.expires_at = self._clock() + self._lease_seconds

    def _expire(self) -> None:
        now = self._clock()
        for outgoing in [o for o in self._transfers.values() if now >= o.expires_at]:
            self._end(outgoing, Cause(Reason.EXPIRED, "nobody fetched it in time"))

    def _end(self, outgoing: Outgoing, cause: Cause) -> None:
        if outgoing.failed is None:
            outgoing.failed = cause
            outgoing.queued.clear()
            self._unsent.append((outgoing.transfer_id, cause.reason))
            self.changed.notify_all()
        self._tidy(outgoing)

    def _tidy(self, outgoing: Outgoing) -> None:
        """Free the memory of what is over. From then on nothing is sent from it."""
        if outgoing.released or outgoing.pins or outgoing.num_copying:
            return
        if outgoing.failed is None and not outgoing.is_delivered:
            return
        outgoing.released = True
        for delivery in outgoing.deliveries.values():
            delivery.over = True
        self._host_buffer.give(outgoing.memory.region)
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
