"""A client is bounded: a peer that is away or silent is found out in time."""

from __future__ import annotations

import socket
import time

import pytest

from lmcache_connector.p2p.control.address import PeerAddress
from lmcache_connector.p2p.control.client import ControlClient
from lmcache_connector.p2p.control.sockets import connected_socket
from lmcache_connector.p2p.errors import PeerError
from lmcache_connector.p2p.reasons import Reason
from tests.p2p.control.conftest import CARD, SECRET
from tests.support.redis.servers import free_port


def test_nobody_there_is_known_at_once() -> None:
    started = time.monotonic()
    with pytest.raises(PeerError, match="cannot be reached") as away:
        ControlClient(PeerAddress("127.0.0.1", free_port()), CARD, SECRET, 5.0)
    assert time.monotonic() - started < 2.0
    assert away.value.cause.reason is Reason.UNREACHABLE


def test_silence_is_bounded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = PeerAddress("127.0.0.1", silent.getsockname()[1])
        started = time.monotonic()
        with pytest.raises(PeerError, match=r"no answer within 0\.3 s") as silence:
            ControlClient(address, CARD, SECRET, 0.3)
        assert time.monotonic() - started < 2.0
        assert silence.value.cause.reason is Reason.NO_ANSWER


def test_a_host_that_vanished_is_noticed_by_keepalive() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        connected_socket("127.0.0.1", listener.getsockname()[1], 5.0) as sock,
    ):
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        silence = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
        pause = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL)
        assert silence + pause * sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == 25
