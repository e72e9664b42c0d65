"""Whatever a peer or a relay does costs hand-overs at most: bounded memory, threads and time.

The bounds, over any number of conversations: ``MAX_THREADS`` threads more than before,
``MAX_MEMORY_BYTES`` of memory, ``MAX_SECONDS`` for each conversation, nothing left afterwards.
"""

from __future__ import annotations

import ctypes
import logging
import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lmcache_connector.p2p.config import P2PConfig
from lmcache_connector.p2p.control import messages
from lmcache_connector.p2p.control.address import PeerAddress
from lmcache_connector.p2p.control.client import ControlClient
from lmcache_connector.p2p.control.server import ControlServer
from lmcache_connector.p2p.data.base import KeyOf, Sink
from lmcache_connector.p2p.data.tcp import TcpTransport
from lmcache_connector.p2p.errors import PeerError
from tests.p2p.control.conftest import CARD, SECRET, WANT, answer, card_at
from tests.support.engines.p2p_hostile import HostilePeer
from tests.support.engines.p2p_instances import (
    OTHERS,
    SHUFFLED,
    FakeInstance,
    check_all_arrived,
    running_instance,
)
from tests.support.engines.p2p_relay import Alter, Relay
from tests.support.redis.servers import free_port

MAX_THREADS = 64 + 8  # strangers on the data port, and what answers them
MAX_MEMORY_BYTES = 64 << 20
MAX_SECONDS = 5.0

SHARED: dict[str, Any] = {"secret": "known to both of them", "stall_seconds": 1.0}
MANY = pytest.mark.parametrize(
    "conversations",
    [300, pytest.param(10_000, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])],
)


