"""Many connections at once: half-open ones of strangers, and too many of one session."""

from __future__ import annotations

import socket
import threading
import tracemalloc
from contextlib import ExitStack

import pytest

from lmcache_connector.p2p.control.handshake import answer, frame_key
from lmcache_connector.p2p.data import tcp
from lmcache_connector.p2p.data.frame import FrameKey
from lmcache_connector.p2p.data.tcp import _GREETING, TcpTransport
from tests.p2p.data.conftest import SESSION, Collector, frame_of, key_of
from tests.support.redis.server_groups import wait_until


def test_strangers_who_say_nothing_keep_nobody_out() -> None:
    sink, transport = Collector(), TcpTransport(stall_seconds=2.0)
    port = transport.listen("127.0.0.1", 0, sink, key_of)
    before = threading.active_count()
    with ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), 5.0))
        outlet = TcpTransport(stall_seconds=2.0).connect("127.0.0.1", port, SESSION, 5.0)
        outlet.send(frame_of([b"x"]), [memoryview(b"x")])
        sink.wait(lambda: len(sink.frames) == 1)
        assert threading.active_count() <= before + 64 + 1
        outlet.close()
    transport.close(5.0)


def test_a_session_has_one_data_connection() -> None:
    sink, transport = Collector(), TcpTransport(stall_seconds=2.0)
    port = transport.listen("127.0.0.1", 0, sink, key_of)
    with ExitStack() as stack:
        answers = [greet(stack.enter_context(dial(port)))[0] for _ in range(20)]
    assert [bool(said) for said in answers] == [True] + [False] * 19
    transport.close(5.0)


def test_there_are_only_so_many_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tcp._MAX_CONNECTIONS == 1024
    monkeypatch.setattr(tcp, "_MAX_CONNECTIONS", 3)
    transport = TcpTransport(stall_seconds=2.0)
    port = transport.listen("127.0.0.1", 0, Collector(), key_of)
    with ExitStack() as stack:
        inside = [stack.enter_context(dial(port)) for _ in range(3)]
        assert all(sock.recv(32, socket.MSG_WAITALL) for sock in inside)
        with dial(port) as one_more:
            assert one_more.recv(32) == b""
        inside[0].close()
        wait_until(lambda: _is_let_in(port), "there is no room again")
    transport.close(5.0)


def _is_let_in(port: int) -> bool:
    with dial(port) as sock:
        return sock.recv(32) != b""


def test_what_nobody_wants_costs_little_memory() -> None:
    sink, transport = Collector(refuses=frozenset({1})), TcpTransport(stall_seconds=2.0)
    port = transport.listen("127.0.0.1", 0, sink, key_of)
    payload = bytes(17 << 20)
    with dial(port) as sock:
        _, key = greet(sock)
        tracemalloc.start()
        sock.sendall(key.seal(frame_of([payload])) + payload)
        held = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        sock.sendall(key.seal(frame_of([payload])))
        sock.sendall(payload)
        sock.sendall(key.seal(frame_of([b"x"], ticket=2)) + b"x")
        sink.wait(lambda: len(sink.frames) == 1)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak - held < 2 * tcp._SCRATCH_BYTES
    assert tcp._SCRATCH_BYTES == 256 << 10
    transport.close(5.0)


def dial(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), 5.0)


def greet(sock: socket.socket) -> tuple[bytes, FrameKey]:
    """What the server says to a genuine greeting, and the key of the connection's frames."""
    challenge = sock.recv(32, socket.MSG_WAITALL)
    sock.sendall(_GREETING.pack(b"LMPD", 2, SESSION.name, answer(SESSION.key, challenge)))
    return sock.recv(32, socket.MSG_WAITALL), FrameKey(frame_key(SESSION.key, challenge))
