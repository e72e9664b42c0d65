"""Asks the instances that requests name about KV transfers and chunks, off the scheduler's thread.

Each instance has a thread, which ends when it is idle and no request needs a transfer of the
instance any more, or when another instance needs the thread. It asks all ranks: a transfer is
complete, and a chunk available, only if every rank says so. An instance that does not answer delays
only the requests that name it, bounded by the connection time-outs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from lmcache_connector.net.address import Address
from lmcache_connector.peers.awaited import Awaited, Cause, Offered
from lmcache_connector.peers.commands import KEY_PREFIX_BYTES, MAX_ASKED, Greeting
from lmcache_connector.storage.redis.client.dial import (
    CONNECTION_ERRORS,
    Client,
    Dialer,
    PendingCommand,
    disable_reconnect,
)
from lmcache_connector.storage.redis.client.resp import command
from lmcache_connector.storage.redis.config import RedisTierConfig
from lmcache_connector.threads import start_thread

logger = logging.getLogger(__name__)

MAX_RANKS = 64
_MAX_POLLERS = 64
_MAX_ASKED = 64  # in one command
_MAX_ANSWER_BYTES = 8 << 20
# An instance that does not know a transfer yet may learn of it a moment later.
_UNKNOWN_SECONDS = 1.0
# Long poll. `_InstancePoller._end_long_poll` cuts it short when there is another command to send.
_MAX_WAIT_MS = 250
_WAIT_MS_BY_TURN = 10  # while more requests wait than one command asks for
_PING = command(b"PING")
_IDLE_SECONDS = 30.0


class TransferWatch:
    """``reader``: identifies this instance to producers. Called on the scheduler's thread."""

    def __init__(
        self, config: RedisTierConfig, reader: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config
        self._reader = reader
        self._clock = clock
        self._lock = threading.Lock()
        self._pollers: dict[Address, _InstancePoller] = {}
        self._is_closed = False

    def ask(
        self, source: Address, transfer_id: str, seconds: float, keys: Sequence[bytes] = ()
    ) -> Awaited:
        """Returns at once. The answer may come after ``seconds``: the caller ends the wait. Without
        a ``transfer_id``, ask which of the chunks ``keys`` are cached."""
        awaited = Awaited(source, transfer_id, self._clock() + seconds, keys)
        for _ in range(2):  # an idle thread may end between these two calls
            poller = self._poller(source)
            if poller is not None and poller.add(awaited):
                return awaited
        awaited.settle(Offered(cause=Cause.BUSY))
        return awaited

    def done(self, awaited: Awaited) -> None:
        """The request no longer needs the transfer: it was read, or will not be."""
        awaited.cancel()
        with self._lock:
            poller = self._pollers.get(awaited.source)
        if poller is not None:
            poller.forget(awaited)

    def close(self) -> None:
        """Threads end on their own, within the connection time-outs."""
        with self._lock:
            self._is_closed = True
            pollers = list(self._pollers.values())
        for poller in pollers:
            poller.close()

    def _poller(self, source: Address) -> _InstancePoller | None:
        with self._lock:
            poller = self._pollers.get(source)
            if poller is not None and not poller.is_ended:
                return poller
            for address, each in sorted(self._pollers.items(), key=lambda item: item[1].num_unread):
                is_full = len(self._pollers) >= _MAX_POLLERS
                if each.end_if_idle() if is_full else each.is_ended:
                    del self._pollers[address]
            if self._is_closed or len(self._pollers) >= _MAX_POLLERS:
                return None
            seconds = self._config.connect_timeout_seconds, self._config.read_timeout_seconds
            dialer = Dialer(self._config.address, *seconds, self._clock)
            try:
                poller = _InstancePoller(source, dialer, self._reader, self._config, self._clock)
            except RuntimeError:  # the system starts no more threads
                return None
            self._pollers[source] = poller
            return poller


class _InstancePoller:
    """One instance's pending transfers, and the thread that asks for them."""

    def __init__(
        self,
        source: Address,
        dialer: Dialer,
        reader: str,
        config: RedisTierConfig,
        clock: Callable[[], float],
    ) -> None:
        self._source = source
        self._config = config
        self._dialer = dialer
        self._reader = reader
        self._clock = clock
        self._wait_ms = max(1, min(_MAX_WAIT_MS, int(500 * config.read_timeout_seconds)))
        self._changed = threading.Condition()
        self._open: list[Awaited] = []
        self._unread: dict[str, set[Awaited]] = {}  # requests that still need a transfer, by its id
        self._read: list[str] = []  # transfers to end by DONE
        self._clients: list[Client] = []  # by rank
        self._asked: PendingCommand | None = None  # the command in flight
        self._has_more = False  # commands were added after the current one was built
        self._is_pinged = False
        self._is_late = False  # a request gave up asking for chunks while this thread was busy
        self._is_idle = False  # the thread waits for work
        self._is_troubled = False  # logged
        self._engine_id = ""  # of the last connected instance
        self.is_ended = False
        start_thread("lmc-transfers", self._run)

    def add(self, awaited: Awaited) -> bool:
        """False if the thread has ended."""
        with self._changed:
            if self._is_late and not awaited.transfer_id:
                awaited.settle(Offered(cause=Cause.DEADLINE))
            elif not self.is_ended:
                self._open.append(awaited)
                if name := awaited.transfer_id:
                    self._unread.setdefault(name, set()).add(awaited)
                    self._read = [each for each in self._read if each != name]
                self._end_long_poll()
            return not self.is_ended

    def forget(self, awaited: Awaited) -> None:
        with self._changed:
            if awaited in self._open:
                self._open.remove(awaited)
                was_late = awaited.value is not None and awaited.value.cause is Cause.DEADLINE
                self._is_late |= was_late and not awaited.transfer_id
            if name := awaited.transfer_id:
                left = self._unread.pop(name, set()) - {awaited}
                if left:
                    self._unread[name] = left
                else:
                    self._read.append(name)
            self._end_long_poll()

    def _end_long_poll(self) -> None:
        """Send a PING to end a long poll, since there is another command to send. The server does
        not delay a reply to a client that has sent another command. Under the lock."""
        self._has_more = True
        self._changed.notify()
        if self._asked is not None and not self._is_pinged:
            self._is_pinged = self._asked.add(_PING)

    def end_if_idle(self) -> bool:
        """Another instance needs a thread: end this one if it has nothing to do, and say whether it
        has ended. It goes on in a call to a silent instance, even if no request waits. If a load is
        in progress, nobody will tell the instance of its end."""
        with self._changed:
            if self._is_idle and not (self._open or self._read):
                self._end()
            return self.is_ended

    @property
    def num_unread(self) -> int:
        return len(self._unread)

    def close(self) -> None:
        with self._changed:
            self._end()

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._ask_again_if_lost()
        except Exception:
            logger.exception("Waiting for KV transfers of %s failed", self._source)
        finally:
            with self._changed:
                self._end()
            self._disconnect()

    def _end(self) -> None:
        self.is_ended = True
        for awaited in self._unsettled():
            awaited.settle(Offered(cause=Cause.LOST))
        self._open.clear()
        self._changed.notify()

    def _unsettled(self) -> list[Awaited]:
        return [each for each in self._open if not (each.is_done or each.is_cancelled)]

    def _must_wake(self) -> bool:
        return bool(self._open or self._read or self.is_ended)

    def _wait_for_work(self) -> bool:
        with self._changed:
            self._is_late = False
            if not self._must_wake():
                self._is_idle = True
                self._changed.wait_for(self._must_wake, _IDLE_SECONDS)
                self._is_idle = False
            self.is_ended |= not (self._open or self._read or self._unread)
            return not self.is_ended

    def _ask_again_if_lost(self) -> None:
        """Retry once on a connection used before: the server may have closed it while idle."""
        may_retry = bool(self._clients)
        try:
            self._work()
        except CONNECTION_ERRORS as error:
            with self._changed:
                self._open = self._unsettled()
            if not may_retry:
                self._give_up(error)
            self._disconnect()
            if may_retry:
                self._ask_again_if_lost()

    def _give_up(self, error: Exception) -> None:
        with self._changed:
            lost, self._open, self._read = self._open, [], []
        for awaited in lost:
            awaited.settle(Offered(cause=Cause.LOST if self._engine_id else Cause.UNREACHABLE))
        if lost and not self._is_troubled:
            self._is_troubled, why = True, self._config.address.redact(error)
            logger.warning("%d requests cannot load KV from %s: %s", len(lost), self._source, why)

    def _disconnect(self) -> None:
        for client in self._clients:
            client.close()
        self._clients = []

    def _work(self) -> None:
        """One round of questions. Raises one of ``CONNECTION_ERRORS``."""
        if not self._clients:
            if not self._open:
                self._read = []  # a dial for these alone would hold up requests that come meanwhile
                return
            self._connect()
            for awaited in tuple(self._open):
                awaited.forget_answers()  # another engine may have given them
        with self._changed:
            asked, read = self._open[:_MAX_ASKED], self._read[:_MAX_ASKED]
            fits = len(asked) == len(self._open)
            wait_ms = self._wait_ms if fits else min(self._wait_ms, _WAIT_MS_BY_TURN)
            self._has_more = len(self._read) > len(read)
        transfers = [each for each in asked if each.transfer_id]
        for each in asked:
            if not (each.transfer_id or each.is_cancelled):
                each.settle(Offered(self._held(each.keys), len(self._clients), self._engine_id))
        for client in self._clients if read else ():
            client.execute_command("DONE", self._reader, *read)
        with self._changed:
            self._read = [name for name in self._read if name not in read]
        for rank, client in enumerate(self._clients[1:], 1):  # so that all ranks pin the chunks now
            new = [each for each in transfers if rank not in each.known_by]
            self._ask(rank, client, new, 0)
        for rank, client in enumerate(self._clients):
            waiting = [each for each in transfers if each.first_incomplete_rank == rank]
            self._ask(rank, client, waiting, wait_ms)
        self._is_troubled = False
        with self._changed:  # round robin if there are more than fit into one command
            self._open = sorted(self._unsettled(), key=set(asked).__contains__)

    def _connect(self) -> None:
        greeting = self._greet_next()
        if greeting.num_ranks > MAX_RANKS:
            raise ValueError(f"it has {greeting.num_ranks} ranks")
        while len(self._clients) < greeting.num_ranks:
            if self._greet_next() != greeting:
                raise ValueError(f"rank {len(self._clients) - 1} belongs to another instance")
        self._engine_id = greeting.engine_id

    def _greet_next(self) -> Greeting:
        """Connect to the next rank and read its greeting, before any name of a request is sent. A
        lost connection is not redialled: another instance may listen there by then."""
        port = self._source.port + len(self._clients)
        client = self._dialer.connect(self._source.host, port, _MAX_ANSWER_BYTES)
        self._clients.append(client)
        disable_reconnect(client)
        return Greeting.parse(client.execute_command("PEER"))

    def _held(self, keys: Sequence[bytes]) -> frozenset[bytes]:
        """Key prefixes of the chunks that every rank has."""
        for client in self._clients:
            held = list[bytes]()
            for first in range(0, len(keys), MAX_ASKED):
                asked = keys[first : first + MAX_ASKED]
                said = client.execute_command("HOLDS", self._config.namespace, b"".join(asked))
                if not isinstance(said, bytes) or len(said) != len(asked) or said.strip(b"01"):
                    raise ValueError("a malformed answer")
                held += [key for key, bit in zip(asked, said, strict=True) if bit == ord("1")]
            keys = held
        return frozenset(key[:KEY_PREFIX_BYTES] for key in keys)

    def _ask(self, rank: int, client: Client, asked: list[Awaited], wait_ms: int) -> None:
        """Ask about those still open, and apply the answers. The rank may hold its reply for
        ``wait_ms``."""
        asked = [awaited for awaited in asked if not (awaited.is_cancelled or awaited.is_done)]
        if not asked:
            return
        names, sent_at = [awaited.transfer_id for awaited in asked], self._clock()
        with PendingCommand(client, "TRANSFER", wait_ms, self._reader, *names) as pending:
            with self._changed:
                self._asked = pending
                if self._has_more:
                    self._end_long_poll()
            try:
                answer = pending.answer()
            finally:
                with self._changed:
                    self._asked, was_pinged, self._is_pinged = None, self._is_pinged, False
            if was_pinged:
                pending.answer()
        if not isinstance(answer, list) or len(answer) != len(asked):
            raise ValueError("a malformed answer")
        now = self._clock()
        for awaited, said in zip(asked, answer, strict=True):
            if said is not None:
                awaited.known_by.add(rank)
            else:
                awaited.unknown_since = min(awaited.unknown_since, now)
            if isinstance(said, bytes):
                awaited.by_rank[rank] = _prefixes(said)
            if len(awaited.by_rank) == len(self._clients):
                held = frozenset.intersection(*awaited.by_rank.values())
                awaited.settle(Offered(held, len(self._clients), self._engine_id))
            elif rank != awaited.first_incomplete_rank:
                continue  # that one says how it goes on
            elif said is None and sent_at - awaited.unknown_since > _UNKNOWN_SECONDS:
                awaited.settle(Offered(cause=Cause.UNKNOWN))
            elif now >= awaited.until:
                awaited.settle(Offered(cause=Cause.DEADLINE))


def _prefixes(said: bytes) -> frozenset[bytes]:
    size = KEY_PREFIX_BYTES
    if len(said) % size:
        raise ValueError("a truncated chunk key")
    return frozenset(said[i : i + size] for i in range(0, len(said), size))