@pytest.fixture(autouse=True)
def _no_log_is_kept() -> Iterator[None]:
    """pytest keeps every record with its traceback, and whatever memory that holds."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def resident_bytes() -> int:
    """What is in use: the allocator gives back what many short-lived threads left to it."""
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@MANY
def test_a_hostile_peer_costs_bounded_memory_threads_and_time(conversations: int) -> None:
    with (
        running_instance(produces=True, **SHARED) as prefill,
        running_instance(produces=True, consumes=True, **SHARED) as decode,
    ):
        hand_over(prefill, decode, "before")
        card = prefill.ranks[0].worker._dialer.card
        data_port = decode.ranks[0].worker._dialer.card.transports["tcp"]
        secret = SHARED["secret"].encode()
        peer = HostilePeer(decode.address, data_port, card, secret, seed=conversations)
        threads, memory = threading.active_count(), resident_bytes()
        kinds = set()
        for number in range(conversations):
            started = time.monotonic()
            kinds.add(peer.converse())
            assert time.monotonic() - started < MAX_SECONDS + 2.0
            assert threading.active_count() <= threads + MAX_THREADS
            if number % 100 == 99:
                assert resident_bytes() <= memory + MAX_MEMORY_BYTES
                hand_over(prefill, decode, f"meanwhile {number}")
        assert len(kinds) == len(peer._kinds)
        peer.close()
        hand_over(prefill, decode, "after")
        decode.until(lambda: threading.active_count() <= threads + 2)


def hand_over(prefill: FakeInstance, decode: FakeInstance, name: str) -> None:
    prefill.prefill(name, SHUFFLED, seed=len(name))
    decode.load(name, OTHERS, prefill.address)
    check_all_arrived(prefill, decode, name)
    decode.results.clear()


class Mischief:
    """Alters some reads: flips a bit, leaves bytes out, repeats, inserts or cuts."""

    def __init__(self, seed: int, share: float) -> None:
        self._rng = random.Random(seed)
        self._share = share
        self._last = b""
        self.num_altered = 0

    def __call__(self, data: bytes) -> bytes:
        rng = self._rng
        last, self._last = self._last, data
        if rng.random() >= self._share:
            return data
        self.num_altered += 1
        at = rng.randrange(len(data))
        flipped = data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
        return rng.choice(
            [flipped, data[:at] + data[at + 1 :], data + data, last + data, data[:at], b"\0" + data]
        )


class RelayedTcp(TcpTransport):
    """Tells its peers the port of a relay in front of it: somebody on the path."""

    def __init__(self, stall_seconds: float, stack: ExitStack, alter: Alter) -> None:
        super().__init__(stall_seconds)
        self._stack = stack
        self._alter = alter

    def listen(self, host: str, port: int, sink: Sink, key_of: KeyOf) -> int:
        target = PeerAddress(host, super().listen(host, port, sink, key_of))
        return self._stack.enter_context(Relay(target, self._alter)).address.port


@MANY
def test_a_relay_that_alters_frames_costs_a_recompute_and_no_wrong_byte(
    conversations: int,
) -> None:
    """Every tenth of the conversations is a whole hand-over of 21 frames."""
    mischief = Mischief(conversations, share=0.2)
    shared = SHARED | {"stall_seconds": 0.3, "unknown_grace_seconds": 0.1}
    with ExitStack() as stack:

        def make(config: P2PConfig) -> TcpTransport:
            return RelayedTcp(config.stall_seconds, stack, mischief)

        with (
            running_instance(produces=True, **shared) as prefill,
            running_instance(consumes=True, make_transport=make, **shared) as decode,
        ):
            threads, memory, whole = threading.active_count(), resident_bytes(), 0
            for number in range(conversations // 10):
                name = f"number {number}"
                prefill.prefill(name, SHUFFLED, per_step=1, seed=number % 7)
                decode.load(name, OTHERS, prefill.address, seconds=5.0)
                (result,) = decode.finish(f"request of {name}", 10.0)
                arrived = result.num_blocks
                whole += arrived == len(OTHERS)
                assert decode.content(OTHERS[:arrived]) == prefill.content(SHUFFLED[:arrived])
                assert threading.active_count() <= threads + MAX_THREADS
                if number % 10 == 9:
                    assert resident_bytes() <= memory + MAX_MEMORY_BYTES
            assert mischief.num_altered > conversations // 50
            assert 0 < whole < conversations // 10
            decode.until(lambda: decode.used_bytes == 0)


@MANY
def test_a_relay_that_alters_control_packets_is_never_believed(conversations: int) -> None:
    mischief = Mischief(conversations, share=0.25)
    inner = PeerAddress("127.0.0.1", free_port())
    with Relay(inner, mischief) as relay:
        card = card_at(relay.address)  # on the path: the server's own address leads to the relay
        server = ControlServer(inner.host, inner.port, card, SECRET, answer)
        answered = refused = 0
        try:
            for number in range(conversations):
                client = None
                try:
                    client = ControlClient(relay.address, CARD, SECRET, 0.1)
                    assert client.peer.card == card
                    for _ in range(1 + number % 3):
                        assert client.ask(WANT) == messages.Gone("other: engine asked")
                        answered += 1
                except PeerError:
                    refused += 1
                finally:
                    if client is not None:
                        client.close()
        finally:
            server.close(5)
        assert answered > conversations // 10
        assert refused > conversations // 10


def test_a_frame_of_one_connection_is_none_of_another() -> None:
    """A relay records what one connection carries, and plays it to the next."""
    recorded: list[bytes] = []
    replaying = threading.Event()

    def alter(data: bytes) -> bytes:
        if replaying.is_set():
            return recorded.pop(0) if recorded else b""
        recorded.append(data)
        return data

    with ExitStack() as stack:

        def make(config: P2PConfig) -> TcpTransport:
            return RelayedTcp(config.stall_seconds, stack, alter)

        with running_instance(consumes=True, make_transport=make, **SHARED) as decode:
            with running_instance(produces=True, **SHARED) as prefill:
                prefill.prefill("first", SHUFFLED)
                decode.load("first", OTHERS, prefill.address)
                check_all_arrived(prefill, decode, "first")
            replaying.set()
            with running_instance(produces=True, **SHARED) as prefill:
                prefill.prefill("second", SHUFFLED, seed=2)
                decode.load("second", OTHERS, prefill.address, seconds=3.0)
                (result,) = decode.finish("request of second", 10.0)
        assert result.num_blocks == 0


def test_a_card_is_believed_only_whole() -> None:
    """Addresses of other machines stand on the card, which is authenticated as one."""
    card = msgspec.structs.replace(CARD, tp_size=2, rank_hosts=("10.0.0.1", "10.0.0.2"))
    assert card.address_of(1) == PeerAddress("10.0.0.2", card.port + 1)
    assert CARD.address_of(1) == PeerAddress(CARD.host, CARD.port + 1)
