"""Readers that wait for KV transfers of another instance, over sockets."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import redis

from lmcache_connector.net.address import Address
from lmcache_connector.peers import watch as watch_module
from lmcache_connector.peers.awaited import Awaited, Cause, Offered
from lmcache_connector.peers.commands import IncompleteTransfer
from lmcache_connector.peers.server import PeerServer
from lmcache_connector.peers.transfers import Transfers
from lmcache_connector.peers.watch import TransferWatch
from lmcache_connector.plans import TransferUpdate
from lmcache_connector.storage.redis.client.url import RedisAddress
from lmcache_connector.storage.redis.config import RedisTierConfig
from tests.support.clock import within
from tests.support.peers import KEYS, HeldChunks, send_transfer, serving
from tests.support.redis.chunks import PARTS
from tests.support.redis.servers import free_ports

NUM_HELD = 4
CHUNK_BYTES = PARTS.of(KEYS[0]).chunk_bytes
PATIENT = RedisTierConfig(
    url="redis://peers", connect_timeout_seconds=30.0, read_timeout_seconds=30.0
)


@pytest.fixture
def chunks() -> HeldChunks:
    return HeldChunks(range(NUM_HELD))


class HeardTransfers(Transfers):
    """Transfers that record which were asked for, and which are no longer needed."""

    def __init__(self, chunks: HeldChunks) -> None:
        super().__init__(chunks, 16 * CHUNK_BYTES, 60.0)
        self._heard = threading.Condition()
        self._names, self._done = Counter[tuple[bytes, str]](), set[str]()

    def state(self, reader: bytes, transfer_id: str) -> bytes | IncompleteTransfer:
        found = super().state(reader, transfer_id)
        with self._heard:
            self._names[reader, transfer_id] += 1
            self._heard.notify_all()
        return found

    def done(self, reader: bytes, transfer_id: str) -> None:
        super().done(reader, transfer_id)
        with self._heard:
            self._done.add(transfer_id)
            self._heard.notify_all()

    def times_asked(self, name: str) -> int:
        with self._heard:
            return self._names[b"reader", name]

    def await_done(self, name: str) -> None:
        """Waits until a reader no longer needs the transfer ``name``."""
        with self._heard:
            assert self._heard.wait_for(lambda: name in self._done, 20.0)

    def await_reader(self, name: str, reader: bytes = b"reader", times: int = 1) -> None:
        """Waits until the reader has asked for the transfer ``name`` so many times."""
        with self._heard:
            assert self._heard.wait_for(lambda: self._names[reader, name] >= times, 20.0)


@pytest.fixture
def served(chunks: HeldChunks) -> Iterator[tuple[HeardTransfers, PeerServer]]:
    transfers = HeardTransfers(chunks)
    with serving(chunks, transfers=transfers) as server:
        yield transfers, server


@pytest.fixture
def watch() -> Iterator[TransferWatch]:
    with closing(TransferWatch(PATIENT, "reader")) as found:
        yield found


@pytest.fixture
def impatient() -> Iterator[TransferWatch]:
    config = replace(PATIENT, connect_timeout_seconds=3.0, read_timeout_seconds=3.0)
    with closing(TransferWatch(config, "reader")) as found:
        yield found


def at(server: PeerServer) -> Address:
    return Address("127.0.0.1", server.port)


def answer_of(awaited: Awaited, seconds: float = 10.0) -> Offered:
    assert awaited.wait(seconds)
    assert awaited.value is not None
    return awaited.value


def test_a_waiting_reader_is_told(
    served: tuple[HeardTransfers, PeerServer], watch: TransferWatch, chunks: HeldChunks
) -> None:
    transfers, server = served
    transfers.apply([TransferUpdate("t"), TransferUpdate("never")])
    awaited = watch.ask(at(server), "t", 60.0)
    coming = watch.ask(at(server), "never", 0.5)
    transfers.await_reader("t")
    send_transfer(transfers, "t", (0, 2))
    answer = answer_of(awaited)
    assert [answer.holds(key) for key in KEYS] == [True, False, True, False, False, False]
    assert answer_of(coming).cause is Cause.DEADLINE
    watch.done(awaited)
    assert chunks.await_leased(lambda count: count == 0)


def test_a_reader_does_not_wait_behind_another(
    served: tuple[HeardTransfers, PeerServer],
    watch: TransferWatch,
    chunks: HeldChunks,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither its question nor its ``DONE`` waits until the other is answered."""
    monkeypatch.setattr(watch_module, "_MAX_WAIT_MS", 10_000)
    transfers, server = served
    transfers.apply([TransferUpdate("never")])
    coming = watch.ask(at(server), "never", 60.0)
    transfers.await_reader("never")
    started = time.monotonic()
    for number in range(20):
        send_transfer(transfers, f"t{number}", (0, 2))
        awaited = watch.ask(at(server), f"t{number}", 60.0)
        assert answer_of(awaited).holds(KEYS[2])
        watch.done(awaited)
    assert chunks.await_leased(lambda count: count == 0)
    assert time.monotonic() - started < 5.0
    assert coming.value is None


