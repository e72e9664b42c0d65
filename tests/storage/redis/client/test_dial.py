"""Connecting to Redis: TLS keys, keep-alive, slow name resolution, and bounds of replies."""

from __future__ import annotations

import os
import pty
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
import redis

from lmcache_connector.storage.redis.client.dial import (
    CONNECTION_ERRORS,
    SMALL_BYTES,
    Client,
    Dialer,
    PendingCommand,
    take_socket,
)
from lmcache_connector.storage.redis.client.resp import command
from lmcache_connector.storage.redis.client.url import parse_redis_url
from lmcache_connector.storage.redis.lookup import RedisLookup
from lmcache_connector.storage.redis.topology import (
    MAX_NODES,
    MAX_SLOTS_BYTES,
    NUM_SLOTS,
    parse_slots,
)
from tests.support.redis.chunks import PARTS, chunk_key, config, get_all, open_tier
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


def test_an_encrypted_key_asks_no_terminal_for_its_password(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-subj", "/CN=x"]
    make += ["-keyout", str(key), "-out", str(certificate), "-passout", "pass:a password"]
    subprocess.run(make, check=True, capture_output=True)
    url = f"rediss://localhost?ssl_certfile={certificate}&ssl_keyfile={key}"
    terminal, side = pty.openpty()
    listener = socket.create_server(("127.0.0.1", 0))  # the key is read after the TCP connection
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


def test_keep_alive_notices_a_dead_connection_in_25_seconds(valkey: Server) -> None:
    dialer = Dialer(parse_redis_url(valkey.url), 5.0, 5.0, time.monotonic)
    with (
        dialer.connect("127.0.0.1", valkey.port, SMALL_BYTES) as client,
        take_socket(client) as sock,
    ):
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        silence = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
        pause = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL)
        assert silence + pause * sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == 25


def test_a_slow_name_resolution_delays_no_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's resolver has no deadline: it runs on a thread of its own."""
    asked, answer = threading.Event(), threading.Event()

    def resolve(*args: object, **kwargs: object) -> list[object]:
        asked.set()
        answer.wait(60.0)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    try:
        url = "redis://a-name-of-a-server:6379"
        lookup = RedisLookup(config(url), [PARTS])
        with open_tier(url) as tier:  # closing is quick, too
            assert asked.wait(10.0)
            assert get_all(tier, [0], seconds=0.2)[0] == [False]
            deadline = time.monotonic() + 0.2
            assert lookup.exists_prefix([chunk_key(0)], deadline) == 0
        lookup.close()
        assert not answer.is_set()
    finally:
        answer.set()


# -- bounds of replies, in size and time, as docs/security.md has them -----------------------------


KIB = 1 << 10
HOME = ("10.0.0.1", 6379)


