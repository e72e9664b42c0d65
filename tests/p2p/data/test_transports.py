"""One contract, passed by every transport: frames arrive as they left, or the connection is cut."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from lmcache_connector.p2p.data.base import Outlet, Session, Transport
from lmcache_connector.p2p.data.process_group import ProcessGroupTransport
from lmcache_connector.p2p.data.tcp import TcpTransport
from lmcache_connector.p2p.errors import PeerError
from tests.p2p.data.conftest import SESSION, Collector, frame_of, key_of


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
            frame = frame_of(
                payload, ticket=index + 1, digests=tuple(bytes([i]) * 8 for i in range(heads))
            )
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

    def test_a_sink_that_objects_ends_the_connection(self, make: Make) -> None:
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
