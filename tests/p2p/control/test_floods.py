"""What strangers may ask of the control server's one thread, and answers that come late, or are
long."""

from __future__ import annotations

import os
import socket
import threading
import time

import msgspec
import pytest

from lmcache_connector.net.deadline import Deadline
from lmcache_connector.net.wire import WireError
from lmcache_connector.p2p.control import client as client_module
from lmcache_connector.p2p.control import messages
from lmcache_connector.p2p.control.address import PeerAddress
from lmcache_connector.p2p.control.client import ControlClient
from lmcache_connector.p2p.control.messages import Message
from lmcache_connector.p2p.control.peers import Peer
from lmcache_connector.p2p.control.server import ControlServer
from lmcache_connector.p2p.errors import PeerError
from tests.p2p.control.conftest import CARD, SECRET
from tests.support.redis.servers import free_port


def test_a_stranger_says_hello_once() -> None:
    port = free_port()
    card = msgspec.structs.replace(CARD, port=port)
    server = ControlServer("127.0.0.1", port, card, SECRET, lambda peer, message: messages.Done())
    hello = messages.pack(
        1, messages.encode(messages.Hello(os.urandom(32), card, "127.0.0.1", port))
    )
    with socket.create_connection(("127.0.0.1", port), 5.0) as sock:
        sock.sendall(hello * 100)
        said = b"".join(iter(lambda: _receive(sock), b""))
    assert said.count(b"Welcome") == 1
    server.close(5.0)


def _receive(sock: socket.socket) -> bytes:
    try:
        return sock.recv(1 << 16)
    except ConnectionResetError:
        return b""


def test_a_late_answer_is_none_to_the_next_question() -> None:
    port, late = free_port(), threading.Event()
    card = msgspec.structs.replace(CARD, port=port)

    def handle(peer: Peer, message: Message) -> Message:
        if isinstance(message, messages.Keep):
            late.wait(5.0)
            return messages.Room(7)
        return messages.Done()

    server = ControlServer("127.0.0.1", port, card, SECRET, handle)
    client = ControlClient(PeerAddress("127.0.0.1", port), CARD, SECRET, 0.3)
    with pytest.raises(PeerError):
        client.ask(messages.Keep(("a",)))
    late.set()
    with pytest.raises(PeerError):
        client.ask(messages.More(1))
    client.close()
    server.close(5.0)


_ALL_BLOCKS = messages.Held(tuple(range(1 << 20, (1 << 20) + messages.MAX_BLOCK_IDS)))


def _connected_as_over_a_network(host: str, port: int, seconds: float) -> socket.socket:
    """Loopback takes some MiB at a time, a network as little as 46 KiB of a new connection."""
    sock = socket.socket()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 1448)
    sock.settimeout(seconds)
    sock.connect((host, port))
    return sock


def test_a_long_answer_comes_whole_over_any_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the blocks of a long prompt lie."""
    monkeypatch.setattr(client_module, "connected_socket", _connected_as_over_a_network)
    port = free_port()
    card = msgspec.structs.replace(CARD, port=port)
    server = ControlServer("127.0.0.1", port, card, SECRET, lambda peer, message: _ALL_BLOCKS)
    client = ControlClient(PeerAddress("127.0.0.1", port), CARD, SECRET, 5.0)
    for _ in range(3):
        assert client.ask(messages.Show()) == _ALL_BLOCKS
    client.close()
    server.close(5.0)


def test_who_asks_and_does_not_read_is_left() -> None:
    """Its second question comes while there is no room for the first answer."""
    port, num_asked = free_port(), 0
    card = msgspec.structs.replace(CARD, port=port)

    def handle(peer: Peer, message: Message) -> Message:
        nonlocal num_asked
        num_asked += 1
        return _ALL_BLOCKS

    server = ControlServer("127.0.0.1", port, card, SECRET, handle)
    # Its connections inherit that. By itself the system grows a buffer until all answers fit.
    server._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
    client = ControlClient(PeerAddress("127.0.0.1", port), CARD, SECRET, 5.0)
    questions = [client._key.seal(9 + i, messages.encode(messages.Show())) for i in range(100)]
    deadline = Deadline(time.monotonic() + 10.0, time.monotonic)
    client._wire.send(questions, deadline)
    with pytest.raises(WireError):
        client._receive(len(questions) << 16, deadline)
    assert num_asked < len(questions)
    client.close()
    server.close(5.0)


def test_of_too_many_silent_strangers_the_oldest_goes_and_no_peer_does() -> None:
    port = free_port()
    card = msgspec.structs.replace(CARD, port=port)
    server = ControlServer(
        "127.0.0.1", port, card, SECRET, lambda peer, message: messages.Done(), lambda: 0.0
    )
    client = ControlClient(PeerAddress("127.0.0.1", port), CARD, SECRET, 5.0)
    strangers = [socket.create_connection(("127.0.0.1", port), 5.0) for _ in range(129)]
    assert _receive(strangers[0]) == b""
    assert client.ask(messages.Show()) == messages.Done()
    for sock in strangers:
        sock.close()
    client.close()
    server.close(5.0)
