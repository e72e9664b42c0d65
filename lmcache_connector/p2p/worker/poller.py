"""Asks producers for what requests wait for, one thread per producer instance.

As long as a request waits, its producer is asked again and again whether the KV is still coming. So
a producer that died, was restarted or gave the hand-over up is found out within moments, not at the
deadline.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lmcache_connector.kv_layout.topology import RankTopology
from lmcache_connector.p2p.control import messages
from lmcache_connector.p2p.control.address import PeerAddress
from lmcache_connector.p2p.control.client import Connect, ControlClient
from lmcache_connector.p2p.control.messages import Message
from lmcache_connector.p2p.control.peers import overlap, ranks_of
from lmcache_connector.p2p.errors import PeerError
from lmcache_connector.p2p.reasons import Cause, Reason
from lmcache_connector.p2p.worker.receive_buffer import ReceiveBuffer
from lmcache_connector.p2p.worker.transfer import Waiting

logger = logging.getLogger(__name__)

_ASK_SECONDS = 0.2
_IDLE_SECONDS = 60.0


@dataclass(eq=False)
class _PolledProducer:
    """One producer instance. ``forgets``: transfers it may forget. Guarded by ``changed``."""

    source: PeerAddress
    changed: threading.Condition = field(default_factory=threading.Condition)
    waiting: list[Waiting] = field(default_factory=list)
    asked: list[Waiting] = field(default_factory=list)
    forgets: list[messages.Forget] = field(default_factory=list)
    thread: threading.Thread | None = None
    closed: bool = False


class Poller:
    """``own``: this rank. ``grace_seconds``: how long a producer may not know a transfer."""

    def __init__(
        self,
        buffer: ReceiveBuffer,
        own: RankTopology,
        connect: Connect,
        grace_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self._buffer = buffer
        self._own = own
        self._connect = connect
        self._grace_seconds = grace_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._producers: dict[PeerAddress, _PolledProducer] = {}
        self._stopping = False

    def watch(self, waiting: Waiting) -> None:
        """Keep asking for it until it is over. Never blocks."""
        self._tell(waiting.load.source, waiting=[waiting])

    def forget(self, source: PeerAddress, transfer_id: str, cause: Cause) -> None:
        """Tell the producer once, if it can be reached. Never blocks."""
        self._tell(source, forgets=[messages.Forget(transfer_id, cause.to_wire())])

    def close(self, seconds: float) -> None:
        """Stop asking. Bounded by ``seconds``."""
        with self._lock:
            self._stopping = True
            producers = list(self._producers.values())
        end = self._clock() + seconds
        for producer in producers:
            with producer.changed:
                producer.changed.notify_all()
        for producer in producers:
            if producer.thread is not None:
                producer.thread.join(max(0.0, end - self._clock()))

    def _tell(
        self,
        source: PeerAddress,
        waiting: Sequence[Waiting] = (),
        forgets: Sequence[messages.Forget] = (),
    ) -> None:
        with self._lock:
            producer = self._producers.get(source)
            if producer is None or producer.closed:
                producer = self._producers[source] = _PolledProducer(source)
                producer.thread = threading.Thread(
                    target=self._work, args=(producer,), name="lmc-p2p-poll", daemon=True
                )
                producer.thread.start()
            with producer.changed:
                producer.waiting += waiting
                producer.forgets += forgets
                producer.changed.notify_all()

    # -- one thread per producer ---------------------------------------------------------------

    def _work(self, producer: _PolledProducer) -> None:
        sessions: list[ControlClient] = []
        try:
            while (todo := self._next(producer)) is not None:
                waiting, forgets = todo
                try:
                    sessions = sessions or self._open(producer.source)
                    for each in waiting:
                        self._want(producer.source, sessions, each)
                    for forget in forgets:
                        for session in sessions:
                            session.ask(forget)
                except PeerError as error:
                    self._lose(waiting, error.cause)
                    _close(sessions)
                    sessions = []
        finally:
            _close(sessions)

    def _next(
        self, producer: _PolledProducer
    ) -> tuple[list[Waiting], list[messages.Forget]] | None:
        """What to ask and tell now: at once what is new, the rest again after a while.

        ``None``: the thread shall end.
        """
        with producer.changed:
            since = self._clock()
            while not self._stopping:
                quiet_seconds = self._clock() - since
                producer.waiting = [w for w in producer.waiting if not self._buffer.is_over(w)]
                is_new = any(w not in producer.asked for w in producer.waiting) or producer.forgets
                if is_new or (producer.waiting and quiet_seconds >= _ASK_SECONDS):
                    forgets, producer.forgets = producer.forgets, []
                    producer.asked = list(producer.waiting)
                    return producer.asked, forgets
                if not producer.waiting and quiet_seconds > _IDLE_SECONDS:
                    break
                producer.changed.wait(_ASK_SECONDS if producer.waiting else _IDLE_SECONDS)
            producer.closed = True
            return None

    def _open(self, source: PeerAddress) -> list[ControlClient]:
        """Sessions with all ranks of the producer that have something for this one."""
        first = self._connect(source)
        sessions = [first]
        try:
            ranks = [r.rank for r in ranks_of(first.peer.card) if overlap(r, self._own)]
            sessions += [self._connect(source.of_rank(rank)) for rank in ranks if rank]
            if 0 not in ranks:
                sessions.remove(first)
                first.close()
        except PeerError:
            _close(sessions)
            raise
        return sessions

    def _want(self, source: PeerAddress, sessions: list[ControlClient], waiting: Waiting) -> None:
        load = waiting.load
        want = messages.Want(load.transfer_id, load.digest, load.first_block)
        for session in sessions:
            cause = self._judge(source, session.ask(want), waiting)
            if cause is not None:
                self._buffer.fail(load.transfer_id, cause)

    def _judge(self, source: PeerAddress, answer: Message, waiting: Waiting) -> Cause | None:
        """Why a producer that answers so will not deliver; ``None``: it may."""
        if isinstance(answer, messages.Gone):
            return Cause(answer.cause.reason, f"{source} says: {answer.cause.text}")
        # Bytes may be on their way to us, or the prompt's request on its way to the producer.
        if self._clock() - self._buffer.last_progress(waiting) < self._grace_seconds:
            return None
        if isinstance(answer, messages.Unknown):
            return Cause(Reason.UNKNOWN, f"{source} has never heard of it")
        if isinstance(answer, messages.Sent):
            return Cause(Reason.NOT_ARRIVED, f"{source} has sent it, but it did not arrive")
        return None

    def _lose(self, waiting: list[Waiting], cause: Cause) -> None:
        for each in waiting:
            if not self._buffer.is_over(each):
                self._buffer.fail(each.load.transfer_id, cause)


def _close(sessions: list[ControlClient]) -> None:
    for session in sessions:
        session.close()
