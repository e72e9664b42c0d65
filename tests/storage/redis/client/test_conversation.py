"""What one reply may hold, and how long it may take: the bounds that docs/security.md names."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from lmcache_connector.net.wire import WireError, WireFault
from lmcache_connector.storage.redis.client.conversation import SMALL, Conversation, ReplyLimits
from lmcache_connector.storage.redis.client.slot_map import (
    MAX_NODES,
    NUM_SLOTS,
    SLOTS_LIMITS,
    parse_slots,
)

KIB = 1 << 10
HOME = ("10.0.0.1", 6379)


@contextmanager
def conversation(reply: bytes, seconds: float = 5.0) -> Iterator[Conversation]:
    """With a server that says ``reply``, whatever it is asked, and stays connected."""
    here, there = socket.socketpair()
    thread = threading.Thread(target=there.sendall, args=(reply,))
    thread.start()
    with closing(there), closing(Conversation(here, seconds, time.monotonic)) as asked:
        yield asked
        there.shutdown(socket.SHUT_RDWR)
        here.close()
        thread.join()


def bulk(size: int) -> bytes:
    return b"$%d\r\n%b\r\n" % (size, b"x" * size)


def test_the_bounds_are_those_that_are_documented() -> None:
    assert ReplyLimits(64 * KIB, 256) == SMALL
    assert ReplyLimits(8 << 20, 262_144) == SLOTS_LIMITS
    assert (NUM_SLOTS, MAX_NODES) == (16_384, 1_000)


@pytest.mark.parametrize(
    "reply",
    [
        bulk(64 * KIB - 10),
        b"*256\r\n" + b":1\r\n" * 256,
        b"*1\r\n" * 6 + b":1\r\n",
        b"+" + b"x" * (60 * KIB) + b"\r\n",
    ],
    ids=["bytes", "elements", "nesting", "line"],
)
def test_a_reply_may_be_as_large_as_that(reply: bytes) -> None:
    with conversation(reply) as asked:
        asked.ask(b"")


@pytest.mark.parametrize(
    "reply",
    [
        b"$%d\r\n" % (64 * KIB),  # and nothing else: it is not waited for
        b"$900000000000\r\n",
        b"*257\r\n",
        b"*900000000000\r\n",
        b"*2\r\n:1\r\n*255\r\n",
        b"*1\r\n" * 7,
        b"*200\r\n" + bulk(KIB) * 64,
        b"+" + b"x" * (66 * KIB),
        b":" + b"9" * 30 + b"\r\n",
    ],
    ids=["bytes", "many bytes", "elements", "many elements", "elements in all", "nesting",
         "bytes in all", "line", "integer"],
)  # fmt: skip
def test_a_larger_one_ends_the_conversation(reply: bytes) -> None:
    with conversation(reply) as asked, pytest.raises(WireError) as caught:
        asked.ask(b"")
    assert caught.value.fault is WireFault.OUT_OF_STEP


def test_a_reply_has_one_time_out_however_many_lines_it_has() -> None:
    """Each line comes soon, and the whole of it never would."""
    here, there = socket.socketpair()
    ended = threading.Event()

    def trickle() -> None:
        there.sendall(b"*256\r\n")
        while not ended.wait(0.02):
            there.sendall(b":1\r\n")

    thread = threading.Thread(target=trickle)
    thread.start()
    with closing(there), closing(Conversation(here, 0.4, time.monotonic)) as asked:
        with pytest.raises(WireError) as caught:
            asked.ask(b"")
        ended.set()
        thread.join()
    assert caught.value.fault is WireFault.DEADLINE


def slots(*ranges: tuple[int, int, str, int]) -> list[object]:
    """The reply to ``CLUSTER SLOTS``: first and last slot, host and port of each range."""
    return [[first, last, [host.encode(), port]] for first, last, host, port in ranges]


def test_a_map_of_as_many_nodes_and_slots_as_there_may_be() -> None:
    one_each = slots(*((i, i, "10.0.0.2", 1 + i) for i in range(MAX_NODES)))
    assert len(set(parse_slots(one_each, HOME).values())) == MAX_NODES  # type: ignore[arg-type]
    whole = slots((0, NUM_SLOTS - 1, *HOME))
    assert parse_slots(whole, HOME) == dict.fromkeys(range(NUM_SLOTS), HOME)  # type: ignore[arg-type]


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
    with pytest.raises(WireError):
        parse_slots(reply, HOME)  # type: ignore[arg-type]