@contextmanager
def client_of(
    answer: Callable[[socket.socket], None], seconds: float = 5.0, url: str = "redis://{}"
) -> Iterator[Callable[[], Client]]:
    """Connects to a server that replies to any command with ``answer(sock)``."""

    def serve(sock: socket.socket) -> None:
        with sock:
            try:
                while sock.recv(1 << 16):
                    answer(sock)
            except OSError:
                return

    def accept() -> None:
        while True:
            try:
                sock = listener.accept()[0]
            except OSError:
                return
            threading.Thread(target=serve, args=(sock,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept)
        thread.start()
        place: tuple[str, int] = listener.getsockname()
        address = parse_redis_url(url.format("{}:{}".format(*place)))
        dialer = Dialer(address, seconds, seconds, time.monotonic)
        try:
            yield lambda: dialer.connect(place[0], place[1], SMALL_BYTES)
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def says(reply: bytes) -> Callable[[socket.socket], None]:
    return lambda sock: sock.sendall(reply)


def bulk(size: int) -> bytes:
    return b"$%d\r\n%b\r\n" % (size, b"x" * size)


def test_the_bounds_are_the_documented_ones() -> None:
    assert (SMALL_BYTES, MAX_SLOTS_BYTES) == (64 * KIB, 8 << 20)
    assert (NUM_SLOTS, MAX_NODES) == (16_384, 1_000)


@pytest.mark.parametrize(
    "reply",
    [bulk(64 * KIB - 10), b"*1000\r\n" + b":1\r\n" * 1000, b"+" + b"x" * (60 * KIB) + b"\r\n"],
    ids=["bytes", "elements", "line"],
)
def test_the_largest_replies_pass(reply: bytes) -> None:
    with client_of(says(reply)) as connect, connect() as client:
        client.execute_command("WHAT")


@pytest.mark.parametrize(
    "reply",
    [
        bulk(64 * KIB),
        b"$900000000000\r\n" + bytes(64 * KIB),
        b"$%d\r\n" % 10**30,
        b"*900000000000\r\n" + b":1\r\n" * 16384,
        b"*1\r\n" * 13000,
        b"*200\r\n" + bulk(KIB) * 64,
        b"+" + b"x" * (66 * KIB),
        b":" + b"9" * 5000 + b"\r\n",
        b":x\r\n",
        b"what?\r\n",
        b"-MOVED 1 2 3\r\n",
    ],
    ids=["bytes", "many bytes", "impossible bytes", "many elements", "nesting", "bytes in all",
         "line", "integer", "no integer", "no reply", "no redirection"],
)  # fmt: skip
def test_other_replies_fail(reply: bytes) -> None:
    with client_of(says(reply)) as connect, connect() as client, pytest.raises(CONNECTION_ERRORS):
        client.execute_command("WHAT")


@pytest.mark.parametrize("url", ["redis://{}", "redis://:password@{}"])
def test_one_time_out_covers_a_trickling_reply(url: str) -> None:
    """Each byte of the reply, to AUTH or to a command, comes soon; its end never comes."""
    ended = threading.Event()

    def trickle(sock: socket.socket) -> None:
        sock.sendall(b"*256\r\n")
        while not ended.wait(0.02):
            sock.sendall(b":1\r\n")

    with client_of(trickle, 0.4, url) as connect:
        begun = time.monotonic()
        with pytest.raises(CONNECTION_ERRORS, match="Timeout"), connect() as client:
            client.execute_command("WHAT")
        ended.set()
    assert time.monotonic() - begun < 3.0


def test_a_taken_socket_has_no_unread_bytes() -> None:
    with client_of(says(b"+OK\r\n")) as connect:
        with connect() as client:
            client.execute_command("WHAT")
            sock = take_socket(client)
        with sock:
            sock.setblocking(False)
            with pytest.raises(BlockingIOError):
                sock.recv(1)
            sock.setblocking(True)
            sock.sendall(b"still open")
            assert sock.recv(16) == b"+OK\r\n"


def test_a_connection_with_a_reply_too_many_is_replaced() -> None:
    """Bytes in redis-py's buffer would be missing before the first value."""
    with client_of(says(b"+OK\r\n+and more\r\n")) as connect, connect() as client:
        client.execute_command("WHAT")
        with closing(take_socket(client)) as another:
            another.sendall(b"WHAT")
            assert another.recv(5) == b"+OK\r\n"[:5]
    twice = client_of(says(b"+OK\r\n+more\r\n"), url="redis://:password@{}")
    with twice as connect, pytest.raises(CONNECTION_ERRORS):
        connect()


def test_a_command_is_added_while_the_connection_is_lost() -> None:
    """Another thread adds it after the one that awaits the answer has learnt of the loss."""
    with client_of(lambda sock: sock.shutdown(socket.SHUT_RDWR)) as connect, connect() as client:
        with suppress(redis.ConnectionError), PendingCommand(client, "WHAT") as pending:
            try:
                pending.answer()
            finally:
                pending.add(command(b"PING"))
        assert not pending._connection.is_connected


def slots(*ranges: tuple[int, int, str, int]) -> list[object]:
    """The reply to ``CLUSTER SLOTS``: first and last slot, host and port of each range."""
    return [[first, last, [host.encode(), port]] for first, last, host, port in ranges]


def test_the_largest_slot_maps_are_accepted() -> None:
    one_each = slots(*((i, i, "10.0.0.2", 1 + i) for i in range(MAX_NODES)))
    assert len(set(parse_slots(one_each, HOME).values())) == MAX_NODES
    whole = slots((0, NUM_SLOTS - 1, *HOME))
    assert parse_slots(whole, HOME) == dict.fromkeys(range(NUM_SLOTS), HOME)


@pytest.mark.parametrize(
    "reply",
    [
        slots(*((i, i, "10.0.0.2", 1 + i) for i in range(MAX_NODES + 1))),
        slots((0, NUM_SLOTS - 1, *HOME), (5, 5, *HOME)),
        slots((0, NUM_SLOTS, *HOME)),
        slots((7, 3, *HOME)),
        slots((0, 3, "10.0.0.2", 10**30)),
        slots((0, 3, "x" * 300, 7000)),
        b"slots",
    ],
)
def test_bad_maps_are_refused(reply: object) -> None:
    with pytest.raises(CONNECTION_ERRORS):
        parse_slots(reply, HOME)