def test_each_transfer_is_ended(
    served: tuple[HeardTransfers, PeerServer],
    watch: TransferWatch,
    chunks: HeldChunks,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Even if more end at once than one command holds: the rest would stay leased until expiry."""
    monkeypatch.setattr(watch_module, "_MAX_ASKED", 1)
    transfers, server = served
    read = []
    for number in range(20):
        send_transfer(transfers, f"t{number}", (number % 5, number % 5 + 1))
        read.append(watch.ask(at(server), f"t{number}", 60.0))
    for awaited in read:
        assert answer_of(awaited).cause is None
    for awaited in read:
        watch.done(awaited)
    assert chunks.await_leased(lambda count: count == 0)


def test_the_last_of_an_instances_requests_ends_their_transfer(
    served: tuple[HeardTransfers, PeerServer], watch: TransferWatch, chunks: HeldChunks
) -> None:
    """As with ``n=3``: the last may have to load when the others have loaded."""
    transfers, server = served
    send_transfer(transfers, "t", (0, 2))
    *others, last = (watch.ask(at(server), "t", 60.0) for _ in range(3))
    for awaited in (*others, last):
        assert answer_of(awaited).holds(KEYS[2])
    for awaited in others:
        watch.done(awaited)
    send_transfer(transfers, "later", ())
    later = watch.ask(at(server), "later", 60.0)
    assert answer_of(later).cause is None  # a DONE before it would have been heard by now
    assert chunks.num_leased == 2
    watch.done(later)
    watch.done(last)
    assert chunks.await_leased(lambda count: count == 0)


def test_a_transfer_is_ended_however_long_its_load_took(
    served: tuple[HeardTransfers, PeerServer],
    watch: TransferWatch,
    chunks: HeldChunks,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Threads without work end, but not this one."""
    monkeypatch.setattr(watch_module, "_IDLE_SECONDS", 0.01)
    transfers, server = served
    send_transfer(transfers, "t", (0, 2))
    awaited = watch.ask(at(server), "t", 60.0)
    assert answer_of(awaited).holds(KEYS[0])
    assert not within(0.2, lambda: watch._pollers[at(server)].is_ended)
    watch.done(awaited)
    assert chunks.await_leased(lambda count: count == 0)
    assert within(20.0, lambda: watch._pollers[at(server)].is_ended)


@contextlib.contextmanager
def three_ranks() -> Iterator[tuple[Address, list[HeldChunks], list[HeardTransfers]]]:
    held = [HeldChunks(range(NUM_HELD)) for _ in range(3)]
    transfers, port = [HeardTransfers(chunks) for chunks in held], free_ports(3)
    with ExitStack() as stack:
        for rank in range(3):
            ranks: dict[str, Any] = {"ranks": [PARTS] * 3, "rank": rank, "port": port + rank}
            stack.enter_context(serving(held[rank], transfers=transfers[rank], **ranks))
        yield Address("127.0.0.1", port), held, transfers


@pytest.mark.parametrize("waits_too", [True, False])
def test_all_ranks_pin_chunks_from_the_first_question_on(
    watch: TransferWatch, waits_too: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the transfer is incomplete at the first rank: for a reader that comes back, and for one
    that waits while another goes."""
    monkeypatch.setattr(watch_module, "_MAX_WAIT_MS", 10_000)
    with three_ranks() as (source, held, transfers), contextlib.ExitStack() as stack:
        for each in transfers:
            each.store_begins(7)
            each.apply([TransferUpdate("t"), TransferUpdate("t", KEYS[:4])])
        other = watch
        if waits_too:
            other = stack.enter_context(closing(TransferWatch(PATIENT, "other")))
            back = other.ask(source, "t", 60.0)
            transfers[0].await_reader("t", b"other")
        gone = watch.ask(source, "t", 60.0)
        for each in transfers:
            each.await_reader("t")
        watch.done(gone)
        for each in transfers:
            each.await_done("t")
        if not waits_too:
            assert not any(chunks.num_leased for chunks in held)
            back = watch.ask(source, "t", 60.0)
        assert all(chunks.await_leased(lambda count: count == 4, 5.0) for chunks in held)
        for each in transfers:
            each.apply([TransferUpdate("t", (), frozenset((7,)), "request")])
            each.store_ended(7, ())
        assert all(map(answer_of(back).holds, KEYS[:4]))
        other.done(back)
        assert all(chunks.await_leased(lambda count: count == 0) for chunks in held)


def test_a_complete_transfer_does_not_wait_for_one_that_comes(
    watch: TransferWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is incomplete at the first rank, the other at one rank after the other. What every rank
    has is offered."""
    monkeypatch.setattr(watch_module, "_MAX_WAIT_MS", 10_000)
    with three_ranks() as (source, held, transfers):
        del held[1].data[KEYS[0]]
        for each in transfers:
            each.apply([TransferUpdate("never"), TransferUpdate("t", (KEYS[0], KEYS[2]))])
        coming = watch.ask(source, "never", 60.0)
        transfers[0].await_reader("never")
        awaited = watch.ask(source, "t", 60.0)
        transfers[0].await_reader("t")
        started = time.monotonic()
        for rank in (0, 1):
            send_transfer(transfers[rank], "t", ())
            transfers[rank + 1].await_reader("t", times=2)
        assert not awaited.wait(0.1)
        assert transfers[2].times_asked("t") < 5, "no long poll"
        send_transfer(transfers[2], "t", ())
        answer = answer_of(awaited)
        assert [answer.holds(key) for key in KEYS[:3]] == [False, False, True]
        assert time.monotonic() - started < 5.0
        assert coming.value is None


def test_later_ranks_are_asked_until_they_know_a_transfer(
    watch: TransferWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may learn of it one after the other, and the first one says that it is unknown."""
    monkeypatch.setattr(watch_module, "_MAX_WAIT_MS", 1)
    monkeypatch.setattr(watch_module, "_UNKNOWN_SECONDS", 0.0)
    with three_ranks() as (source, _, transfers):
        for each in transfers[:2]:
            each.apply([TransferUpdate("t")])
        awaited = watch.ask(source, "t", 60.0)
        transfers[2].await_reader("t", times=2)
        transfers[2].apply([TransferUpdate("t")])
        transfers[0].await_reader("t", times=transfers[0].times_asked("t") + 3)
        times = transfers[2].times_asked("t")
        transfers[0].await_reader("t", times=transfers[0].times_asked("t") + 20)
        assert (transfers[1].times_asked("t"), transfers[2].times_asked("t")) == (1, times)
        assert awaited.value is None


def test_the_first_incomplete_rank_says_that_a_transfer_is_unknown(
    watch: TransferWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even beside another one that comes."""
    monkeypatch.setattr(watch_module, "_UNKNOWN_SECONDS", 0.0)
    with three_ranks() as (source, _, transfers):
        transfers[0].apply([TransferUpdate("t"), TransferUpdate("never")])
        awaited, coming = (watch.ask(source, name, 60.0) for name in ("t", "never"))
        transfers[1].await_reader("t")
        transfers[0].await_reader("t")
        assert awaited.value is None
        send_transfer(transfers[0], "t", ())
        assert answer_of(awaited).cause is Cause.UNKNOWN
        assert coming.value is None


def test_a_connection_that_is_lost_takes_no_answer_and_no_end_with_it(
    watch: TransferWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_module, "start_thread", lambda *_: None)
    source = Address("127.0.0.1", 9)
    given, lost, read = (watch.ask(source, name, 60.0) for name in ("given", "lost", "read"))
    watch.done(read)
    poller: Any = watch._pollers[source]
    gone, new = Mock(), Mock()
    gone.execute_command.side_effect = redis.ConnectionError

    def ask(rank: int, client: object, names: list[Awaited], wait_ms: int) -> None:
        given.settle(Offered())
        raise redis.ConnectionError

    poller._clients, poller._engine_id, poller._ask = [gone], "engine", ask
    poller._connect = lambda: poller._clients.append(new)
    poller._ask_again_if_lost()
    new.execute_command.assert_called_once_with("DONE", "reader", "read")
    assert answer_of(given).cause is None
    assert answer_of(lost).cause is Cause.LOST


def poll_once(
    watch: TransferWatch,
    num_complete: int,
    said: bytes | None,
    monkeypatch: pytest.MonkeyPatch,
    num_requests: int = 1,
) -> tuple[Awaited, Mock, Any]:
    """A round for transfers that the first ranks have; the next one answers ``said``. Returns the
    last request, the questions asked, and the poller."""
    monkeypatch.setattr(watch_module, "start_thread", lambda *_: None)
    pending = MagicMock()
    pending.__enter__.return_value.answer.return_value = [said] * min(64, num_requests)
    monkeypatch.setattr(watch_module, "PendingCommand", asked := Mock(return_value=pending))
    source = Address("127.0.0.1", 9)
    for i in range(num_requests):
        awaited = watch.ask(source, f"t{i}", 60.0)
        awaited.by_rank |= {rank: frozenset() for rank in range(num_complete)}
    poller: Any = watch._pollers[source]
    poller._clients = [Mock() for _ in range(num_complete + 1)]
    poller._work()
    return awaited, asked, poller


@pytest.mark.parametrize(
    ("num_requests", "read_seconds", "wait_ms"),
    [(64, 30.0, 250), (1, 0.2, 100), (1, 0.001, 1), (65, 30.0, 10), (65, 0.001, 1)],
)
def test_a_poll_ends_within_the_read_timeout(
    num_requests: int, read_seconds: float, wait_ms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And soon if others wait for their turn."""
    config = replace(PATIENT, read_timeout_seconds=read_seconds)
    with closing(TransferWatch(config, "reader")) as watch:
        _, asked, _ = poll_once(watch, 0, None, monkeypatch, num_requests)
    assert asked.call_args.args[1:3] == ("TRANSFER", wait_ms)


def test_a_transfer_is_unknown_once_its_source_has_said_so_for_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A source that was silent for that long may be about to learn of it."""
    times = iter([0.0, 10.0, 20.0, 20.1, 30.0, 30.1, 30.2])  # of the request; sent, and answered
    with closing(TransferWatch(PATIENT, "reader", lambda: next(times))) as watch:
        awaited, _, poller = poll_once(watch, 0, None, monkeypatch)
        poller._work()
        assert awaited.value is None
        poller._work()
        assert answer_of(awaited).cause is Cause.UNKNOWN


def test_a_request_whose_end_was_interrupted_is_not_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with closing(TransferWatch(PATIENT, "reader")) as watch:
        awaited, _, poller = poll_once(watch, 0, None, monkeypatch)
        awaited.cancel()
        poller._work()
        assert not poller._must_wake()


def test_a_question_that_is_settled_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A question without a wait may settle it; a long poll after it would delay others."""
    with closing(TransferWatch(PATIENT, "reader")) as watch:
        awaited, asked, _ = poll_once(watch, 1, b"", monkeypatch)
    assert answer_of(awaited).cause is None
    assert [each.args[2] for each in asked.call_args_list] == [0]


def test_a_transfer_is_ended_on_all_ranks_beside_one_that_comes(
    watch: TransferWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rank hears of the end behind another rank's long poll."""
    monkeypatch.setattr(watch_module, "_MAX_WAIT_MS", 10_000)
    with three_ranks() as (source, held, transfers):
        for each in transfers:
            each.apply([TransferUpdate("never")])
            send_transfer(each, "t", (0, 2))
        read = watch.ask(source, "t", 60.0)
        assert answer_of(read).cause is None
        coming = watch.ask(source, "never", 60.0)
        transfers[0].await_reader("never")
        started = time.monotonic()
        watch.done(read)
        assert all(chunks.await_leased(lambda count: count == 0) for chunks in held)
        assert time.monotonic() - started < 5.0
        assert coming.value is None


def test_unknown_ids(served: tuple[HeardTransfers, PeerServer], watch: TransferWatch) -> None:
    assert answer_of(watch.ask(at(served[1]), "t", 60.0)).cause is Cause.UNKNOWN


def test_chunks_of_a_peer(served: tuple[HeardTransfers, PeerServer], watch: TransferWatch) -> None:
    transfers, server = served
    transfers.apply([TransferUpdate("never")])
    coming = watch.ask(at(server), "never", 60.0)
    others = [bytes([i % 256, i // 256]) * 16 for i in range(1, 3000)]
    answer = answer_of(watch.ask(at(server), "", 60.0, [*others, *KEYS]))
    assert [answer.holds(key) for key in KEYS] == [i < NUM_HELD for i in range(len(KEYS))]
    assert not any(answer.holds(key) for key in others)
    assert coming.value is None


def test_an_unreachable_source_is_told_as_such(watch: TransferWatch) -> None:
    source = Address("127.0.0.1", free_ports(1))
    assert answer_of(watch.ask(source, "t", 60.0)).cause is Cause.UNREACHABLE


def test_the_log_has_one_short_line_of_a_source_that_makes_trouble(
    watch: TransferWatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever it says, and however often it is named; a line of the log cannot be forged."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        source = Address("127.0.0.1", listener.getsockname()[1])
        for number in range(3):
            awaited = watch.ask(source, f"t{number}", 60.0)
            with listener.accept()[0] as sock:
                assert sock.recv(100).endswith(b"PEER\r\n")
                sock.sendall(b"-ERR \x1b[2J\nWARNING forged" + b"A" * (1 << 17) + b"\r\n")
                assert answer_of(awaited).cause is Cause.UNREACHABLE
            watch.done(awaited)
        poller = watch._pollers[source]
        assert within(10.0, lambda: poller._is_idle)  # it has told of the last one
    messages = [record.getMessage() for record in caplog.records]
    (told,) = [each for each in messages if str(source) in each]  # not of an earlier test's thread
    assert told.startswith(f"1 requests cannot load KV from {source}: \\x1b[2J\\nWARNING forgedAA")
    assert len(told) < 512


def test_idle_pollers_make_room(watch: TransferWatch, chunks: HeldChunks) -> None:
    """The number of pollers is bounded; requests may name any number of instances."""
    for number in range(1, 150):
        source = Address(f"127.0.1.{number}", 9)
        assert answer_of(watch.ask(source, "t", 60.0)).cause is Cause.UNREACHABLE
    with serving(chunks) as server:
        assert answer_of(watch.ask(at(server), "", 60.0, KEYS)).holds(KEYS[0])
    assert len(watch._pollers) <= watch_module._MAX_POLLERS


def test_loads_in_progress_make_room_last(
    watch: TransferWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their ends could not be told."""
    monkeypatch.setattr(watch_module, "_MAX_POLLERS", 2)
    with ExitStack() as stack:
        held = [HeldChunks(range(NUM_HELD)) for _ in range(3)]
        sources = list[Address]()
        for chunks in held:
            transfers = HeardTransfers(chunks)
            send_transfer(transfers, "t", (0, 2))
            sources.append(at(stack.enter_context(serving(chunks, transfers=transfers))))
        loads, read = (watch.ask(source, "t", 60.0) for source in sources[:2])
        assert answer_of(loads).cause is answer_of(read).cause is None
        watch.done(read)
        pollers: Any = [watch._pollers[source] for source in sources[:2]]
        assert held[1].await_leased(lambda count: count == 0)
        assert within(20.0, lambda: all(poller._is_idle for poller in pollers))
        last = watch.ask(sources[2], "t", 60.0)
        assert answer_of(last).cause is None
        watch.done(loads)
        watch.done(last)
        assert all(chunks.await_leased(lambda count: count == 0) for chunks in held)


def test_who_asks_again_takes_the_end_back(
    watch: TransferWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told later, it would end what the second request needs."""
    monkeypatch.setattr(watch_module, "start_thread", lambda *_: None)
    source = Address("127.0.0.1", 9)
    watch.done(watch.ask(source, "t", 60.0))
    poller: Any = watch._pollers[source]
    assert poller._read == ["t"]
    watch.ask(source, "t", 60.0)
    assert poller._read == []


def test_no_open_question_is_passed_over(
    watch: TransferWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command has room for some of them; those that are answered leave the list."""
    monkeypatch.setattr(watch_module, "start_thread", lambda *_: None)
    monkeypatch.setattr(watch_module, "_MAX_ASKED", 4)
    source, asked = Address("127.0.0.1", 9), list[str]()
    for name in "abcdefgh":
        watch.ask(source, name, 60.0)
    poller: Any = watch._pollers[source]

    def ask(rank: int, client: object, names: list[Awaited], wait_ms: int) -> None:
        asked.append("".join(each.transfer_id for each in names))
        for each in names[1:]:
            each.settle(Offered())

    poller._clients, poller._ask = [None], ask
    poller._work()
    poller._work()
    assert asked == ["abcd", "efgh"]


def test_a_new_connection_asks_all_ranks_again(
    watch: TransferWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another engine may listen there by then."""
    monkeypatch.setattr(watch_module, "start_thread", lambda *_: None)
    awaited = watch.ask(source := Address("127.0.0.1", 9), "t", 60.0)
    asked = list[tuple[int, bool]]()
    poller: Any = watch._pollers[source]
    poller._connect = lambda: poller._clients.extend((redis.Redis(), redis.Redis()))
    poller._ask = lambda rank, client, names, wait_ms: asked.extend(
        [(rank, wait_ms > 0)] * len(names)
    )
    poller._work()
    assert asked == [(1, False), (0, True)]
    awaited.by_rank[0] = frozenset(KEYS)
    awaited.known_by |= {0, 1}
    poller._work()
    assert asked[2:] == [(1, True)]
    poller._disconnect()
    poller._work()
    assert asked[3:] == asked[:2]


def test_silent_sources_take_a_bounded_number_of_threads(
    watch: TransferWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although no request waits for their answers any more."""
    monkeypatch.setattr(watch_module, "_MAX_POLLERS", most := 3)
    with ExitStack() as stack:
        silent = stack.enter_context(socket.create_server(("", 0)))
        for number in range(1, most + 2):
            source = Address(f"127.0.1.{number}", silent.getsockname()[1])
            awaited = watch.ask(source, "", 60.0, KEYS)
            assert (awaited.value is None) == (number <= most)
            if awaited.value is None:
                stack.enter_context(silent.accept()[0])
                awaited.settle(Offered(cause=Cause.DEADLINE))
            watch.done(awaited)


def test_a_system_without_threads_and_descriptors_costs_hits_alone(
    watch: TransferWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a while, the log's codec cannot be read, and no thread starts."""
    source, why = Address("127.0.0.1", free_ports(1)), Mock(side_effect=OSError(errno.EMFILE))
    monkeypatch.setattr(RedisAddress, "redact", why)  # it loads a codec
    assert answer_of(watch.ask(source, "t", 60.0)).cause is Cause.UNREACHABLE
    assert within(10.0, lambda: watch._pollers[source].is_ended)
    monkeypatch.setattr(watch_module, "start_thread", Mock(side_effect=RuntimeError))
    assert answer_of(watch.ask(source, "t", 60.0)).cause is Cause.BUSY
    monkeypatch.undo()
    assert answer_of(watch.ask(source, "t", 60.0)).cause is Cause.UNREACHABLE


def test_a_silent_source_delays_one_request_at_a_time(impatient: TransferWatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        source = Address("127.0.0.1", silent.getsockname()[1])
        first = impatient.ask(source, "", 60.0, KEYS)
        with silent.accept()[0]:
            first.settle(Offered(cause=Cause.DEADLINE))
            impatient.done(first)
            assert answer_of(impatient.ask(source, "", 60.0, KEYS), 0.0).cause is Cause.DEADLINE
            assert impatient.ask(source, "t", 60.0).value is None
            assert within(20.0, lambda: impatient.ask(source, "", 60.0, KEYS).value is None)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_new_engine_at_a_port_is_noticed(
    watch: TransferWatch, chunks: HeldChunks, num_ranks: int
) -> None:
    """With another number of ranks, or the same."""
    first = free_ports(2)
    with serving(chunks, engine_id="old", port=first):
        answer = answer_of(watch.ask(Address("127.0.0.1", first), "", 60.0, KEYS))
        assert (answer.engine_id, answer.num_ranks) == ("old", 1)
    with ExitStack() as stack:
        for rank in range(num_ranks):
            held = HeldChunks(range(1 + rank, NUM_HELD))
            ranks: dict[str, Any] = {
                "ranks": [PARTS] * num_ranks,
                "rank": rank,
                "port": first + rank,
            }
            stack.enter_context(serving(held, engine_id="new", **ranks))
        answer = answer_of(watch.ask(Address("127.0.0.1", first), "", 60.0, KEYS))
        assert (answer.engine_id, answer.num_ranks) == ("new", num_ranks)
        assert [answer.holds(key) for key in KEYS[:3]] == [False, num_ranks == 1, True]


@pytest.mark.parametrize("engine_id", ["one", "two"])
def test_other_instances_learn_no_transfer_ids(
    watch: TransferWatch, chunks: HeldChunks, engine_id: str
) -> None:
    """No transfer ids. Another instance may listen at the port where a rank is expected."""
    transfers, first = HeardTransfers(chunks), free_ports(2)
    ranks: dict[str, Any] = {"ranks": [PARTS] * 2, "transfers": transfers}
    with (
        serving(chunks, engine_id="one", port=first, **ranks),
        serving(chunks, engine_id=engine_id, port=first + 1, **ranks),
    ):
        send_transfer(transfers, "t", (0, 2))
        answer = answer_of(watch.ask(Address("127.0.0.1", first), "t", 60.0))
    assert (answer.cause is None) == (engine_id == "one")
    assert bool(transfers._names) == (engine_id == "one")


def test_a_server_ends_during_a_poll(watch: TransferWatch, chunks: HeldChunks) -> None:
    transfers = HeardTransfers(chunks)
    with serving(chunks, transfers=transfers) as server:
        transfers.apply([TransferUpdate("t")])
        awaited = watch.ask(at(server), "t", 60.0)
        transfers.await_reader("t")
    assert answer_of(awaited).cause is Cause.LOST


def test_a_wait_ends_with_the_next_command(served: tuple[HeardTransfers, PeerServer]) -> None:
    transfers, server = served
    transfers.apply([TransferUpdate("t")])
    with redis.Redis(port=server.port, protocol=2) as client:
        connection = client.connection_pool.get_connection()
        connection.send_command("TRANSFER", 10_000, "reader", "t", "other")
        transfers.await_reader("other")
        connection.send_command("PING")
        started = time.monotonic()
        assert connection.read_response() == [0, None]
        assert connection.read_response() == b"PONG"
        assert time.monotonic() - started < 5.0
        assert client.execute_command("TRANSFER", 1, "reader", "t") == [0]


@pytest.mark.parametrize("words", [[], ["x"], ["1", "reader"], ["-1", "r", "t"], ["x" * 99, "r"]])
def test_bad_commands_are_answered(
    served: tuple[HeardTransfers, PeerServer], words: list[str]
) -> None:
    with redis.Redis(port=served[1].port, protocol=2) as client:
        for verb in ("TRANSFER", "DONE"):
            with contextlib.suppress(redis.ResponseError):
                client.execute_command(verb, *words)
        assert client.ping()
