"""Ask producers for what requests wait for, one thread per producer instance.

As long as a request waits, its producer is asked again and again whether the KV is still coming: a
producer that died, was restarted or gave the hand-over up is found out within moments, not at the
deadline.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from lmcache_connector.kv_layout.topology import RankTopology
from lmcache_connector.p2p.control import messages
from lmcache_connector.p2p.control.address import PeerAddress
from lmcache_connector.p2p.control.client import Connect, ControlClient
from lmcache_connector.p2p.control.peers import concerned, ranks_of
from lmcache_connector.p2p.errors import AddressError, PeerError
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
    forgets: list[tuple[str, str]] = field(default_factory=list)
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
        """Until it is over, keep asking for it. Never waits."""
        self._tell(waiting.load.source, waiting, None)

    def forget(self, source: PeerAddress, transfer_id: str, reason: str) -> None:
        """Tell the producer, once, if it can be reached. Never waits."""
        self._tell(source, None, (transfer_id, reason))

    def close(self, seconds: float) -> None:
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
        self, source: PeerAddress, waiting: Waiting | None, forget: tuple[str, str] | None
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
                if waiting is not None:
                    producer.waiting.append(waiting)
                if forget is not None:
                    producer.forgets.append(forget)
                producer.changed.notify_all()

    # -- an producer's thread ---------------------------------------------------------------------

    def _work(self, producer: _PolledProducer) -> None:
        sessions: list[ControlClient] = []
        try:
            while (todo := self._next(producer)) is not None:
                waiting, forgets = todo
                try:
                    sessions = sessions or self._open(producer.source)
                    for each in waiting:
                        self._want(producer.source, sessions, each)
                    for transfer_id, reason in forgets:
                        for session in sessions:
                            session.ask(messages.Forget(transfer_id, reason))
                except PeerError as error:
                    self._lose(waiting, error)
                    _close(sessions)
                    sessions = []
        finally:
            _close(sessions)

    def _next(
        self, producer: _PolledProducer
    ) -> tuple[list[Waiting], list[tuple[str, str]]] | None:
        """What to ask and tell now: at once what is new, the rest again after a while."""
        with producer.changed:
            now = self._clock()
            while not self._stopping:
                producer.waiting = [w for w in producer.waiting if not self._buffer.is_over(w)]
                is_new = any(w not in producer.asked for w in producer.waiting) or producer.forgets
                if is_new or (producer.waiting and self._clock() - now >= _ASK_SECONDS):
                    forgets, producer.forgets = producer.forgets, []
                    producer.asked = list(producer.waiting)
                    return producer.asked, forgets
                if not producer.waiting and self._clock() - now > _IDLE_SECONDS:
                    break
                producer.changed.wait(_ASK_SECONDS if producer.waiting else _IDLE_SECONDS)
            producer.closed = True
            return None

    def _open(self, source: PeerAddress) -> list[ControlClient]:
        """Sessions with all ranks of the producer that have something for this one."""
        first = self._connect(source)
        sessions = [first]
        try:
            ranks = concerned(self._own, ranks_of(first.peer.card), sends=False)
            sessions += [self._connect(source.of_rank(rank)) for rank in ranks if rank]
            if 0 not in ranks:
                sessions.remove(first)
                first.close()
        except (PeerError, AddressError) as error:
            _close(sessions)
            raise PeerError(str(error)) from error
        return sessions

    def _want(self, source: PeerAddress, sessions: list[ControlClient], waiting: Waiting) -> None:
        load = waiting.load
        want = messages.Want(load.transfer_id, load.digest, load.first_block)
        for session in sessions:
            answer = session.ask(want)
            if isinstance(answer, messages.Gone):
                self._buffer.fail(load.transfer_id, f"{source} says: {answer.reason}")
            elif self._is_patient(waiting):
                continue
            elif isinstance(answer, messages.Unknown):
                self._buffer.fail(load.transfer_id, f"{source} has never heard of it")
            elif isinstance(answer, messages.Sent):
                self._buffer.fail(load.transfer_id, f"{source} has sent it, but it did not arrive")

    def _is_patient(self, waiting: Waiting) -> bool:
        """Bytes may be on their way to us, or the prompt's request on its way to the producer."""
        return self._clock() - self._buffer.last_progress(waiting) < self._grace_seconds

    def _lose(self, waiting: list[Waiting], error: PeerError) -> None:
        for each in waiting:
            if not self._buffer.is_over(each):
                self._buffer.fail(each.load.transfer_id, str(error))


def _close(sessions: list[ControlClient]) -> None:
    for session in sessions:
        session.close()
