"""The consumer's memory: KV that arrives, and the requests that wait for it.

The two meet here, whichever comes first: an :class:`Incoming` and a :class:`Waiting`. A request is
over when everything it needs is there, or when something ends it (the producer's word, a lost
connection, its deadline, an abort); then what has arrived without a gap is used, and the rest is
recomputed.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from lmcache_connector.kv_layout.topology import RankTopology
from lmcache_connector.p2p.control import messages
from lmcache_connector.p2p.control.messages import Message, Offer
from lmcache_connector.p2p.control.peers import Peer, overlap, ranks_of
from lmcache_connector.p2p.data.base import Landing
from lmcache_connector.p2p.data.frame import Frame
from lmcache_connector.p2p.errors import PeerError
from lmcache_connector.p2p.plans import HandoverLoad
from lmcache_connector.p2p.worker.host_buffer import HostBuffer, run_of
from lmcache_connector.p2p.worker.transfer import Arrived, Check, Incoming, Ticket, Waiting
from lmcache_connector.storage.geometry import ChunkGeometry

_MAX_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class ReceiveBufferSettings:
    """``part``: this rank's geometry for one block; ``max_blocks``: of the longest prompt."""

    own: RankTopology
    block_geometry: ChunkGeometry
    max_blocks: int
    lease_seconds: float

    @property
    def block_size(self) -> int:
        return self.block_geometry.num_tokens

    def geometry(self, num_blocks: int) -> ChunkGeometry:
        one = self.block_geometry
        return replace(one, num_tokens=num_blocks * one.num_tokens)


