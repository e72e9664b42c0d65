"""What only plain sockets can do to each other: half a frame, garbage, silence."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time

import pytest

from lmcache_connector.p2p.control.handshake import answer, frame_key
from lmcache_connector.p2p.data.frame import FrameKey
from lmcache_connector.p2p.data.tcp import _GREETING, TcpTransport
from tests.p2p.data.conftest import SESSION, Collector, frame_of, key_of


def let_in(sink: Collector) -> tuple[TcpTransport, socket.socket, FrameKey]:
    """A connection that has been let in."""
    transport = TcpTransport(stall_seconds=0.3)
    port = transport.listen("127.0.0.1", 0, sink, key_of)
    raw = socket.create_connection(("127.0.0.1", port))
    challenge = raw.recv(32, socket.MSG_WAITALL)
    raw.sendall(_GREETING.pack(b"LMPD", 2, SESSION.name, answer(SESSION.key, challenge)))
    assert len(raw.recv(32, socket.MSG_WAITALL)) == 32
    return transport, raw, FrameKey(frame_key(SESSION.key, challenge))


def test_half_a_frame_and_silence_is_a_stall() -> None:
    sink = Collector()
    transport, raw, key = let_in(sink)
    frame = frame_of([bytes(1000)])
    raw.sendall(key.seal(frame) + bytes(500))
    sink.wait(lambda: bool(sink.losses))
    assert sink.incomplete == 1
    assert "no byte" in sink.losses[0]
    raw.close()
    transport.close(5)


def test_half_a_frame_and_an_end() -> None:
    sink = Collector()
    transport, raw, key = let_in(sink)
    raw.sendall(key.seal(frame_of([bytes(1000)])) + bytes(500))
    raw.close()
    sink.wait(lambda: bool(sink.losses))
    assert (sink.incomplete, sink.frames) == (1, [])
    transport.close(5)


@pytest.mark.parametrize("garbage", [b"\0" * 100, os.urandom(500), b"LMPF" + b"\xff" * 96])
def test_garbage_ends_the_connection(garbage: bytes) -> None:
    sink = Collector()
    transport, raw, _ = let_in(sink)
    raw.sendall(garbage)
    sink.wait(lambda: bool(sink.losses))
    assert sink.frames == []
    raw.close()
    transport.close(5)


def test_silence_between_frames_is_no_stall() -> None:
    sink = Collector()
    transport, raw, key = let_in(sink)
    time.sleep(0.5)
    raw.sendall(key.seal(frame_of([b"late"])) + b"late")
    sink.wait(lambda: len(sink.frames) == 1)
    raw.close()
    transport.close(5)


def test_a_thread_that_does_not_start_ends_no_acceptor(monkeypatch: pytest.MonkeyPatch) -> None:
    sink, transport = Collector(), TcpTransport(stall_seconds=0.3)
    port = transport.listen("127.0.0.1", 0, sink, key_of)
    started = threading.Thread.start
    failures: list[BaseException] = [RuntimeError("can't start new thread"), MemoryError()]

    def start(thread: threading.Thread) -> None:
        if thread.name == "lmc-p2p-receive" and failures:
            raise failures.pop()
        started(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    for _ in range(2):
        with (
            socket.create_connection(("127.0.0.1", port), 5) as refused,
            contextlib.suppress(ConnectionResetError),
        ):
            assert refused.recv(1) == b""
    assert not failures
    assert transport._connections == {}
    outlet = TcpTransport(stall_seconds=0.3).connect("127.0.0.1", port, SESSION, 5.0)
    outlet.send(frame_of([b"x"]), [memoryview(b"x")])
    sink.wait(lambda: len(sink.frames) == 1)
    outlet.close()
    transport.close(5)
