"""Asks producers for what requests wait for, one thread per producer instance, so many at most.

As long as a request waits for its KV, its producer is asked again and again whether it is still
coming. So a producer that died, was restarted or gave the hand-over up is found out within moments,
not at the deadline. As long as a request waits in line, the lease of its hand-over is renewed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from lmcache_connector.kv_layout.topology import RankTopology
from lmcache_connector.p2p.config import P2PConfig
from lmcache_connector.p2p.control import messages
from lmcache_connector.p2p.control.address import PeerAddress
from lmcache_connector.p2p.control.messages import Message
from lmcache_connector.p2p.control.peers import overlap, ranks_of
from lmcache_connector.p2p.errors import PeerError, ReadError
from lmcache_connector.p2p.reasons import Cause, Reason
from lmcache_connector.p2p.worker.incoming import Waiting
from lmcache_connector.p2p.worker.reader import Place, Reader
from lmcache_connector.p2p.worker.receive_buffer import ReceiveBuffer
from lmcache_connector.p2p.worker.session import Connect, PeerSession
from lmcache_connector.threads import start_thread

logger = logging.getLogger(__name__)

_ASK_SECONDS = 0.2
_LOOK_SECONDS = 0.02  # what is to be read is not announced
_MAX_ASKS_PER_SECOND = 500  # for what one producer was asked for before
_IDLE_SECONDS = 60.0
_MAX_PRODUCERS = 64
_MAX_FORGETS = 1024
_TOO_MANY = Cause(Reason.REFUSED, "requests name too many producers at a time")


@dataclass(eq=False)
class _PolledProducer:
    """One producer instance. ``asked``: for these, since ``asked_at``. ``forgets``: what it may
    forget. ``kept``: those whose leases are renewed, with the time of the last renewal. Guarded by
    ``changed``. ``split``: what some ranks held in their blocks, and others did not, when they were
    asked last."""

    source: PeerAddress
    changed: threading.Condition = field(default_factory=threading.Condition)
    waiting: list[Waiting] = field(default_factory=list)
    asked: set[Waiting] = field(default_factory=set)
    split: list[Waiting] = field(default_factory=list)
    forgets: list[messages.Forget] = field(default_factory=list)
    kept: dict[str, float] = field(default_factory=dict)
    thread: threading.Thread | None = None
    has_news: bool = False
    closed: bool = False
    ask_seconds: float = _ASK_SECONDS
    asked_at: float = 0.0

    @property
    def pause_seconds(self) -> float:
        """Between two times that it is asked for all."""
        return max(self.ask_seconds, len(self.waiting) / _MAX_ASKS_PER_SECOND)

    def tell(self) -> None:
        self.has_news = True
        self.changed.notify_all()

    def take_forgets(self) -> list[messages.Forget]:
        forgets, self.forgets = self.forgets, []
        return forgets

    def take_kept(self, now: float, seconds: float) -> list[messages.Keep]:
        """Of leases that were not renewed for ``seconds``."""
        due = [name for name, at in self.kept.items() if now - at >= seconds]
        self.kept.update(dict.fromkeys(due, now))
        size = messages.MAX_KEPT
        return [messages.Keep(tuple(due[i : i + size])) for i in range(0, len(due), size)]


@dataclass(frozen=True, slots=True)
class _Todo:
    """What to ask and tell a producer now."""

    waiting: Sequence[Waiting]
    tell: Sequence[messages.Forget | messages.Keep]


class Poller:
    """``own``: this rank. ``reader``: reads what producers hold in their paged caches."""

    def __init__(
        self,
        buffer: ReceiveBuffer,
        own: RankTopology,
        connect: Connect,
        config: P2PConfig,
        clock: Callable[[], float],
        reader: Reader | None = None,
    ) -> None:
        self._buffer = buffer
        self._reader = reader
        self._own = own
        self._connect = connect
        self._grace_seconds = config.unknown_grace_seconds
        self._keep_seconds = config.keep_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._producers: dict[PeerAddress, _PolledProducer] = {}
        self._stopping = False

    def watch(self, waiting: Waiting) -> None:
        """Keep asking for it until it is over. Never blocks."""
        with self._lock:
            producer = self._producer(waiting.load.source)
            if producer is None:
                self._lose([waiting], _TOO_MANY)
                return
            with producer.changed:
                producer.waiting.append(waiting)
                producer.tell()

    def keep(self, source: PeerAddress, transfer_id: str) -> None:
        """Renew its lease from now on, until :meth:`let_go`. Never blocks."""
        with self._lock:
            producer = self._producer(source)
            if producer is not None:
                with producer.changed:
                    producer.kept[transfer_id] = float("-inf")
                    producer.tell()

    def let_go(self, source: PeerAddress, transfer_id: str) -> None:
        """Its request does not wait in line any more."""
        with self._lock:
            producer = self._producers.get(source)
        if producer is not None:
            with producer.changed:
                producer.kept.pop(transfer_id, None)

    @property
    def has_line(self) -> bool:
        """Whether requests wait in line."""
        with self._lock:
            return any(producer.kept for producer in self._producers.values())

    def forget(self, source: PeerAddress, transfer_id: str, cause: Cause) -> None:
        """Tell the producer once, if it can be reached. Never blocks."""
        with self._lock:
            producer = self._producer(source)
            if producer is not None:
                with producer.changed:
                    if len(producer.forgets) < _MAX_FORGETS:
                        producer.forgets.append(messages.Forget(transfer_id, cause.to_wire()))
                    producer.tell()

    def close(self, seconds: float) -> None:
        """Stop asking. Bounded by ``seconds``."""
        with self._lock:
            self._stopping = True
            producers = list(self._producers.values())
        end = self._clock() + seconds
        for producer in producers:
            with producer.changed:
                producer.tell()
        for producer in producers:
            if producer.thread is not None:
                producer.thread.join(max(0.0, end - self._clock()))

    def _producer(self, source: PeerAddress) -> _PolledProducer | None:
        """``None``: there are too many already, or no thread can be started."""
        producer = self._producers.get(source)
        if producer is not None and not producer.closed:
            return producer
        self._producers = {a: p for a, p in self._producers.items() if not p.closed}
        if len(self._producers) >= _MAX_PRODUCERS:
            return None
        producer = _PolledProducer(source)
        try:
            producer.thread = start_thread("lmc-p2p-poll", self._work, producer)
        except RuntimeError as error:
            logger.warning("%s is not asked: %s", source, error)
            return None
        self._producers[source] = producer
        return producer

    # -- one thread per producer ---------------------------------------------------------------

    def _work(self, producer: _PolledProducer) -> None:
        sessions: list[PeerSession] = []
        places: Sequence[Place] | None = None
        idle_seconds = _IDLE_SECONDS
        try:
            while (todo := self._next(producer, idle_seconds)) is not None:
                is_old, idle_seconds = bool(sessions), _IDLE_SECONDS
                try:
                    if not sessions:
                        sessions = self._open(producer.source)
                        places = self._reader.places(sessions) if self._reader else None
                        producer.ask_seconds = _ASK_SECONDS if places is None else _LOOK_SECONDS
                    for message in todo.tell:
                        for session in sessions:
                            session.ask(message)
                    for each in todo.waiting:
                        self._want(producer, sessions, places, each)
                    continue
                except ReadError as error:
                    logger.warning("%s is asked for frames: %s", producer.source, error)
                    self._read_no_more(producer, places)
                    places = None
                    continue
                except PeerError as error:
                    cause = error.cause
                except Exception:  # it costs what was asked for
                    logger.exception("Asking %s failed", producer.source)
                    cause = Cause(Reason.OTHER, f"asking {producer.source} failed")
                self._leave(sessions, places)
                sessions, places, idle_seconds = [], None, 0.0  # who names it next dials anew
                if is_old and cause.reason is Reason.LOST:
                    producer.asked = set()  # another instance may be there by now
                else:
                    self._lose(todo.waiting, cause)
        finally:
            self._leave(sessions, places)

    def _next(self, producer: _PolledProducer, idle_seconds: float) -> _Todo | None:
        """What to ask and tell now: at once what is new, the rest again after a while.

        ``None``: the thread shall end.
        """
        since = self._clock()
        while not self._stopping:
            with self._lock, producer.changed:  # nobody may add to what is being closed
                producer.has_news = False
                todo = self._todo(producer)
                if todo.waiting or todo.tell:
                    return todo
                is_idle = not producer.waiting and not producer.kept
                if is_idle and self._clock() - since >= idle_seconds:
                    producer.closed = True
                    return None
                pause = idle_seconds if is_idle else self._keep_seconds
                pause = producer.pause_seconds if producer.waiting else pause
            with producer.changed:
                producer.changed.wait_for(lambda: producer.has_news or self._stopping, pause)
        producer.closed = True
        return None

    def _todo(self, producer: _PolledProducer) -> _Todo:
        producer.waiting = [w for w in producer.waiting if not self._buffer.is_over(w)]
        producer.split = [w for w in producer.split if w in producer.waiting]
        if self._clock() - producer.asked_at >= producer.pause_seconds:
            producer.asked, producer.asked_at = set(), self._clock()
        waiting = [w for w in producer.waiting if w not in producer.asked]
        producer.asked = set(producer.waiting)
        kept = producer.take_kept(self._clock(), self._keep_seconds)
        return _Todo(waiting, [*kept, *producer.take_forgets()])

    def _open(self, source: PeerAddress) -> list[PeerSession]:
        """Sessions with all ranks of the producer that have something for this one."""
        first = self._connect(source)
        sessions = [first]
        try:
            card = first.card
            ranks = [r.rank for r in ranks_of(card) if overlap(r, self._own)]
            sessions += [self._connect(card.address_of(rank)) for rank in ranks if rank]
            if 0 not in ranks:
                sessions.remove(first)
                first.close()
        except BaseException:
            _close(sessions)
            raise
        return sessions

    def _want(
        self,
        producer: _PolledProducer,
        sessions: list[PeerSession],
        places: Sequence[Place] | None,
        waiting: Waiting,
    ) -> None:
        load, reads = waiting.load, places is not None
        want = messages.Want(load.transfer_id, load.digest, load.first_block, reads)
        answers = [session.ask(want) for session in sessions]
        held = [answer for answer in answers if isinstance(answer, messages.Held)]
        if self._reader is not None and places is not None and len(held) == len(sessions):
            self._reader.read(sessions, places, held, waiting)
            return
        if held and waiting in producer.split:  # it is not going to change
            want = msgspec.structs.replace(want, reads=False)
            pairs = zip(sessions, answers, strict=True)
            answers = [s.ask(want) if isinstance(a, messages.Held) else a for s, a in pairs]
        elif held:
            producer.split.append(waiting)
            return
        for answer in answers:
            cause = self._judge(producer.source, answer, waiting)
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

    def _read_no_more(self, producer: _PolledProducer, places: Sequence[Place] | None) -> None:
        """Ask at once for what was to be read."""
        self._leave([], places)
        producer.asked, producer.ask_seconds = set(), _ASK_SECONDS

    def _leave(self, sessions: list[PeerSession], places: Sequence[Place] | None) -> None:
        _close(sessions)
        if self._reader is not None and places is not None:
            self._reader.forget(places)

    def _lose(self, waiting: Sequence[Waiting], cause: Cause) -> None:
        for each in waiting:
            if not self._buffer.is_over(each):
                self._buffer.fail(each.load.transfer_id, cause)


def _close(sessions: list[PeerSession]) -> None:
    for session in sessions:
        session.close()
