"""Brings what the send buffer holds to the consumers, one thread per consumer rank.

Each thread offers a transfer on the control plane, gets a ticket, and sends its pieces on the data
plane as they are saved. A consumer without room answers ``Busy``: the transfer waits where it is
and others go first. A peer that fails loses its deliveries; the transfers stay in the buffer until
a consumer asks for them again or their lease ends.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import xxhash

from lmcache_connector.kv_layout.topology import RankTopology
from lmcache_connector.p2p.control import messages
from lmcache_connector.p2p.control.address import PeerAddress
from lmcache_connector.p2p.control.client import Connect, ControlClient
from lmcache_connector.p2p.control.messages import Card
from lmcache_connector.p2p.control.peers import Overlap, overlap, ranks_of
from lmcache_connector.p2p.data.base import Outlet, Session, Transport
from lmcache_connector.p2p.data.frame import Frame
from lmcache_connector.p2p.errors import PeerError, RefusedError
from lmcache_connector.p2p.worker.send_buffer import SendBuffer
from lmcache_connector.p2p.worker.transfer import Delivery, Destination, Piece

logger = logging.getLogger(__name__)

_BUSY_SECONDS = 0.02
_IDLE_SECONDS = 60.0
_WAKE_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Route:
    """A consumer instance, and what this rank has for each of its ranks."""

    address: PeerAddress
    parts: dict[Destination, Overlap]


@dataclass(eq=False)
class _RankQueue:
    """What is to go to one consumer rank. Guarded by the send buffer's lock.

    ``address``: of the rank's instance. ``busy_until``: for deliveries without room there.
    """

    to: Destination
    address: PeerAddress
    deliveries: list[Delivery] = field(default_factory=list)
    busy_until: dict[Delivery, float] = field(default_factory=dict)
    thread: threading.Thread | None = None

    def next_due(self, now: float) -> Delivery | None:
        """The first delivery with something to do. Forgets those that are over."""
        self.deliveries = [
            d for d in self.deliveries if not d.over or (d.transfer.failed and d.ticket)
        ]
        for delivery in self.deliveries:
            is_free = self.busy_until.get(delivery, 0.0) <= now
            if delivery.transfer.failed or (is_free and delivery.is_behind):
                return delivery
        return None

    def wait_seconds(self, now: float) -> float:
        """Time until a delivery may become due without a notification."""
        return min([_WAKE_SECONDS, *(t - now for t in self.busy_until.values() if t > now)])


class Sender:
    """``own``: this rank. ``transports``: by name, the preferred one first. ``seconds``: how long a
    data connection may take."""

    def __init__(
        self,
        buffer: SendBuffer,
        own: RankTopology,
        connect: Connect,
        transports: dict[str, Transport],
        seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self._buffer = buffer
        self._own = own
        self._connect = connect
        self._transports = transports
        self._seconds = seconds
        self._clock = clock
        self._queues: dict[Destination, _RankQueue] = {}
        self._routes: dict[PeerAddress, Route] = {}
        self._stopping = False

    def push(self, transfer_id: str, target: PeerAddress) -> None:
        """Deliver to all ranks of the instance at ``target``. Never blocks."""
        with self._buffer.changed:
            route = self._routes.get(target)
        if route is not None:
            self._carry(route, self._buffer.route(transfer_id, route.parts))
            return
        work = partial(self._find_and_push, transfer_id, target)
        threading.Thread(target=work, name="lmc-p2p-find", daemon=True).start()

    def fetch(self, transfer_id: str, card: Card, first_block: int) -> None:
        """Deliver to the one rank that asked. Never blocks. Raises ``PeerError``."""
        route = self._route_to(card)
        only = Destination(card.engine_id, card.rank)
        self._carry(route, self._buffer.route(transfer_id, route.parts, only, first_block))

    def close(self, seconds: float) -> None:
        """End all threads. Bounded by ``seconds``."""
        with self._buffer.changed:
            self._stopping = True
            self._buffer.changed.notify_all()
            threads = [queue.thread for queue in self._queues.values()]
        end = self._clock() + seconds
        for thread in threads:
            if thread is not None:
                thread.join(max(0.0, end - self._clock()))

    # -- who is to get what --------------------------------------------------------------------

    def _find_and_push(self, transfer_id: str, target: PeerAddress) -> None:
        try:
            client = self._connect(target)
            client.close()
            route = self._route_to(client.peer.card, target)
        except PeerError as error:
            logger.warning("KV cannot be pushed to a decode instance: %s", error)
            return
        with self._buffer.changed:
            self._routes[target] = route
        self._carry(route, self._buffer.route(transfer_id, route.parts))

    def _route_to(self, card: Card, address: PeerAddress | None = None) -> Route:
        parts = {
            Destination(card.engine_id, rank.rank): part
            for rank in ranks_of(card)
            if (part := overlap(self._own, rank)) is not None
        }
        return Route(address or PeerAddress(card.host, card.port), parts)

    def _carry(self, route: Route, deliveries: Iterable[Delivery]) -> None:
        with self._buffer.changed:
            for delivery in deliveries:
                queue = self._queues.get(delivery.to)
                if queue is None:
                    queue = _RankQueue(delivery.to, route.address)
                    queue.thread = threading.Thread(
                        target=self._work, args=(queue,), name="lmc-p2p-send", daemon=True
                    )
                    self._queues[delivery.to] = queue
                    queue.thread.start()
                queue.address = route.address  # it may have been restarted elsewhere
                queue.deliveries.append(delivery)
            self._buffer.changed.notify_all()

    # -- one thread per consumer rank ----------------------------------------------------------

    def _work(self, queue: _RankQueue) -> None:
        connection: _Connection | None = None
        try:
            while (delivery := self._next(queue)) is not None:
                try:
                    connection = connection or self._open(queue)
                    self._advance(queue, connection, delivery)
                except PeerError as error:
                    logger.warning("KV did not reach a decode instance: %s", error)
                    self._give_up(queue)
                    if connection is not None:
                        connection.close()
                    connection = None
        finally:
            if connection is not None:
                connection.close()

    def _next(self, queue: _RankQueue) -> Delivery | None:
        """Waits for a delivery with something to do. ``None``: the thread shall end."""
        idle_since = self._clock()
        with self._buffer.changed:
            while not self._stopping:
                now = self._clock()
                delivery = queue.next_due(now)
                if delivery is not None:
                    return delivery
                if queue.deliveries:
                    idle_since = now
                elif now - idle_since > _IDLE_SECONDS:
                    break
                self._buffer.changed.wait(queue.wait_seconds(now))
            self._queues.pop(queue.to, None)
            return None

    def _open(self, queue: _RankQueue) -> _Connection:
        address = queue.address.of_rank(queue.to.rank)
        client = self._connect(address)
        card = client.peer.card
        try:
            if (card.engine_id, card.rank) != (queue.to.engine_id, queue.to.rank):
                raise PeerError(f"another instance is at {address} now")
            transport = next((t for t in self._transports if t in card.transports), None)
            if transport is None:
                raise PeerError(f"{address} shares no transport with this instance")
            outlet = self._transports[transport].connect(
                queue.address.host,
                card.transports[transport],
                Session(client.peer.session, client.peer.data_key),
                self._seconds,
            )
        except PeerError:
            client.close()
            raise
        return _Connection(client, outlet)

    def _advance(self, queue: _RankQueue, connection: _Connection, delivery: Delivery) -> None:
        """Do the next thing for a delivery: tell of its end, offer it, or send a piece."""
        outgoing = delivery.transfer
        if outgoing.failed is not None:
            self._buffer.finish(delivery)
            delivery.ticket, ticket = None, delivery.ticket
            if ticket is not None and not outgoing.superseded:
                cause = outgoing.failed.to_wire()
                connection.client.ask(messages.Forget(outgoing.transfer_id, cause))
            return
        if delivery.ticket is None and not self._offer(queue, connection, delivery):
            return
        piece = self._buffer.next_piece(delivery)
        if piece is None:
            return
        try:
            _send(connection.outlet, delivery, piece)
        except PeerError:
            self._buffer.abandon(delivery, pinned=True)
            raise
        self._buffer.piece_sent(delivery)

    def _offer(self, queue: _RankQueue, connection: _Connection, delivery: Delivery) -> bool:
        """Whether there is a ticket now."""
        start = delivery.transfer.start
        try:
            answer = connection.client.ask(
                messages.Offer(start.transfer_id, start.digest, start.num_tokens)
            )
        except RefusedError as error:
            logger.warning("A hand-over was refused: %s", error)
            answer = messages.Settled()
        if isinstance(answer, messages.Accepted):
            queue.busy_until.pop(delivery, None)
            delivery.ticket = answer.ticket
            return True
        if isinstance(answer, messages.Busy):
            queue.busy_until[delivery] = self._clock() + _BUSY_SECONDS
        else:
            queue.busy_until.pop(delivery, None)
            self._buffer.finish(delivery)
        return False

    def _give_up(self, queue: _RankQueue) -> None:
        with self._buffer.changed:
            self._routes = {k: r for k, r in self._routes.items() if queue.to not in r.parts}
            for delivery in queue.deliveries:
                if not delivery.over:
                    self._buffer.abandon(delivery, pinned=False)
            queue.deliveries.clear()
            queue.busy_until.clear()


@dataclass(frozen=True, slots=True)
class _Connection:
    client: ControlClient
    outlet: Outlet

    def close(self) -> None:
        self.outlet.close()
        self.client.close()


def _send(outlet: Outlet, delivery: Delivery, piece: Piece) -> None:
    """The part of a piece that concerns the consumer rank, if any."""
    outgoing, part = delivery.transfer, delivery.part
    first = max(piece.first_block, delivery.first_block)
    if piece.layer not in part.layers() or first >= piece.last_block:
        return
    views = [outgoing.run(piece.layer, head, first, piece.last_block) for head in part.heads]
    checksums: tuple[int, ...] = ()
    if piece.checksums and first == piece.first_block:
        places = map(outgoing.geometry.shards.index, part.heads)
        checksums = tuple(piece.checksums[place] for place in places)
    elif piece.checksums:
        checksums = tuple(map(xxhash.xxh3_64_intdigest, views))
    assert delivery.ticket is not None
    frame = Frame(
        ticket=delivery.ticket,
        layer=piece.layer,
        first_head=part.heads[0],
        num_heads=len(part.heads),
        first_block=first,
        num_blocks=piece.last_block - first,
        head_bytes=len(views[0]),
        checksums=checksums,
    )
    outlet.send(frame, views)
