"""One contract, passed by every transport: frames arrive as they left, or the link is cut."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmcache_connector.p2p.data.base import Landing, Outlet, Session, Transport
from lmcache_connector.p2p.data.frame import HEAD_BYTES, Frame, FrameError, unpack_head
from lmcache_connector.p2p.data.process_group import ProcessGroupTransport
from lmcache_connector.p2p.data.tcp import TcpTransport
from lmcache_connector.p2p.errors import PeerError

SESSION = Session(b"s" * 16, b"k" * 32)


@dataclass
class Collector:
    """A sink that keeps what lands. ``refuses``: tickets nobody wants."""

    refuses: frozenset[int] = frozenset()
    frames: list[tuple[Frame, list[bytes]]] = field(default_factory=list)
    incomplete: int = 0
    losses: list[str] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def land(self, session: bytes, frame: Frame) -> Landing | None:
        assert session == SESSION.name
        if frame.ticket == 666:
            raise PeerError("a frame of something else")
        if frame.ticket in self.refuses:
            return None
        buffers = [bytearray(frame.head_bytes) for _ in range(frame.num_heads)]
        return Landing([memoryview(b) for b in buffers], (frame, buffers))

    def landed(self, landing: Landing, *, complete: bool) -> None:
        frame, buffers = cast(tuple[Frame, list[bytearray]], landing.token)
        with self.changed:
            if complete:
                self.frames.append((frame, [bytes(b) for b in buffers]))
            else:
                self.incomplete += 1
            self.changed.notify_all()

    def lost(self, session: bytes, reason: str) -> None:
        with self.changed:
            self.losses.append(reason)
            self.changed.notify_all()

    def wait(self, done: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(done, 10)


def frame_of(payload: list[bytes], ticket: int = 1, checksums: tuple[int, ...] = ()) -> Frame:
    return Frame(ticket, 3, 2, len(payload), 5, 4, len(payload[0]), checksums)


def key_of(session: bytes) -> bytes | None:
    return SESSION.key if session == SESSION.name else None


@pytest.fixture(params=["tcp", "gloo", pytest.param("nccl", marks=pytest.mark.cuda)])
def make(request: pytest.FixtureRequest) -> Iterator[Callable[[], Transport]]:
    """Gloo runs the code that NCCL runs, without a GPU."""
    if request.param == "nccl" and not torch.cuda.is_available():
        pytest.skip("runs on a machine with a CUDA GPU")
    made: list[Transport] = []

    def make() -> Transport:
        if request.param == "tcp":
            made.append(TcpTransport(stall_seconds=0.5))
        else:
            device = torch.device("cuda" if request.param == "nccl" else "cpu")
            made.append(ProcessGroupTransport(request.param, device, 2.0, time.monotonic))
        return made[-1]

    yield make
    for transport in made:
        transport.close(5)


Make = Callable[[], Transport]


class TestContract:
    def test_frames_arrive_in_order(self, make: Make) -> None:
        sink = Collector()
        port = make().listen("127.0.0.1", 0, sink, key_of)
        outlet = make().connect("127.0.0.1", port, SESSION, 5.0)
        sent = []
        for index, (heads, size) in enumerate([(1, 1), (4, 3000), (2, 3 << 20), (3, 64)]):
            payload = [os.urandom(size) for _ in range(heads)]
            frame = frame_of(payload, ticket=index + 1, checksums=tuple(range(heads)))
            outlet.send(frame, [memoryview(p) for p in payload])
            sent.append((frame, payload))
        sink.wait(lambda: len(sink.frames) == 4)
        assert sink.frames == sent
        outlet.close()
        sink.wait(lambda: bool(sink.losses))
        assert sink.incomplete == 0

    def test_what_nobody_wants_passes_by(self, make: Make) -> None:
        sink = Collector(refuses=frozenset({2}))
        port = make().listen("127.0.0.1", 0, sink, key_of)
        outlet = make().connect("127.0.0.1", port, SESSION, 5.0)
        for ticket, size in ((1, 100), (2, 5 << 20), (3, 100)):
            payload = bytes([ticket]) * size
            outlet.send(frame_of([payload], ticket), [memoryview(payload)])
        sink.wait(lambda: len(sink.frames) == 2)
        assert [frame.ticket for frame, _ in sink.frames] == [1, 3]
        outlet.close()

    def test_a_sink_that_objects_ends_the_link(self, make: Make) -> None:
        sink = Collector()
        port = make().listen("127.0.0.1", 0, sink, key_of)
        outlet = make().connect("127.0.0.1", port, SESSION, 5.0)
        with pytest.raises(PeerError):
            self._send_for_ever(outlet)
        sink.wait(lambda: bool(sink.losses))
        outlet.close()

    def _send_for_ever(self, outlet: Outlet) -> None:
        outlet.send(frame_of([b"x"], 666), [memoryview(b"x")])
        for _ in range(1000):
            outlet.send(frame_of([bytes(1 << 20)]), [memoryview(bytes(1 << 20))])

    def test_a_stranger_is_not_let_in(self, make: Make) -> None:
        sink = Collector()
        port = make().listen("127.0.0.1", 0, sink, key_of)
        for session in (Session(b"s" * 16, b"?" * 32), Session(b"?" * 16, b"k" * 32)):
            with pytest.raises(PeerError):
                make().connect("127.0.0.1", port, session, 2.0)
        assert sink.losses == []

    def test_nobody_there_is_bounded(self, make: Make) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            started = time.monotonic()
            with pytest.raises(PeerError):
                make().connect("127.0.0.1", silent.getsockname()[1], SESSION, 0.3)
            assert time.monotonic() - started < 2.0

    def test_a_closed_transport_lets_go(self, make: Make) -> None:
        sink = Collector()
        receiving = make()
        port = receiving.listen("127.0.0.1", 0, sink, key_of)
        outlet = make().connect("127.0.0.1", port, SESSION, 5.0)
        receiving.close(5)
        sink.wait(lambda: bool(sink.losses))
        outlet.close()


class TestTcp:
    """What only plain sockets can do to each other."""

    def _raw(self, sink: Collector) -> tuple[TcpTransport, socket.socket]:
        """A connection that has been let in."""
        from lmcache_connector.p2p.control.handshake import answer
        from lmcache_connector.p2p.data.tcp import _GREETING

        transport = TcpTransport(stall_seconds=0.3)
        port = transport.listen("127.0.0.1", 0, sink, key_of)
        raw = socket.create_connection(("127.0.0.1", port))
        challenge = raw.recv(32, socket.MSG_WAITALL)
        raw.sendall(_GREETING.pack(b"LMPD", 1, SESSION.name, answer(SESSION.key, challenge)))
        assert raw.recv(1) == b"\x06"
        return transport, raw

    def test_half_a_frame_and_silence_is_a_stall(self) -> None:
        sink = Collector()
        transport, raw = self._raw(sink)
        frame = frame_of([bytes(1000)])
        raw.sendall(frame.pack() + bytes(500))
        sink.wait(lambda: bool(sink.losses))
        assert sink.incomplete == 1
        assert "no byte" in sink.losses[0]
        raw.close()
        transport.close(5)

    def test_half_a_frame_and_an_end(self) -> None:
        sink = Collector()
        transport, raw = self._raw(sink)
        raw.sendall(frame_of([bytes(1000)]).pack() + bytes(500))
        raw.close()
        sink.wait(lambda: bool(sink.losses))
        assert (sink.incomplete, sink.frames) == (1, [])
        transport.close(5)

    @pytest.mark.parametrize("garbage", [b"\0" * 100, os.urandom(500), b"LMPF" + b"\xff" * 96])
    def test_garbage_ends_the_link(self, garbage: bytes) -> None:
        sink = Collector()
        transport, raw = self._raw(sink)
        raw.sendall(garbage)
        sink.wait(lambda: bool(sink.losses))
        assert sink.frames == []
        raw.close()
        transport.close(5)

    def test_silence_between_frames_is_no_stall(self) -> None:
        sink = Collector()
        transport, raw = self._raw(sink)
        time.sleep(0.5)
        raw.sendall(frame_of([b"late"]).pack() + b"late")
        sink.wait(lambda: len(sink.frames) == 1)
        raw.close()
        transport.close(5)


@given(st.binary(min_size=HEAD_BYTES, max_size=HEAD_BYTES), st.booleans())
def test_no_head_breaks_the_parser(data: bytes, is_plausible: bool) -> None:
    if is_plausible:
        data = frame_of([b"x"]).pack()[:6] + data[6:]
    try:
        head = unpack_head(data)
    except FrameError:
        return
    assert 0 < head.frame.num_bytes <= 1 << 36
    assert head.tail_bytes <= 8 * 4096


@given(st.integers(1, 2**62), st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=9))
def test_frames_survive_packing(ticket: int, checksums: list[int]) -> None:
    frame = Frame(ticket, 1, 2, len(checksums), 3, 4, 5, tuple(checksums))
    packed = frame.pack()
    assert unpack_head(packed[:HEAD_BYTES]).with_tail(packed[HEAD_BYTES:]) == frame
