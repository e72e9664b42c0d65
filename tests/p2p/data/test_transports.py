"""One contract, passed by every transport: frames arrive as they left, or the connection is cut."""

from __future__ import annotations

import os
import socket
import struct
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest

from lmcache_connector.p2p.control.address import PeerAddress
from lmcache_connector.p2p.data.base import Outlet, Session, Transport
from lmcache_connector.p2p.data.nixl import NixlTransport
from lmcache_connector.p2p.data.nixl_agent import Nixl
from lmcache_connector.p2p.data.tcp import _GREETING, TcpTransport
from lmcache_connector.p2p.errors import PeerError
from tests.p2p.data.conftest import SESSION, Collector, frame_of, key_of
from tests.support.engines.p2p_relay import Relay
from tests.support.nixl import needs_nixl


@dataclass
class Pair:
    """Transports of one kind, with memory of theirs for payloads."""

    transport: Callable[[], Transport]
    room: Callable[[int], memoryview]

    def sink(self, refuses: frozenset[int] = frozenset()) -> Collector:
        return Collector(self.room, refuses)

    def memory(self, payload: bytes) -> memoryview:
        view = self.room(len(payload))
        view[:] = payload
        return view


class Arena:
    """Memory that NIXL knows, handed out once."""

    def __init__(self, num_bytes: int) -> None:
        self._memory = np.zeros(num_bytes, np.uint8)
        self._used = 0

    def register(self, nixl: Nixl) -> None:
        nixl.register(self._memory.ctypes.data, len(self._memory))

    def room(self, num_bytes: int) -> memoryview:
        first, self._used = self._used, self._used + num_bytes
        return self._memory.data[first : self._used]


def plain_room(num_bytes: int) -> memoryview:
    return memoryview(bytearray(num_bytes))


@pytest.fixture(
    params=["tcp", *(pytest.param(name, marks=needs_nixl) for name in ("nixl", "nixl unknown"))]
)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """``nixl unknown``: memory that is not registered."""
    made: list[Transport] = []
    arena = Arena(64 << 20) if request.param == "nixl" else None

    def make() -> Transport:
        if request.param == "tcp":
            made.append(TcpTransport(stall_seconds=0.5))
        else:
            nixl = Nixl("test")
            if arena is not None:
                arena.register(nixl)
            made.append(NixlTransport(nixl, 2.0, time.monotonic))
        return made[-1]

    yield Pair(make, arena.room if arena is not None else plain_room)
    for transport in made:
        transport.close(5)


