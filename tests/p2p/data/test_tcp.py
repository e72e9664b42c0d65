"""What only plain sockets can do to each other: half a frame, garbage, silence."""

from __future__ import annotations

import os
import socket
import time

import pytest

from lmcache_connector.p2p.control.handshake import answer
from lmcache_connector.p2p.data.tcp import _GREETING, TcpTransport
from tests.p2p.data.conftest import SESSION, Collector, frame_of, key_of


def let_in(sink: Collector) -> tuple[TcpTransport, socket.socket]:
    """A connection that has been let in."""
    transport = TcpTransport(stall_seconds=0.3)
    port = transport.listen("127.0.0.1", 0, sink, key_of)
    raw = socket.create_connection(("127.0.0.1", port))
    challenge = raw.recv(32, socket.MSG_WAITALL)
    raw.sendall(_GREETING.pack(b"LMPD", 1, SESSION.name, answer(SESSION.key, challenge)))
    assert raw.recv(1) == b"\x06"
    return transport, raw


def test_half_a_frame_and_silence_is_a_stall() -> None:
    sink = Collector()
    transport, raw = let_in(sink)
    frame = frame_of([bytes(1000)])
    raw.sendall(frame.pack() + bytes(500))
    sink.wait(lambda: bool(sink.losses))
    assert sink.incomplete == 1
    assert "no byte" in sink.losses[0]
    raw.close()
    transport.close(5)


def test_half_a_frame_and_an_end() -> None:
    sink = Collector()
    transport, raw = let_in(sink)
    raw.sendall(frame_of([bytes(1000)]).pack() + bytes(500))
    raw.close()
    sink.wait(lambda: bool(sink.losses))
    assert (sink.incomplete, sink.frames) == (1, [])
    transport.close(5)


@pytest.mark.parametrize("garbage", [b"\0" * 100, os.urandom(500), b"LMPF" + b"\xff" * 96])
def test_garbage_ends_the_connection(garbage: bytes) -> None:
    sink = Collector()
    transport, raw = let_in(sink)
    raw.sendall(garbage)
    sink.wait(lambda: bool(sink.losses))
    assert sink.frames == []
    raw.close()
    transport.close(5)


def test_silence_between_frames_is_no_stall() -> None:
    sink = Collector()
    transport, raw = let_in(sink)
    time.sleep(0.5)
    raw.sendall(frame_of([b"late"]).pack() + b"late")
    sink.wait(lambda: len(sink.frames) == 1)
    raw.close()
    transport.close(5)
