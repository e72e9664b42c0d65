"""Brings what the send buffer holds to the consumers, one courier per consumer rank.

A courier offers a transfer on the control plane, gets a ticket, and sends its parts on the data
plane as they are saved. A consumer without room answers ``Busy``: the transfer waits where it is
and others go first. A peer that fails loses its deliveries; the transfers stay in the buffer until
a consumer asks for them again or their lease ends.

Consumers are known by the address on their own cards. An address that a request names only leads to
such a card.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from lmcache_connector.kv_layout.topology import RankTopology
from lmcache_connector.p2p.control import messages
from lmcache_connector.p2p.control.address import PeerAddress
from lmcache_connector.p2p.control.messages import Card
from lmcache_connector.p2p.control.peers import Overlap, overlap, ranks_of
from lmcache_connector.p2p.crew import Crew
from lmcache_connector.p2p.data.frame import Frame, digest_of
from lmcache_connector.p2p.errors import PeerError, RefusedError
from lmcache_connector.p2p.memory.outgoing import Delivery, Destination, Part
from lmcache_connector.p2p.reasons import Reason
from lmcache_connector.p2p.worker.send_buffer import SendBuffer
from lmcache_connector.p2p.worker.session import Connect, PeerSession
from lmcache_connector.threads import start_thread

logger = logging.getLogger(__name__)

_BUSY_SECONDS = 0.02
_MAX_BUSY_PER_SECOND = 200  # questions to one consumer that has no room
_IDLE_SECONDS = 60.0
_WAKE_SECONDS = 0.5
_MAX_COURIERS = 256
_MAX_FINDERS = 8
_MAX_WAITING = 256
_MAX_KNOWN = 1024

Parts = dict[Destination, Overlap]
"""What this rank has for each rank of a consumer instance."""


@dataclass(eq=False)
class _Courier:
    """What is to go to one consumer rank. Guarded by the send buffer's lock.

    ``busy_until``: for deliveries without room there.
    """

    to: Destination
    deliveries: list[Delivery] = field(default_factory=list)
    busy_until: dict[Delivery, float] = field(default_factory=dict)
    thread: threading.Thread | None = None

    def next_due(self, now: float) -> Delivery | None:
        """The first delivery with something to do. Forgets those that are over."""
        self.deliveries = [
            d for d in self.deliveries if not d.over or (d.transfer.failed and d.ticket)
        ]
        self.busy_until = {d: t for d, t in self.busy_until.items() if not d.over}
        for delivery in self.deliveries:
            is_free = self.busy_until.get(delivery, 0.0) <= now
            if delivery.transfer.failed or (is_free and delivery.is_behind):
                return delivery
        return None

    def wait_seconds(self, now: float) -> float:
        """Time until a delivery may become due without a notification."""
        return min([_WAKE_SECONDS, *(t - now for t in self.busy_until.values() if t > now)])


class Sender:
    """``own``: this rank."""

    def __init__(
        self,
        buffer: SendBuffer,
        own: RankTopology,
        connect: Connect,
        clock: Callable[[], float],
    ) -> None:
        self._buffer = buffer
        self._own = own
        self._connect = connect
        self._clock = clock
        self._couriers: dict[Destination, _Courier] = {}
        self._known: dict[PeerAddress, Parts] = {}
        self._finders = Crew("lmc-p2p-find", _MAX_FINDERS, _MAX_WAITING)
        self._stopping = False

    def push(self, transfer_id: str, target: PeerAddress) -> None:
        """Deliver to all ranks of the instance at ``target``. Never blocks."""
        with self._buffer.changed:
            parts = self._known.get(target)
        if parts is not None:
            self._carry(self._buffer.route(transfer_id, parts))
        elif not self._finders.submit(partial(self._find_and_push, transfer_id, target)):
            logger.warning("%s is not pushed: too many instances are looked for", transfer_id)

    def fetch(self, transfer_id: str, card: Card, first_block: int) -> None:
        """Deliver to the one rank that asked. Never blocks. Raises ``PeerError``."""
        only = Destination(card.address, card.engine_id, card.rank)
        parts = self._parts_of(card)
        self._carry(self._buffer.route(transfer_id, parts, only, first_block))

    def close(self, seconds: float) -> None:
        """End all threads. Bounded by ``seconds``."""
        self._finders.close()
        with self._buffer.changed:
            self._stopping = True
            self._buffer.changed.notify_all()
            threads = [courier.thread for courier in self._couriers.values()]
        end = self._clock() + seconds
        for thread in threads:
            if thread is not None:
                thread.join(max(0.0, end - self._clock()))

    # -- who is to get what --------------------------------------------------------------------

    def _find_and_push(self, transfer_id: str, target: PeerAddress) -> None:
        try:
            session = self._connect(target)
            session.close()
            parts = self._parts_of(session.card)
        except PeerError as error:
            logger.warning("KV cannot be pushed to a decode instance: %s", error)
            return
        with self._buffer.changed:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known[target] = parts
        self._carry(self._buffer.route(transfer_id, parts))

    def _parts_of(self, card: Card) -> Parts:
        """Raises ``PeerError`` for a card whose addresses cannot be."""
        return {
            Destination(card.address_of(rank.rank), card.engine_id, rank.rank): part
            for rank in ranks_of(card)
            if (part := overlap(self._own, rank)) is not None
        }

    def _carry(self, deliveries: Iterable[Delivery]) -> None:
        with self._buffer.changed:
            for delivery in deliveries:
                courier = self._couriers.get(delivery.to) or self._hire(delivery.to)
                if courier is not None:
                    courier.deliveries.append(delivery)
                else:
                    self._buffer.abandon(delivery)
            self._buffer.changed.notify_all()

    def _hire(self, to: Destination) -> _Courier | None:
        """``None``: there are too many, or no thread can be started."""
        if len(self._couriers) >= _MAX_COURIERS:
            logger.warning("KV is not sent to %s: there are too many decode instances", to.address)
            return None
        courier = _Courier(to)
        try:
            courier.thread = start_thread("lmc-p2p-send", self._work, courier)
        except RuntimeError as error:
            logger.warning("KV is not sent to %s: %s", to.address, error)
            return None
        self._couriers[to] = courier
        return courier

    # -- one thread per courier ----------------------------------------------------------------

    def _work(self, courier: _Courier) -> None:
        session: PeerSession | None = None
        try:
            while (delivery := self._next(courier)) is not None:
                try:
                    session = session or self._open(courier)
                    self._advance(courier, session, delivery)
                    continue
                except PeerError as error:
                    logger.warning("KV did not reach a decode instance: %s", error)
                except Exception:  # it costs what was under way to this peer
                    logger.exception("KV did not reach %s", courier.to.address)
                self._give_up(courier)
                if session is not None:
                    session.close()
                session = None
        finally:
            if session is not None:
                session.close()

    def _next(self, courier: _Courier) -> Delivery | None:
        """Waits for a delivery with something to do. ``None``: the thread shall end."""
        idle_since = self._clock()
        with self._buffer.changed:
            while not self._stopping:
                now = self._clock()
                delivery = courier.next_due(now)
                if delivery is not None:
                    return delivery
                if courier.deliveries:
                    idle_since = now
                elif now - idle_since > _IDLE_SECONDS:
                    break
                self._buffer.changed.wait(courier.wait_seconds(now))
            self._couriers.pop(courier.to, None)
            return None

    def _open(self, courier: _Courier) -> PeerSession:
        session = self._connect(courier.to.address)
        card = session.card
        if Destination(card.address, card.engine_id, card.rank) != courier.to:
            session.close()
            raise PeerError(f"another instance is at {courier.to.address} now")
        return session

    def _advance(self, courier: _Courier, session: PeerSession, delivery: Delivery) -> None:
        """Do the next thing for a delivery: tell of its end, offer it, ask for room, or send."""
        outgoing = delivery.transfer
        if outgoing.failed is not None:
            self._buffer.finish(delivery)
            delivery.ticket, ticket = None, delivery.ticket
            if ticket is not None and not outgoing.superseded:
                cause = outgoing.failed.to_wire()
                session.ask(messages.Forget(outgoing.transfer_id, cause))
            return
        if delivery.ticket is None:
            self._offer(courier, session, delivery)
        elif delivery.blocked:
            self._ask_for_room(courier, session, delivery)
        else:
            with self._buffer.next_part(delivery) as part:
                if part is not None:
                    _send(session, delivery, part)

    def _offer(self, courier: _Courier, session: PeerSession, delivery: Delivery) -> None:
        start = delivery.transfer.start
        try:
            answer = session.ask(messages.Offer(start.transfer_id, start.digest, start.num_tokens))
        except RefusedError as error:
            logger.warning("A hand-over was refused: %s", error)
            answer = messages.Settled()
        if isinstance(answer, messages.Accepted):
            self._buffer.accepted(delivery, answer)
        elif isinstance(answer, messages.Busy):
            self._wait_for_room(courier, delivery)
        else:
            self._buffer.finish(delivery)

    def _ask_for_room(self, courier: _Courier, session: PeerSession, delivery: Delivery) -> None:
        assert delivery.ticket is not None
        answer = session.ask(messages.More(delivery.ticket))
        if not isinstance(answer, messages.Room):
            self._buffer.finish(delivery)
        elif not self._buffer.granted(delivery, answer.num_blocks):
            self._wait_for_room(courier, delivery)

    def _wait_for_room(self, courier: _Courier, delivery: Delivery) -> None:
        with self._buffer.changed:
            pause = max(_BUSY_SECONDS, len(courier.busy_until) / _MAX_BUSY_PER_SECOND)
            courier.busy_until[delivery] = self._clock() + pause
            self._buffer.block(delivery)

    def _give_up(self, courier: _Courier) -> None:
        with self._buffer.changed:
            self._known = {k: p for k, p in self._known.items() if courier.to not in p}
            for delivery in courier.deliveries:
                if not delivery.over:
                    self._buffer.abandon(delivery)
            courier.deliveries.clear()
            courier.busy_until.clear()


def _send(session: PeerSession, delivery: Delivery, part: Part) -> None:
    outgoing, heads = delivery.transfer, delivery.overlap.heads
    piece = outgoing.pieces[part.index]
    blocks = part.first_block, part.last_block
    views = [outgoing.run(piece.layer, head, *blocks) for head in heads]
    digests: tuple[bytes, ...] = ()
    if piece.digests:
        places = map(outgoing.memory.geometry.shards.index, heads)
        digests = tuple(piece.digests[place] for place in places)
    if digests and blocks != (piece.first_block, piece.last_block):
        size = len(digests[0])
        if part.first_block == max(piece.first_block, delivery.first_block):  # once per piece
            whole = piece.first_block, piece.last_block
            saved = [outgoing.run(piece.layer, head, *whole) for head in heads]
            if digests != tuple(digest_of([run], size) for run in saved):
                raise PeerError("memory is not as its prompt was saved", Reason.BAD_CHECKSUM)
        digests = tuple(digest_of([view], size) for view in views)
    assert delivery.ticket is not None
    frame = Frame(
        ticket=delivery.ticket,
        layer=piece.layer,
        first_head=heads[0],
        num_heads=len(heads),
        first_block=part.first_block,
        num_blocks=part.last_block - part.first_block,
        head_bytes=len(views[0]),
        digests=digests,
    )
    session.send(frame, views)
