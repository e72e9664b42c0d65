"""Bytes over a socket pair: scattered, bounded in time, and with a name for each fault."""

from __future__ import annotations

import itertools
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from lmcache_connector.net.deadline import Deadline
from lmcache_connector.net.wire import Wire, WireError, WireFault
from tests.support.clock import Clock
from tests.support.redis.server_groups import Certificates, certificates

IDLE_SECONDS = 0.05


@pytest.fixture
def wire() -> Iterator[tuple[Wire, socket.socket]]:
    """A wire, and the socket of its peer."""
    mine, theirs = socket.socketpair()
    wire = Wire(mine, time.monotonic, IDLE_SECONDS)
    with theirs:
        yield wire, theirs
        wire.close()


def soon(seconds: float = 5.0) -> Deadline:
    return Deadline(time.monotonic() + seconds, time.monotonic)


def fault_of(work: Callable[[], object]) -> WireError:
    with pytest.raises(WireError) as error:
        work()
    return error.value


def test_bytes_are_scattered_over_any_buffers(wire: tuple[Wire, socket.socket]) -> None:
    near, far = wire[0], Wire(wire[1].dup(), time.monotonic, IDLE_SECONDS)
    rng = random.Random(0)
    data = rng.randbytes(3_000_000)
    cuts = sorted(rng.choices(range(len(data)), k=2000))  # more than one system call takes
    pieces = [data[a:b] for a, b in itertools.pairwise([0, *cuts, len(data)])]
    target = bytearray(len(data))
    views = [memoryview(target)[a:b] for a, b in itertools.pairwise([0, *cuts[::3], len(data)])]
    sender = threading.Thread(target=near.send, args=(pieces, soon()))
    sender.start()
    far.receive(views, soon())
    sender.join()
    assert target == data
    far.close()


def test_lines_are_split_at_any_packets(wire: tuple[Wire, socket.socket]) -> None:
    near, peer = wire
    peer.sendall(b"+OK\r\n:12\r\n-half")
    assert near.receive_line(soon()) == b"+OK"
    assert not near.is_fresh(), "a line is left to read"
    assert near.receive_line(soon()) == b":12"
    peer.sendall(b" a line\r\n")
    assert near.receive_line(soon()) == b"-half a line"
    assert near.is_fresh()


def test_surplus_bytes_end_the_connection(wire: tuple[Wire, socket.socket]) -> None:
    near, peer = wire
    peer.sendall(b"+OK\r\nsurplus")
    near.receive_line(soon())
    error = fault_of(lambda: near.receive([memoryview(bytearray(7))], soon()))
    assert error.fault is WireFault.OUT_OF_STEP


def test_unread_bytes_are_read_again(wire: tuple[Wire, socket.socket]) -> None:
    near, peer = wire
    peer.sendall(b"5\r\nabcde4\r\n")
    taken = bytearray(11)
    near.receive([memoryview(taken)], soon())
    near.unread(bytes(taken[6:]))
    near.unread(bytes(taken[3:6]))
    target = bytearray(7)
    peer.sendall(b"wxyz" * 2)
    near.receive_behind([memoryview(target)[:2], memoryview(target)[2:5]], soon())
    assert near.receive_line(soon(), 3) == b"4"
    near.receive_behind([memoryview(target)[5:]], soon())
    assert target == b"abcdewx"
    assert not near.is_fresh()
    rest = bytearray(6)
    near.receive_behind([memoryview(rest)], soon())
    assert rest == b"yzwxyz"


def test_an_endless_line_ends_the_connection(wire: tuple[Wire, socket.socket]) -> None:
    near, peer = wire
    sender = threading.Thread(target=peer.sendall, args=(bytes(200_000),), daemon=True)
    sender.start()
    assert fault_of(lambda: near.receive_line(soon())).fault is WireFault.OUT_OF_STEP


def test_a_pause_gets_the_bytes_received_and_may_raise(wire: tuple[Wire, socket.socket]) -> None:
    near, peer = wire
    peer.sendall(b"12345")

    def give_up(received: int) -> None:
        raise ZeroDivisionError(received)

    with pytest.raises(ZeroDivisionError, match="5"):
        near.receive([memoryview(bytearray(9))], soon(), give_up)


def test_a_silent_peer_has_stalled(wire: tuple[Wire, socket.socket]) -> None:
    error = fault_of(lambda: wire[0].receive([memoryview(bytearray(1))], soon()))
    assert (error.fault, error.is_peers_fault) == (WireFault.STALLED, True)


def test_a_deadline_too_tight_is_not_the_peers_fault(wire: tuple[Wire, socket.socket]) -> None:
    with closing(Wire(wire[1].dup(), time.monotonic, 60.0)) as near:
        error = fault_of(lambda: near.receive([memoryview(bytearray(1))], soon(0.01)))
    assert (error.fault, error.is_peers_fault) == (WireFault.DEADLINE, False)


