"""A slow peer is waited for while its bytes move; one that hardly moves has stalled."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from lmcache_connector.net.deadline import Deadline
from lmcache_connector.net.wire import Wire, WireError, WireFault
from tests.support.redis.server_groups import Certificates, certificates

IDLE_SECONDS = 0.4
IDLE_BYTES = 64 << 10
SMALL_BUFFER = 32 << 10
FAR = Deadline(float("inf"), time.monotonic)


@pytest.fixture(scope="module")
def pem() -> Iterator[Certificates]:
    with certificates() as pem:
        yield pem


class SlowPeer:
    """Reads ``num_bytes`` in pieces, with a pause after each, then replies."""

    def __init__(self, num_bytes: int, piece: int, pem: Certificates | None = None) -> None:
        self._num_bytes, self._piece, self._pem = num_bytes, piece, pem
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def connect(self, send_buffer: int | None = None) -> Wire:
        sock = socket.socket()
        if send_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        sock.connect(self._listener.getsockname())
        if self._pem is not None:
            context = ssl.create_default_context(cafile=str(self._pem.ca))
            sock = context.wrap_socket(sock, server_hostname="127.0.0.1")
        return Wire(sock, time.monotonic, IDLE_SECONDS, IDLE_BYTES)

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        sock, _ = self._listener.accept()
        if self._pem is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self._pem.certificate, self._pem.key)
            sock = context.wrap_socket(sock, server_side=True)
        with sock:
            left = self._num_bytes
            while left > 0 and not self._stopped.is_set():
                for _ in range(max(1, self._piece >> 14)):
                    left -= len(sock.recv(min(left, self._piece, 1 << 14)))
                self._stopped.wait(0.03)
            if left == 0:
                sock.sendall(b"+OK\r\n")
                self._stopped.wait(10.0)


@pytest.mark.parametrize("tls", [False, True])
def test_progress_within_one_large_value_counts(tls: bool, pem: Certificates) -> None:
    """4 MiB at 64 KiB a turn take several times the idle time-out."""
    data = bytes(4 << 20)
    peer = SlowPeer(len(data), 1 << 16, pem if tls else None)
    with closing(peer), closing(peer.connect(SMALL_BUFFER)) as wire:
        begun = time.monotonic()
        wire.send([data], FAR)
        assert time.monotonic() - begun > 2 * IDLE_SECONDS
        assert wire.receive_line(FAR) == b"+OK"


def test_a_reply_is_waited_for_until_its_command_has_arrived() -> None:
    """The system buffers megabytes at once, and sends them slowly."""
    data = bytes(3 << 20)
    with closing(SlowPeer(len(data), 1 << 16)) as peer, closing(peer.connect()) as wire:
        wire.send([data], FAR)
        assert wire.receive_line(FAR) == b"+OK"


@pytest.mark.parametrize("tls", [False, True])
def test_a_peer_that_reads_a_few_bytes_at_a_time_has_stalled(tls: bool, pem: Certificates) -> None:
    peer = SlowPeer(4 << 20, 100, pem if tls else None)
    with closing(peer), closing(peer.connect(SMALL_BUFFER)) as wire:
        with pytest.raises(WireError) as caught:
            wire.send([bytes(4 << 20)], FAR)
        assert caught.value.fault is WireFault.STALLED


def test_a_line_that_trickles_has_stalled() -> None:
    here, there = socket.socketpair()
    stop = threading.Event()

    def trickle() -> None:
        while not stop.wait(0.02):
            there.send(b"x")

    thread = threading.Thread(target=trickle)
    thread.start()
    with closing(Wire(here, time.monotonic, IDLE_SECONDS, IDLE_BYTES)) as wire:
        with pytest.raises(WireError) as caught:
            wire.receive_line(FAR)
        assert caught.value.fault is WireFault.STALLED
        stop.set()
        thread.join()
    there.close()
