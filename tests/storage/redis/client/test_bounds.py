"""What answers to commands may hold, and how long they may take: the bounds of docs/security.md."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest

from lmcache_connector.storage.redis.client.dial import (
    SMALL_BYTES,
    TALK_ERRORS,
    Client,
    Dialer,
    take_socket,
)
from lmcache_connector.storage.redis.client.url import parse_redis_url
from lmcache_connector.storage.redis.topology import (
    MAX_NODES,
    MAX_SLOTS_BYTES,
    NUM_SLOTS,
    parse_slots,
)

KIB = 1 << 10
HOME = ("10.0.0.1", 6379)


@contextmanager
def client_of(
    answer: Callable[[socket.socket], None], seconds: float = 5.0, url: str = "redis://{}"
) -> Iterator[Callable[[], Client]]:
    """Connects to a server that answers whatever it is asked with ``answer(sock)``."""

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


def test_the_bounds_are_those_that_are_documented() -> None:
    assert (SMALL_BYTES, MAX_SLOTS_BYTES) == (64 * KIB, 8 << 20)
    assert (NUM_SLOTS, MAX_NODES) == (16_384, 1_000)


@pytest.mark.parametrize(
    "reply",
    [bulk(64 * KIB - 10), b"*1000\r\n" + b":1\r\n" * 1000, b"+" + b"x" * (60 * KIB) + b"\r\n"],
    ids=["bytes", "elements", "line"],
)
def test_a_reply_may_be_as_large_as_that(reply: bytes) -> None:
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
def test_any_other_is_an_error(reply: bytes) -> None:
    with client_of(says(reply)) as connect, connect() as client, pytest.raises(TALK_ERRORS):
        client.execute_command("WHAT")


@pytest.mark.parametrize("url", ["redis://{}", "redis://:password@{}"])
def test_an_answer_has_one_time_out_however_it_trickles(url: str) -> None:
    """Each byte comes soon, and the whole of it never would: to AUTH, or to a command."""
    ended = threading.Event()

    def trickle(sock: socket.socket) -> None:
        sock.sendall(b"*256\r\n")
        while not ended.wait(0.02):
            sock.sendall(b":1\r\n")

    with client_of(trickle, 0.4, url) as connect:
        begun = time.monotonic()
        with pytest.raises(TALK_ERRORS, match="Timeout"), connect() as client:
            client.execute_command("WHAT")
        ended.set()
    assert time.monotonic() - begun < 3.0


def test_a_socket_is_taken_with_nothing_left_to_read() -> None:
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


def test_a_connection_whose_server_says_more_than_it_was_asked_is_not_used() -> None:
    """What redis-py has read already would be missing in front of the first value."""
    with client_of(says(b"+OK\r\n+and more\r\n")) as connect, connect() as client:
        client.execute_command("WHAT")
        with closing(take_socket(client)) as another:
            another.sendall(b"WHAT")
            assert another.recv(5) == b"+OK\r\n"[:5]
    twice = client_of(says(b"+OK\r\n+more\r\n"), url="redis://:password@{}")
    with twice as connect, pytest.raises(TALK_ERRORS):
        connect()


def slots(*ranges: tuple[int, int, str, int]) -> list[object]:
    """The reply to ``CLUSTER SLOTS``: first and last slot, host and port of each range."""
    return [[first, last, [host.encode(), port]] for first, last, host, port in ranges]


def test_a_map_of_as_many_nodes_and_slots_as_there_may_be() -> None:
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
        slots((0, 10**12, *HOME)),
        slots((7, 3, *HOME)),
        slots((-1, 3, *HOME)),
        slots((0, 3, "10.0.0.2", 10**30)),
        slots((0, 3, "10.0.0.2", 0)),
        slots((0, 3, "x" * 300, 7000)),
        [[0, 3]],
        b"slots",
        None,
    ],
)
def test_any_other_map_is_none(reply: object) -> None:
    with pytest.raises(TALK_ERRORS):
        parse_slots(reply, HOME)