class ReceiveBuffer:
    """A :class:`~lmcache_connector.p2p.data.base.Sink`, and the control server's answers to offers.

    ``changed``: something arrived, ended, or began to be waited for.
    """

    def __init__(
        self, settings: ReceiveBufferSettings, host_buffer: HostBuffer, clock: Callable[[], float]
    ) -> None:
        self._settings = settings
        self._host_buffer = host_buffer
        self._clock = clock
        self.changed = threading.Condition()
        self._incoming: dict[str, Incoming] = {}
        self._waiting: dict[str, Waiting] = {}
        self._latecomers: list[Waiting] = []
        """Requests for a hand-over that another one has."""
        self._settled: OrderedDict[str, None] = OrderedDict()
        self._tickets: dict[int, tuple[bytes, Incoming]] = {}
        self._last_ticket = 0
        self._stopping = False

    # -- the engine's step thread --------------------------------------------------------------

    def expect(self, load: HandoverLoad) -> Waiting:
        """The request's blocks are allocated: from now on it waits."""
        with self.changed:
            self._expire()
            waiting = Waiting(load, self._clock())
            former = self._waiting.get(load.transfer_id)
            if former is not None or load.transfer_id in self._settled:
                waiting.end = "another request has taken this hand-over"
                waiting.cancelled = True
                self._latecomers.append(waiting)
            else:
                self._waiting[load.transfer_id] = waiting
                incoming = self._incoming.get(load.transfer_id)
                if incoming is not None and incoming.offer.digest != load.digest:
                    waiting.end = "the producer computed another prompt"
                    self._drop(incoming)
            self.changed.notify_all()
            return waiting

    def is_over(self, waiting: Waiting) -> bool:
        """Whether nothing more needs to come."""
        with self.changed:
            return bool(waiting.end) or self._is_complete(waiting)

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
                if waiting.load.request_id == request_id and not waiting.end:
                    waiting.end, waiting.cancelled = "the load was cancelled", True
            self.changed.notify_all()

    def discard(self, transfer_id: str) -> None:
        """Nobody will come for it."""
        with self.changed:
            self._settle(transfer_id)
            incoming = self._incoming.get(transfer_id)
            if incoming is not None and transfer_id not in self._waiting:
                self._drop(incoming)

    def end_overdue(self) -> None:
        """Called once per step: deadlines, and hand-overs nobody came for."""
        with self.changed:
            self._expire()
            now = self._clock()
            for waiting in self._waiting.values():
                if not waiting.end and now >= waiting.deadline:
                    waiting.end = f"it did not come within {waiting.load.deadline_seconds:g} s"
                    self.changed.notify_all()

    @property
    def num_waiting(self) -> int:
        with self.changed:
            return len(self._waiting) + len(self._latecomers)

    # -- the loader's thread -------------------------------------------------------------------

    def next_arrived(self) -> Arrived | None:
        """Waits for a request that is over. ``None``: the loader shall end."""
        with self.changed:
            while True:
                for waiting in (*self._waiting.values(), *self._latecomers):
                    if not waiting.taken and (waiting.end or self._is_complete(waiting)):
                        return self._take(waiting)
                if self._stopping:
                    return None
                self.changed.wait()

    def loaded(self, arrived: Arrived) -> None:
        """The loader is done with the memory."""
        with self.changed:
            transfer_id = arrived.waiting.load.transfer_id
            if arrived.incoming is not None:
                arrived.incoming.pins -= 1
            if self._waiting.get(transfer_id) is arrived.waiting:
                del self._waiting[transfer_id]
                self._settle(transfer_id)
                if (incoming := self._incoming.get(transfer_id)) is not None:
                    self._drop(incoming)
            else:
                self._latecomers.remove(arrived.waiting)
            self.changed.notify_all()

    # -- what others say -----------------------------------------------------------------------

    def fail(self, transfer_id: str, reason: str) -> None:
        """The producer will not deliver it."""
        with self.changed:
            waiting = self._waiting.get(transfer_id)
            if waiting is not None and not waiting.end and not self._is_complete(waiting):
                waiting.end = reason
            incoming = self._incoming.get(transfer_id)
            if incoming is not None and waiting is None:
                self._drop(incoming)
            self.changed.notify_all()

    def offered(self, peer: Peer, offer: Offer) -> Message:
        """The control server's answer to an offer. Raises nothing; sizes are checked here."""
        with self.changed:
            self._expire()
            if offer.transfer_id in self._settled or self._stopping:
                return messages.Settled()
            waiting = self._waiting.get(offer.transfer_id)
            if waiting is not None and waiting.end:
                return messages.Settled()
            if waiting is not None and waiting.load.digest != offer.digest:
                waiting.end = "the producer computed another prompt"
                self.changed.notify_all()
                return messages.Refused("I wait for another prompt under this name")
            incoming = self._incoming.get(offer.transfer_id)
            if incoming is None:
                made = self._make(offer, peer)
                if not isinstance(made, Incoming):
                    return made
                incoming = made
            elif incoming.offer != offer:
                return messages.Refused("this name is another prompt's")
            return self._give_ticket(incoming, peer)

    # -- the transport's threads ---------------------------------------------------------------

    def land(self, session: bytes, frame: Frame) -> Landing | None:
        with self.changed:
            owner, incoming = self._tickets.get(frame.ticket, (b"", None))
            if incoming is None or owner != session or incoming.dropped:
                return None
            last = frame.first_block + frame.num_blocks
            heads = range(frame.first_head, frame.first_head + frame.num_heads)
            try:
                runs = [
                    run_of(
                        incoming.geometry,
                        incoming.num_blocks,
                        frame.layer,
                        head,
                        frame.first_block,
                        last,
                    )
                    for head in heads
                ]
            except ValueError as error:
                raise PeerError(f"a frame of something else: {error}") from error
            if any(run.stop - run.start != frame.head_bytes for run in runs):
                raise PeerError("a frame whose size is not that of its blocks")
            incoming.pins += 1
            if incoming.first_byte_at is None:
                incoming.first_byte_at = self._clock()
            views = [incoming.region.view[run] for run in runs]
            return Landing(views, (incoming, frame, runs))

    def landed(self, landing: Landing, *, complete: bool) -> None:
        incoming, frame, runs = _token(landing)
        with self.changed:
            incoming.pins -= 1
            # A ticket may have been taken back meanwhile, when its transfer began anew.
            if complete and frame.ticket in self._tickets:
                self._mark(incoming, frame, runs)
            if incoming.dropped:
                self._free(incoming)

    def lost(self, session: bytes, reason: str) -> None:
        with self.changed:
            for incoming in list(self._incoming.values()):
                ticket = incoming.tickets.get(session)
                if ticket is None or incoming.part_of(ticket.part).all():
                    continue
                transfer_id = incoming.offer.transfer_id
                waiting = self._waiting.get(transfer_id)
                if waiting is None:
                    self._drop(incoming)
                elif not waiting.end and not self._is_complete(waiting):
                    waiting.end = f"the producer was lost: {reason}"
            self.changed.notify_all()

    def close(self) -> None:
        with self.changed:
            self._stopping = True
            for waiting in self._waiting.values():
                waiting.end = waiting.end or "the consumer is shutting down"
            self.changed.notify_all()

    # -- details, under the lock ---------------------------------------------------------------

    def _make(self, offer: Offer, peer: Peer) -> Incoming | Message:
        settings = self._settings
        num_blocks = -(-offer.num_tokens // settings.block_size)
        if not 0 < num_blocks <= settings.max_blocks:
            return messages.Refused(
                f"a prompt of {offer.num_tokens} tokens does not fit into this instance"
            )
        geometry = settings.geometry(num_blocks)
        if geometry.chunk_bytes > self._host_buffer.capacity_bytes:
            return messages.Refused(f"{geometry.chunk_bytes} bytes do not fit into kv_buffer_size")
        region = self._host_buffer.take(geometry.chunk_bytes)
        if region is None:
            return messages.Busy()
        shape = (len(geometry.shards), len(geometry.layer_widths), num_blocks)
        expires_at = self._clock() + settings.lease_seconds
        incoming = Incoming(offer, geometry, region, np.zeros(shape, np.bool_), expires_at)
        self._incoming[offer.transfer_id] = incoming
        return incoming

    def _give_ticket(self, incoming: Incoming, peer: Peer) -> Message:
        """A second offer of the same rank begins its part anew: its request was preempted."""
        try:
            part = overlap(ranks_of(peer.card)[peer.card.rank], self._settings.own)
        except PeerError as error:
            return messages.Refused(str(error))
        if part is None:
            return messages.Settled()
        former = incoming.tickets.pop(peer.session, None)
        if former is not None:
            self._tickets.pop(former.number, None)
            incoming.part_of(part)[:] = False
            incoming.checks = {
                key: check
                for key, check in incoming.checks.items()
                if key[0] not in part.layers() or key[1] not in part.heads
            }
        self._last_ticket += 1
        incoming.tickets[peer.session] = Ticket(self._last_ticket, part)
        self._tickets[self._last_ticket] = (peer.session, incoming)
        return messages.Accepted(self._last_ticket)

    def _mark(self, incoming: Incoming, frame: Frame, runs: list[slice]) -> None:
        place = incoming.geometry.shards.index(frame.first_head)
        layer = frame.layer - incoming.geometry.layer_start
        last = frame.first_block + frame.num_blocks
        incoming.received[place : place + frame.num_heads, layer, frame.first_block : last] = True
        for index, checksum in enumerate(frame.checksums):
            key = (frame.layer, frame.first_head + index, frame.first_block)
            incoming.checks[key] = Check(runs[index], frame.first_block, last, checksum)
        incoming.num_bytes += frame.num_bytes
        incoming.last_byte_at = self._clock()
        waiting = self._waiting.get(incoming.offer.transfer_id)
        if waiting is not None and self._is_complete(waiting):
            self.changed.notify_all()

    def _is_complete(self, waiting: Waiting) -> bool:
        incoming = self._incoming.get(waiting.load.transfer_id)
        if incoming is None or waiting.cancelled:
            return False
        needed = min(waiting.load.first_block, incoming.num_blocks)
        return bool(incoming.received[:, :, needed:].all())

    def _take(self, waiting: Waiting) -> Arrived:
        waiting.taken = True
        waiting.end = waiting.end or "complete"
        incoming = self._incoming.get(waiting.load.transfer_id)
        if incoming is None or waiting.cancelled or incoming.offer.digest != waiting.load.digest:
            return Arrived(waiting, None, 0)
        incoming.pins += 1
        num_blocks = incoming.num_usable(waiting.load.first_block)
        return Arrived(waiting, incoming, num_blocks, tuple(incoming.checks.values()))

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
            self._host_buffer.give(incoming.region)

    def _settle(self, transfer_id: str) -> None:
        self._settled[transfer_id] = None
        while len(self._settled) > _MAX_REMEMBERED:
            self._settled.popitem(last=False)

    def _expire(self) -> None:
        now = self._clock()
        for transfer_id, incoming in list(self._incoming.items()):
            if now >= incoming.expires_at and transfer_id not in self._waiting:
                self._drop(incoming)


def _token(landing: Landing) -> tuple[Incoming, Frame, list[slice]]:
    return cast(tuple[Incoming, Frame, list[slice]], landing.token)