def test_a_cancellation_is_not_the_peers_fault(wire: tuple[Wire, socket.socket]) -> None:
    cancelled = Deadline(float("inf"), time.monotonic, lambda: True)
    error = fault_of(lambda: wire[0].receive_line(cancelled))
    assert (error.fault, error.is_peers_fault) == (WireFault.CANCELLED, False)
    assert str(error) == "cancelled"


# -- a slow peer is waited for while its bytes move; one that hardly moves has stalled -----------


SLOW_SECONDS = 0.4
IDLE_BYTES = 64 << 10
SMALL_BUFFER = 32 << 10
FAR = Deadline(float("inf"), time.monotonic)


@pytest.fixture(scope="module")
def pem() -> Iterator[Certificates]:
    with certificates() as pem:
        yield pem


class SlowPeer:
    """Reads ``num_bytes`` in pieces, then replies. Only its pauses pass on its ``clock``."""

    def __init__(self, num_bytes: int, piece: int, pem: Certificates | None = None) -> None:
        self._num_bytes, self._piece, self._pem = num_bytes, piece, pem
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen()
        self._stopped = threading.Event()
        self.clock = Clock(0.0)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def connect(self, send_buffer: int | None = None) -> Wire:
        sock = socket.socket()
        if send_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        sock.connect(self._listener.getsockname())
        if self._pem is not None:
            context = ssl.create_default_context(cafile=str(self._pem.ca))
            sock = context.wrap_socket(sock, server_hostname="127.0.0.1")
        return Wire(sock, self.clock, SLOW_SECONDS, IDLE_BYTES)

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        sock, _ = self._listener.accept()
        if self._pem is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self._pem.certificate, self._pem.key)
            sock = context.wrap_socket(sock, server_side=True)
        with sock:
            left = self._num_bytes
            while left > 0 and not self._stopped.is_set():
                for _ in range(max(1, self._piece >> 14)):
                    left -= len(sock.recv(min(left, self._piece, 1 << 14)))
                self._stopped.wait(0.01)
                self.clock.now += 0.03
            if left == 0:
                sock.sendall(b"+OK\r\n")
                self._stopped.wait(10.0)


@pytest.mark.parametrize("tls", [False, True])
def test_progress_within_one_large_value_counts(tls: bool, pem: Certificates) -> None:
    """4 MiB at 64 KiB a turn take several times the idle time-out."""
    data = bytes(4 << 20)
    peer = SlowPeer(len(data), 1 << 16, pem if tls else None)
    with closing(peer), closing(peer.connect(SMALL_BUFFER)) as wire:
        wire.send([data], FAR)
        assert peer.clock.now > 2 * SLOW_SECONDS
        assert wire.receive_line(FAR) == b"+OK"


def test_a_reply_is_waited_for_until_its_command_has_arrived() -> None:
    """The system buffers megabytes at once, and sends them slowly."""
    data = bytes(3 << 20)
    with closing(SlowPeer(len(data), 1 << 16)) as peer, closing(peer.connect()) as wire:
        wire.send([data], FAR)
        sent = peer.clock.now
        assert wire.receive_line(FAR) == b"+OK"
        assert peer.clock.now - sent > SLOW_SECONDS


@pytest.mark.parametrize("tls", [False, True])
def test_a_peer_that_reads_a_few_bytes_at_a_time_has_stalled(tls: bool, pem: Certificates) -> None:
    peer = SlowPeer(4 << 20, 100, pem if tls else None)
    with closing(peer), closing(peer.connect(SMALL_BUFFER)) as wire:
        assert fault_of(lambda: wire.send([bytes(4 << 20)], FAR)).fault is WireFault.STALLED


def test_a_line_that_trickles_has_stalled() -> None:
    here, there = socket.socketpair()
    stop = threading.Event()

    def trickle() -> None:
        while not stop.wait(0.02):
            there.send(b"x")

    thread = threading.Thread(target=trickle)
    thread.start()
    with there, closing(Wire(here, time.monotonic, SLOW_SECONDS, IDLE_BYTES)) as wire:
        try:
            assert fault_of(lambda: wire.receive_line(FAR)).fault is WireFault.STALLED
        finally:
            stop.set()
            thread.join()


# -- deadlines -------------------------------------------------------------------------------------


def test_remaining_time_stops_at_zero() -> None:
    now = 100.0
    deadline = Deadline(101.5, lambda: now)
    assert deadline.remaining() == 1.5
    now = 103.0
    assert deadline.remaining() == 0.0


def test_a_cancelled_deadline_has_nothing_left() -> None:
    assert Deadline(float("inf"), lambda: 0.0, lambda: True).remaining() == 0.0
