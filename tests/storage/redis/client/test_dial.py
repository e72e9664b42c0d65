"""Connecting, where something on this side is not as it should be."""

from __future__ import annotations

import os
import pty
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lmcache_connector.storage.redis.client.dial import SMALL_BYTES, Dialer, take_socket
from lmcache_connector.storage.redis.client.url import parse_redis_url
from lmcache_connector.storage.redis.lookup import RedisLookup
from tests.support.redis.chunks import PARTS, chunk_key, config, get_all, open_tier
from tests.support.redis.server_groups import wait_until
from tests.support.redis.servers import Server

_SAY_WHY = """
import sys, time
from lmcache_connector.storage.redis.client.dial import Dialer, UnreachableError
from lmcache_connector.storage.redis.client.url import parse_redis_url
address = parse_redis_url(sys.argv[1])
try:
    Dialer(address, 1.0, 1.0, time.monotonic).connect("127.0.0.1", int(sys.argv[2]), 1000)
except UnreachableError as error:
    print(error)
"""


def test_a_key_whose_password_is_not_given_asks_no_terminal(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-subj", "/CN=x"]
    make += ["-keyout", str(key), "-out", str(certificate), "-passout", "pass:a password"]
    subprocess.run(make, check=True, capture_output=True)
    url = f"rediss://localhost?ssl_certfile={certificate}&ssl_keyfile={key}"
    terminal, side = pty.openpty()
    listener = socket.create_server(("127.0.0.1", 0))  # the key is read once there is a connection
    try:
        process = subprocess.run(
            [sys.executable, "-c", _SAY_WHY, url, str(listener.getsockname()[1])],
            check=False,
            stdin=side,
            stdout=subprocess.PIPE,
            stderr=side,
            timeout=30.0,
            start_new_session=True,
        )
    finally:
        os.close(side)
        os.close(terminal)
        listener.close()
    assert b"PEM" in process.stdout or b"bad decrypt" in process.stdout


def test_a_connection_that_was_cut_without_a_word_is_noticed(valkey: Server) -> None:
    dialer = Dialer(parse_redis_url(valkey.url), 5.0, 5.0, time.monotonic)
    with (
        dialer.connect("127.0.0.1", valkey.port, SMALL_BYTES) as client,
        take_socket(client) as sock,
    ):
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        silence = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
        pause = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL)
        assert silence + pause * sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == 25


def test_a_connection_that_ended_is_replaced_before_anybody_asks(valkey: Server) -> None:
    lookup = RedisLookup(config(valkey.url), [PARTS])
    with valkey.client() as client:

        def connections() -> set[str]:
            lookup.tend()
            return {c["id"] for c in client.client_list() if c["cmd"] == "exists"}

        lookup.exists_prefix([chunk_key(0)], time.monotonic() + 5.0)
        before = connections()
        assert len(before) == 1
        client.client_kill_filter(_type="normal", skipme=True)
        wait_until(lambda: bool(connections() - before), "it does not connect again")
    lookup.close()


def test_a_name_that_takes_long_to_resolve_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's resolver knows no deadline: it keeps a thread of its own waiting."""
    asked, answer = threading.Event(), threading.Event()

    def resolve(*args: object, **kwargs: object) -> list[object]:
        asked.set()
        answer.wait(60.0)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    try:
        url = "redis://a-name-of-a-server:6379"
        lookup = RedisLookup(config(url), [PARTS])
        with open_tier(url) as tier:  # it closes in time, too
            assert asked.wait(10.0)
            assert get_all(tier, [0], seconds=0.2)[0] == [False]
            deadline = time.monotonic() + 0.2
            assert lookup.exists_prefix([chunk_key(0)], deadline) == 0
        lookup.close()
        assert not answer.is_set()
    finally:
        answer.set()
