"""The consumer's transfers: KV that arrives, and the requests that wait for it.

The two meet here, whichever comes first: an :class:`Incoming` and a :class:`Waiting`. A request is
over when everything it needs is there, or when something ends it: the producer's word, a lost
connection, its deadline, an abort. Then what has arrived without a gap is used, and the rest is
recomputed. A prompt that is larger than its memory goes into the cache segment by segment.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import cast

from lmcache_connector.p2p.control import messages
from lmcache_connector.p2p.control.messages import Message, Offer
from lmcache_connector.p2p.control.peers import Peer, overlap, ranks_of
from lmcache_connector.p2p.data.base import Landing
from lmcache_connector.p2p.data.frame import BLAKE3_BYTES, Frame
from lmcache_connector.p2p.errors import PeerError, RefusedError
from lmcache_connector.p2p.memory.host_buffer import HostBuffer
from lmcache_connector.p2p.memory.outgoing import RingMemory
from lmcache_connector.p2p.plans import HandoverLoad
from lmcache_connector.p2p.reasons import Cause, Reason
from lmcache_connector.p2p.worker.incoming import Arrived, Incoming, Stretch, Ticket, Waiting
from lmcache_connector.p2p.worker.settings import P2PWorkerSettings

_MAX_REMEMBERED = 4096
_OTHER_PROMPT = Cause(Reason.OTHER_PROMPT, "the producer computed another prompt")
_BEGUN_ANEW = Cause(Reason.PREEMPTED, "the producer began anew after a part had been used")
_TAKEN = Cause(Reason.TAKEN, "another request has taken this hand-over")


class ReceiveBuffer:
    """All transfers that come to one rank, and the requests that wait for them. Thread-safe.

    A :class:`~lmcache_connector.p2p.data.base.Sink` for the transports. ``changed``: something
    arrived, ended, or began to be waited for.
    """

    def __init__(
        self, settings: P2PWorkerSettings, host_buffer: HostBuffer, clock: Callable[[], float]
    ) -> None:
        self._settings = settings
        self._host_buffer = host_buffer
        self._clock = clock
        self.changed = threading.Condition()
        self._incoming: dict[str, Incoming] = {}
        self._waiting: dict[str, Waiting] = {}
        self._latecomers: list[Waiting] = []
        """Requests for a hand-over that another one has."""
        self._kept: set[str] = set()
        """Hand-overs whose requests wait in line."""
        self._settled: OrderedDict[str, None] = OrderedDict()
        self._tickets: dict[int, tuple[bytes, Incoming]] = {}
        self._last_ticket = 0
        self._stopping = False

    # -- the engine's step thread --------------------------------------------------------------

    def keep(self, transfer_id: str) -> None:
        """A request for it waits in line: it does not expire until that is over."""
        with self.changed:
            self._kept.add(transfer_id)

    def expect(self, load: HandoverLoad) -> Waiting:
        """The request's blocks are allocated: from now on it waits."""
        with self.changed:
            self._expire()
            self._kept.discard(load.transfer_id)
            waiting = Waiting(load, self._clock())
            if load.transfer_id in self._waiting or load.transfer_id in self._settled:
                waiting.cause, waiting.unusable = _TAKEN, True
                self._latecomers.append(waiting)
            else:
                self._waiting[load.transfer_id] = waiting
                incoming = self._incoming.get(load.transfer_id)
                if incoming is not None and incoming.offer.digest != load.digest:
                    waiting.cause = _OTHER_PROMPT
                    self._drop(incoming)
                elif incoming is not None:
                    incoming.skip(load.first_block)
            self.changed.notify_all()
            return waiting

    def is_over(self, waiting: Waiting) -> bool:
        """Whether nothing more needs to come."""
        with self.changed:
            return not waiting.is_open or self._is_complete(waiting)

    def take_to_read(self, waiting: Waiting) -> bool:
        """Whether it may be read at the producer: nobody else touches its blocks until it was."""
        with self.changed:
            may_read = waiting.is_open and waiting.load.transfer_id not in self._incoming
            waiting.taken |= may_read
            return may_read

    def awaits(self, transfer_id: str) -> bool:
        """Whether a request waits for it."""
        with self.changed:
            return transfer_id in self._waiting

    def last_progress(self, waiting: Waiting) -> float:
        """When something came for it last, or it began to wait."""
        with self.changed:
            incoming = self._incoming.get(waiting.load.transfer_id)
            return max(waiting.since, incoming.last_byte_at if incoming is not None else 0.0)

    def cancel(self, request_id: str) -> None:
        """The request was aborted, or the cache was reset."""
        with self.changed:
            for waiting in self._waiting.values():
                if waiting.load.request_id == request_id and waiting.cause is None:
                    waiting.cause = Cause(Reason.CANCELLED, "the load was cancelled")
                    waiting.unusable = True
            self.changed.notify_all()

    def discard(self, transfer_id: str) -> None:
        """No request will come for it."""
        with self.changed:
            self._settle(transfer_id)
            self._kept.discard(transfer_id)
            incoming = self._incoming.get(transfer_id)
            if incoming is not None and transfer_id not in self._waiting:
                self._drop(incoming)

    def end_overdue(self) -> None:
        """Called once per step: ends what is past its deadline or its lease."""
        with self.changed:
            self._expire()
            now = self._clock()
            for waiting in self._waiting.values():
                if waiting.cause is None and now >= waiting.deadline:
                    late = f"it did not come within {waiting.load.deadline_seconds:g} s"
                    waiting.cause = Cause(Reason.DEADLINE, late)
                    self.changed.notify_all()

    @property
    def num_waiting(self) -> int:
        with self.changed:
            return len(self._waiting) + len(self._latecomers)

    # -- the loader's thread -------------------------------------------------------------------

    def next_arrived(self) -> Arrived | None:
        """Waits for a request that is over, or whose next segment is there. ``None``: the loader
        shall end."""
        with self.changed:
            while True:
                for waiting in (*self._waiting.values(), *self._latecomers):
                    if waiting.taken:
                        continue
                    if waiting.cause or waiting.is_whole or self._is_complete(waiting):
                        return self._take(waiting, is_last=True)
                    if self._has_segment(waiting):
                        return self._take(waiting, is_last=False)
                if self._stopping:
                    return None
                self.changed.wait()

    def loaded(self, arrived: Arrived, num_blocks: int, cause: Cause | None) -> None:
        """The loader is done with the memory. ``num_blocks`` are in the cache; ``cause``: why not
        all that it was given."""
        with self.changed:
            waiting, incoming = arrived.waiting, arrived.incoming
            waiting.num_blocks += num_blocks
            waiting.cause = waiting.cause or cause
            if incoming is not None:
                incoming.pins -= 1
            if arrived.is_last:
                self._finish(waiting)
            elif incoming is not None:
                waiting.taken = False
                if cause is None:  # else what is left of the segment is looked at once more
                    incoming.checks.pop(incoming.num_loaded, None)
                    incoming.num_loaded += 1
                if incoming.dropped:
                    self._free(incoming)
            self.changed.notify_all()

    def _finish(self, waiting: Waiting) -> None:
        transfer_id = waiting.load.transfer_id
        if self._waiting.get(transfer_id) is waiting:
            del self._waiting[transfer_id]
            self._settle(transfer_id)
            if (incoming := self._incoming.get(transfer_id)) is not None:
                self._drop(incoming)
        else:
            self._latecomers.remove(waiting)

    # -- what others say -----------------------------------------------------------------------

    def fail(self, transfer_id: str, cause: Cause) -> None:
        """The producer will not deliver it."""
        with self.changed:
            self._fail(transfer_id, cause)

    def offered(self, peer: Peer, offer: Offer) -> Message:
        """The control server's answer to an offer, whose sizes are checked here."""
        with self.changed:
            self._expire()
            waiting = self._waiting.get(offer.transfer_id)
            if offer.transfer_id in self._settled or self._stopping:
                return messages.Settled()
            if waiting is not None and waiting.cause is not None:
                return messages.Settled()
            try:
                if waiting is not None and waiting.load.digest != offer.digest:
                    self._end(waiting, _OTHER_PROMPT)
                    raise RefusedError("I wait for another prompt under this name")
                incoming = self._incoming_for(offer)
                return self._give_ticket(incoming, peer) if incoming else messages.Busy()
            except RefusedError as error:
                return messages.Refused(error.cause.to_wire())

    def room(self, peer: Peer, more: messages.More) -> Message:
        """The control server's answer to a producer that waits for room."""
        with self.changed:
            owner, incoming = self._tickets.get(more.ticket, (b"", None))
            if incoming is None or owner != peer.session or incoming.dropped:
                return messages.Settled()
            return messages.Room(incoming.num_granted)

    # -- the transport's threads ---------------------------------------------------------------

    def land(self, session: bytes, frame: Frame) -> Landing | None:
        with self.changed:
            owner, incoming = self._tickets.get(frame.ticket, (b"", None))
            if self._settings.digest_bytes == BLAKE3_BYTES and (
                not frame.digests or len(frame.digests[0]) != BLAKE3_BYTES
            ):
                raise PeerError("a frame without the digests of its payload", Reason.PROTOCOL)
            if incoming is None or owner != session or incoming.dropped:
                return None
            runs = incoming.claim(frame)
            if runs is None:
                return None
            incoming.pins += 1
            if incoming.first_byte_at is None:
                incoming.first_byte_at = self._clock()
            view = incoming.memory.region.view
            return Landing([view[run] for run in runs], (incoming, frame))

    def landed(self, landing: Landing, *, complete: bool) -> None:
        incoming, frame = cast(tuple[Incoming, Frame], landing.token)
        with self.changed:
            incoming.pins -= 1
            # A ticket may have been taken back meanwhile, when its transfer began anew.
            if frame.ticket in self._tickets:
                if complete:
                    incoming.mark(frame, self._clock())
                else:
                    incoming.unclaim(frame)
                waiting = self._waiting.get(incoming.offer.transfer_id)
                if waiting is not None and (
                    self._is_complete(waiting) or self._has_segment(waiting)
                ):
                    self.changed.notify_all()
            if incoming.dropped:
                self._free(incoming)

    def lost(self, session: bytes, cause: Cause) -> None:
        with self.changed:
            for incoming in list(self._incoming.values()):
                ticket = incoming.tickets.get(session)
                if ticket is None or incoming.has_part(ticket.part):
                    continue
                waiting = self._waiting.get(incoming.offer.transfer_id)
                if waiting is None:
                    self._drop(incoming)
                else:
                    self._end(waiting, Cause(cause.reason, f"the producer was lost: {cause.text}"))

    def close(self) -> None:
        """End all waits."""
        with self.changed:
            self._stopping = True
            for waiting in self._waiting.values():
                self._end(waiting, Cause(Reason.SHUTDOWN, "the consumer is shutting down"))
            self.changed.notify_all()

    # -- details, under the lock ---------------------------------------------------------------

    def _fail(self, transfer_id: str, cause: Cause) -> None:
        waiting, incoming = self._waiting.get(transfer_id), self._incoming.get(transfer_id)
        if waiting is not None:
            self._end(waiting, cause)
        elif incoming is not None:
            self._drop(incoming)

    def _end(self, waiting: Waiting, cause: Cause) -> None:
        """Unless it is over already."""
        if waiting.cause is None and not self._is_complete(waiting):
            waiting.cause = cause
            self.changed.notify_all()

    def _incoming_for(self, offer: Offer) -> Incoming | None:
        """``None``: there is no room now. Raises ``RefusedError`` for what can never be."""
        incoming = self._incoming.get(offer.transfer_id)
        if incoming is not None:
            if incoming.offer != offer:
                raise RefusedError("this name is another prompt's")
            return incoming
        settings = self._settings
        num_blocks = settings.num_blocks(offer.num_tokens)
        if not 0 < num_blocks <= settings.max_blocks:
            raise RefusedError(
                f"a prompt of {offer.num_tokens} tokens does not fit into this instance"
            )
        ring = settings.ring(num_blocks)
        geometry = settings.geometry(ring.segment_blocks)
        num_bytes = geometry.chunk_bytes * ring.num_slots
        if num_bytes > self._host_buffer.capacity_bytes:
            raise RefusedError(f"{num_bytes} bytes do not fit into kv_buffer_size")
        region = self._host_buffer.take(num_bytes)
        if region is None:
            return None
        expires_at = self._clock() + settings.config.lease_seconds
        incoming = Incoming(offer, RingMemory(ring, geometry, region), expires_at)
        waiting = self._waiting.get(offer.transfer_id)
        if waiting is not None:
            incoming.skip(waiting.load.first_block)
        self._incoming[offer.transfer_id] = incoming
        return incoming

    def _give_ticket(self, incoming: Incoming, peer: Peer) -> Message:
        """A second offer of the same rank begins its part anew: its request was preempted."""
        part = overlap(ranks_of(peer.card)[peer.card.rank], self._settings.own)
        if part is None:
            return messages.Settled()
        former = incoming.tickets.pop(peer.session, None)
        if former is not None:
            self._tickets.pop(former.number, None)
            if incoming.num_loaded:  # the first run's blocks are in the cache
                self._fail(incoming.offer.transfer_id, _BEGUN_ANEW)
                return messages.Settled()
            incoming.begin_anew(part)
        self._last_ticket += 1
        incoming.tickets[peer.session] = Ticket(self._last_ticket, part)
        self._tickets[self._last_ticket] = (peer.session, incoming)
        segment_blocks = incoming.memory.ring.segment_blocks
        return messages.Accepted(self._last_ticket, incoming.num_granted, segment_blocks)

    def _is_complete(self, waiting: Waiting) -> bool:
        incoming = self._incoming.get(waiting.load.transfer_id)
        if incoming is None or waiting.unusable:
            return False
        return incoming.has(waiting.load.first_block, incoming.num_blocks)

    def _has_segment(self, waiting: Waiting) -> bool:
        incoming = self._incoming.get(waiting.load.transfer_id)
        if incoming is None or not waiting.is_open:
            return False
        return incoming.has_segment(waiting.load.first_block)

    def _take(self, waiting: Waiting, *, is_last: bool) -> Arrived:
        waiting.taken = True
        incoming = self._incoming.get(waiting.load.transfer_id)
        if incoming is None or waiting.unusable or incoming.offer.digest != waiting.load.digest:
            return Arrived(waiting, None, (), is_last)
        incoming.pins += 1
        ring = incoming.memory.ring
        first = waiting.load.first_block + waiting.num_blocks
        last = incoming.usable_end(first) if is_last else ring.end_of(incoming.num_loaded)
        stretches = tuple(
            Stretch(segment, start, end, tuple(incoming.checks[segment]))
            for start, end in ring.split(first, last)
            for segment in (ring.segment_of(start),)
        )
        return Arrived(waiting, incoming, stretches, is_last)

    def _drop(self, incoming: Incoming) -> None:
        """Take no more bytes for it, and free its memory as soon as nobody touches it."""
        incoming.dropped = True
        if self._incoming.get(incoming.offer.transfer_id) is incoming:
            del self._incoming[incoming.offer.transfer_id]
        for ticket in incoming.tickets.values():
            self._tickets.pop(ticket.number, None)
        self._free(incoming)

    def _free(self, incoming: Incoming) -> None:
        if incoming.pins == 0 and not incoming.freed:
            incoming.freed = True
            self._host_buffer.give(incoming.memory.region)

    def _settle(self, transfer_id: str) -> None:
        self._settled[transfer_id] = None
        while len(self._settled) > _MAX_REMEMBERED:
            self._settled.popitem(last=False)

    def _expire(self) -> None:
        now = self._clock()
        for transfer_id, incoming in list(self._incoming.items()):
            if transfer_id in self._kept or transfer_id in self._waiting:
                incoming.expires_at = now + self._settings.config.lease_seconds
            elif now >= incoming.expires_at:
                self._drop(incoming)
