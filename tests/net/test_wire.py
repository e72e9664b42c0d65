"""Bytes over a socket pair: scattered, bounded in time, and with a name for each fault."""

from __future__ import annotations

import itertools
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from lmcache_connector.net.deadline import Deadline
from lmcache_connector.net.wire import Wire, WireError, WireFault

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
    error = fault_of(lambda: wire[0].receive([memoryview(bytearray(1))], soon(0.01)))
    assert (error.fault, error.is_peers_fault) == (WireFault.DEADLINE, False)


def test_a_cancellation_is_not_the_peers_fault(wire: tuple[Wire, socket.socket]) -> None:
    cancelled = Deadline(float("inf"), time.monotonic, lambda: True)
    error = fault_of(lambda: wire[0].receive_line(cancelled))
    assert (error.fault, error.is_peers_fault) == (WireFault.CANCELLED, False)
    assert str(error) == "cancelled"