class TestContract:
    def test_frames_arrive_in_order(self, pair: Pair) -> None:
        sink = pair.sink()
        port = pair.transport().listen("127.0.0.1", 0, sink, key_of)
        outlet = pair.transport().connect("127.0.0.1", port, SESSION, 5.0)
        sent = []
        for index, (heads, size) in enumerate([(1, 1), (4, 3000), (2, 3 << 20), (3, 64)]):
            payload = [os.urandom(size) for _ in range(heads)]
            frame = frame_of(
                payload, ticket=index + 1, digests=tuple(bytes([i]) * 8 for i in range(heads))
            )
            outlet.send(frame, [pair.memory(p) for p in payload])
            sent.append((frame, payload))
        sink.wait(lambda: len(sink.frames) == 4)
        assert sink.frames == sent
        outlet.close()
        sink.wait(lambda: bool(sink.losses))
        assert sink.incomplete == 0

    def test_what_nobody_wants_passes_by(self, pair: Pair) -> None:
        sink = pair.sink(refuses=frozenset({2}))
        port = pair.transport().listen("127.0.0.1", 0, sink, key_of)
        outlet = pair.transport().connect("127.0.0.1", port, SESSION, 5.0)
        for ticket, size in ((1, 100), (2, 5 << 20), (3, 100)):
            payload = bytes([ticket]) * size
            outlet.send(frame_of([payload], ticket), [pair.memory(payload)])
        sink.wait(lambda: len(sink.frames) == 2)
        assert [frame.ticket for frame, _ in sink.frames] == [1, 3]
        outlet.close()

    def test_a_sink_that_objects_ends_the_connection(self, pair: Pair) -> None:
        sink = pair.sink()
        port = pair.transport().listen("127.0.0.1", 0, sink, key_of)
        outlet = pair.transport().connect("127.0.0.1", port, SESSION, 5.0)
        with pytest.raises(PeerError):
            self._send_for_ever(outlet, pair)
        sink.wait(lambda: bool(sink.losses))
        outlet.close()

    def _send_for_ever(self, outlet: Outlet, pair: Pair) -> None:
        payload = pair.memory(bytes(1 << 20))
        outlet.send(frame_of([b"x"], 666), [payload[:1]])
        for _ in range(1000):
            outlet.send(frame_of([bytes(1 << 20)]), [payload])

    def test_a_stranger_is_not_let_in(self, pair: Pair) -> None:
        sink = pair.sink()
        port = pair.transport().listen("127.0.0.1", 0, sink, key_of)
        for session in (Session(b"s" * 16, b"?" * 32), Session(b"?" * 16, b"k" * 32)):
            with pytest.raises(PeerError):
                pair.transport().connect("127.0.0.1", port, session, 2.0)
        assert sink.losses == []

    def test_who_listens_without_the_session_gets_nothing(self, pair: Pair) -> None:
        """In the peer's place, at its address: lets everybody in."""
        with socket.create_server(("127.0.0.1", 0)) as impostor, ThreadPoolExecutor(1) as pool:

            def listen() -> bytes:
                sock, _ = impostor.accept()
                with sock:
                    sock.sendall(bytes(32))
                    sock.recv(_GREETING.size, socket.MSG_WAITALL)
                    sock.sendall(b"\x06" * 32)
                    return sock.recv(1)

            said = pool.submit(listen)
            with pytest.raises(PeerError, match="not the peer of this session"):
                pair.transport().connect("127.0.0.1", impostor.getsockname()[1], SESSION, 5.0)
            assert said.result(5) == b""

    def test_nobody_there_is_bounded(self, pair: Pair) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            started = time.monotonic()
            with pytest.raises(PeerError):
                pair.transport().connect("127.0.0.1", silent.getsockname()[1], SESSION, 0.3)
            assert time.monotonic() - started < 2.0

    def test_a_closed_transport_lets_go(self, pair: Pair) -> None:
        sink = pair.sink()
        receiving = pair.transport()
        port = receiving.listen("127.0.0.1", 0, sink, key_of)
        outlet = pair.transport().connect("127.0.0.1", port, SESSION, 5.0)
        receiving.close(5)
        sink.wait(lambda: bool(sink.losses))
        outlet.close()


@needs_nixl
@pytest.mark.parametrize("field", ["count", "address", "length"])
def test_places_that_were_altered_end_the_connection(field: str) -> None:
    """By somebody on the path. Nothing is allocated, cut or read by what he says."""
    arena, kinds = Arena(1 << 20), ("receiver", "sender")
    nixls = [Nixl(kind) for kind in kinds]
    for nixl in nixls:
        arena.register(nixl)
    receiving, sending = (NixlTransport(nixl, 2.0, time.monotonic) for nixl in nixls)
    sink, payload = Collector(arena.room), arena.room(4096)
    frame = frame_of([bytes(payload)])
    head_bytes = len(frame.pack(1)) + 32

    def alter(data: bytes) -> bytes:
        altered = bytearray(data)
        if b"LMPF" in data:
            at = data.index(b"LMPF") + head_bytes
            count, address, length = struct.unpack_from("<IQQ", data, at)
            said = {"count": count, "address": address, "length": length}
            said |= {field: {"count": 60000, "address": address + 1, "length": 1 << 44}[field]}
            struct.pack_into("<IQQ", altered, at, *said.values())
        return bytes(altered)

    port = receiving.listen("127.0.0.1", 0, sink, key_of)
    with Relay(PeerAddress("127.0.0.1", port), alter) as relay:
        outlet = sending.connect("127.0.0.1", relay.address.port, SESSION, 5.0)
        with pytest.raises(PeerError):
            outlet.send(frame, [payload])
        sink.wait(lambda: bool(sink.losses))
        outlet.close()
    words = "60000 places" if field == "count" else "did not send so"
    assert [words in text for text in sink.losses] == [True]
    for transport in (sending, receiving):
        transport.close(5)


@needs_nixl
@pytest.mark.parametrize("size", [1, 1 << 44])
def test_another_size_there_than_here_is_not_read(size: int) -> None:
    """Also of a peer that knows the secret."""
    memory = np.zeros(4096, np.uint8)
    here = np.array([(memory.ctypes.data, 4096)], np.uint64)
    there = np.array([(memory.ctypes.data, size)], np.uint64)
    nixl = Nixl("test")
    nixl.register(memory.ctypes.data, len(memory))
    tracemalloc.start()
    with pytest.raises(PeerError, match="another size here than there"):
        nixl.read(nixl.metadata(), here, there, lambda: None)
    assert tracemalloc.get_traced_memory()[1] < 10 << 20
    tracemalloc.stop()
    nixl.close(5)
