"""What strangers may ask of the control server's one thread, and answers that come late."""

from __future__ import annotations

import os
import socket
import threading

import msgspec
import pytest

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
