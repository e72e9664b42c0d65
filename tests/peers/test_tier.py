"""Chunks of peers: found with whoever has them, read as from Redis; nobody waits for the dead."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import pytest

from lmcache_connector.lookup.any_lookup import AnyLookup
from lmcache_connector.net.address import Address
from lmcache_connector.peers.commands import Commands, Greeting, Reply
from lmcache_connector.peers.lookup import PeerLookup
from lmcache_connector.peers.server import PeerServer
from lmcache_connector.peers.tier import PeerTier
from lmcache_connector.peers.topology import PeerTopology
from lmcache_connector.plans import Tier
from lmcache_connector.storage.redis.client.circuit_breaker import CircuitState
from lmcache_connector.storage.redis.client.dial import Client
from lmcache_connector.storage.redis.config import RedisTierConfig
from lmcache_connector.storage.redis.lookup import RedisLookup
from lmcache_connector.storage.redis.topology import Node
from lmcache_connector.storage.tier import ReadResult
from tests.support.engines.ports import free_ports
from tests.support.peers.chunks import HeldChunks, serving
from tests.support.peers.dials import once_dialled
from tests.support.redis.chunks import (
    GEOMETRY,
    PARTS,
    chunk_data,
    chunk_key,
    config,
    open_tier,
    put_all,
)
from tests.support.redis.fault_proxy import Direction, fault_proxy
from tests.support.redis.servers import Server

OWN = Greeting(1, "the reader")


def settings(**more: object) -> RedisTierConfig:
    return config("redis://peers", **{"connect_timeout_seconds": 0.3} | more)


def topology_of(addresses: Sequence[str], rank: int = 0, greeting: Greeting = OWN) -> PeerTopology:
    parsed = [Address.parse(each, may_be_dns=True) for each in addresses]
    return PeerTopology(settings(), parsed, greeting, rank, time.monotonic)


def at(*servers: PeerServer | int) -> list[str]:
    ports = [each if isinstance(each, int) else each.port for each in servers]
    return [f"127.0.0.1:{port}" for port in ports]


@contextmanager
def reading(addresses: Sequence[str], **more: object) -> Iterator[PeerTier]:
    tier = PeerTier(settings(**more), PARTS, topology_of(addresses))
    try:
        yield tier
    finally:
        assert tier.close(5.0)


def read(
    tier: PeerTier, indices: Sequence[int], seconds: float = 5.0
) -> tuple[ReadResult, list[bytes]]:
    buffers = [bytearray(GEOMETRY.chunk_bytes) for _ in indices]
    keys, views = [chunk_key(i) for i in indices], [memoryview(b) for b in buffers]
    result = tier.read(keys, views, time.monotonic() + seconds)
    return result, [bytes(b) for b in buffers]


def read_once_connected(tier: PeerTier, indices: Sequence[int]) -> ReadResult:
    """Tries again while connections are made."""
    done: list[ReadResult] = []

    def is_whole() -> bool:
        result, found = read(tier, indices)
        done[:] = [result]
        if all(result.hits):
            assert found == [chunk_data(i) for i in indices]
        return all(result.hits)

    once_dialled(is_whole)
    return done[0]


def test_one_peer() -> None:
    with serving(HeldChunks(range(4))) as server, reading(at(server)) as tier:
        result, found = read(tier, range(6))
        assert result.hits == [True] * 4 + [False] * 2
        assert found[:4] == [chunk_data(i) for i in range(4)]
        assert not result.cut_off
        assert tier.counts().chunks_hit == 4


def test_each_chunk_is_read_from_a_peer_that_has_it() -> None:
    held = [HeldChunks(range(3)), HeldChunks(range(2, 6)), HeldChunks([])]
    with ExitStack() as stack:
        servers = [stack.enter_context(serving(each)) for each in held]
        tier = stack.enter_context(reading(at(*servers)))
        assert read_once_connected(tier, range(6)).hits == [True] * 6
        assert read(tier, [5, 9, 0])[0].hits[0]


def silent_server() -> socket.socket:
    """Takes connections and says nothing: a stopped process."""
    return socket.create_server(("127.0.0.1", 0), backlog=64)


@pytest.mark.parametrize("trouble", ["nobody", "silent", "other ranks", "itself"])
def test_a_peer_in_trouble_delays_nobody(trouble: str) -> None:
    """What another one has is read, and soon the one in trouble is left alone."""
    with ExitStack() as stack:
        good = stack.enter_context(serving(HeldChunks(range(4))))
        if trouble == "nobody":
            bad = free_ports(1)
        elif trouble == "silent":
            bad = stack.enter_context(silent_server()).getsockname()[1]
        elif trouble == "other ranks":
            bad = stack.enter_context(serving(HeldChunks(range(8)), ranks=[PARTS, PARTS])).port
        else:
            name = OWN.engine_id
            bad = stack.enter_context(serving(HeldChunks(range(8)), engine_id=name)).port
        tier = stack.enter_context(reading(at(bad, good), read_timeout_seconds=0.3))
        assert read_once_connected(tier, range(4)).hits == [True] * 4
        if trouble != "itself":  # which is no server of the tier's at all
            once_dialled(lambda: dict(tier.servers()).get(at(bad)[0]) is CircuitState.OPEN)
        assert read(tier, range(4))[0].hits == [True] * 4
        assert read(tier, [4])[0].hits == [False]  # other ranks have other heads


def test_a_peer_that_goes_away_and_comes_back() -> None:
    chunks, port = HeldChunks(range(4)), free_ports(1)
    with reading(at(port), read_timeout_seconds=0.3) as tier:
        assert read(tier, range(4), 0.5)[0].hits == [False] * 4
        for _ in range(2):
            with serving(chunks, port=port):
                assert read_once_connected(tier, range(4)).hits == [True] * 4
            result, _ = read(tier, range(4), 0.5)
            assert result.hits == [False] * 4


def test_damaged_bytes_are_a_miss() -> None:
    """Whoever is on the way."""

    def spoil(data: bytes) -> bytes:
        return data.replace(chunk_data(1)[:16], bytes(16))

    with (
        serving(HeldChunks(range(3))) as server,
        fault_proxy(server.port) as proxy,
        reading(at(proxy.port)) as tier,
    ):
        proxy.alter[Direction.REPLY] = spoil
        result, found = read(tier, range(3))
        assert result.hits[:2] == [True, False]
        assert found[0] == chunk_data(0)
        assert tier.counts().misses["bad_checksum"] == 1


def test_a_name_that_stands_for_several() -> None:
    """Looked up beside everything else; one that nobody knows keeps nobody out."""
    with serving(HeldChunks(range(2))) as server:
        port = server.port
        topology = topology_of([f"dns:localhost:{port}", f"dns:nobody.invalid:{port}"])
        topology.prepare()
        assert f"127.0.0.1:{port}" in topology.nodes()
        assert all(str(port) in node for node in topology.nodes())
        assert topology.is_current()


# -- look-ups ------------------------------------------------------------------------------------


def exist(lookup: AnyLookup, indices: Sequence[int], seconds: float = 0.1) -> list[bool]:
    keys, found = [chunk_key(i) for i in indices], list[bool]()

    def finds_any() -> bool:
        lookup.tend()
        found[:] = [t is not None for t in lookup.find(keys, time.monotonic() + seconds)]
        return any(found)

    once_dialled(finds_any)
    return found


@contextmanager
def looking(addresses: Sequence[str], url: str = "") -> Iterator[AnyLookup]:
    peers = PeerLookup(settings(), [PARTS], topology_of(addresses))
    redis = {Tier.REDIS: RedisLookup(config(url), [PARTS])} if url else {}
    lookup = AnyLookup({Tier.PEER: peers, **redis}, time.monotonic)
    try:
        yield lookup
    finally:
        lookup.close()


def test_peers_and_redis_are_asked_together(valkey: Server) -> None:
    with open_tier(valkey.url) as tier:
        assert all(put_all(tier, [4, 5]))
    held = HeldChunks([0, 1]), HeldChunks([1, 2])
    with (
        serving(held[0]) as one,
        serving(held[1]) as two,
        looking(at(one, two), valkey.url) as lookup,
    ):
        exist(lookup, [0])
        exist(lookup, [2])
        assert exist(lookup, range(7)) == [True, True, True, False, True, True, False]


def test_a_prompt_of_more_chunks_than_one_question_names() -> None:
    held = HeldChunks([0])
    held.data = {chunk_key(i): held.data[chunk_key(0)] for i in range(3000) if i % 7}
    with (
        serving(held) as server,
        serving(HeldChunks([])) as other,
        looking(at(server, other)) as it,
    ):
        assert exist(it, range(3000), 1.0) == [bool(i % 7) for i in range(3000)]


@pytest.mark.parametrize("said", [b"+111", b"+12", b"+1x", b":1", b"+", b"-ERR no", b"$2"])
def test_an_answer_that_is_none_is_a_miss_and_ends_the_connection(said: bytes) -> None:
    with (
        patch.object(Commands, "_holds", lambda *_: Reply((said, b"\r\n"))),
        serving(HeldChunks([0, 1])) as liar,
    ):
        lookup = PeerLookup(settings(), [PARTS], topology_of(at(liar)), connect_share=1.0)
        keys = [chunk_key(0), chunk_key(1)]
        for _ in range(3):
            assert lookup.exist(keys, time.monotonic() + 1.0) == [False, False]
        assert dict(lookup.servers())[at(liar)[0]] is CircuitState.OPEN
        lookup.close()


def test_a_silent_peer_is_left_out_and_then_left_alone() -> None:
    with (
        silent_server() as bad,
        serving(HeldChunks([0])) as good,
        looking(at(bad.getsockname()[1], good)) as lookup,
    ):
        assert exist(lookup, [0, 1]) == [True, False]
        address = at(bad.getsockname()[1])[0]
        once_dialled(lambda: dict(lookup.servers()).get(address) is CircuitState.OPEN)
        assert exist(lookup, [0, 1]) == [True, False]


class LateChunks(HeldChunks):
    """Once it ``is_late``, the server says nothing until somebody opens the ``gate``."""

    is_late = False

    def __init__(self, indices: Sequence[int]) -> None:
        super().__init__(indices)
        self.gate = threading.Event()

    def holds(self, key: bytes) -> bool:
        if self.is_late:
            self.gate.wait(20.0)
        return super().holds(key)


def test_a_peer_that_answers_late_is_not_waited_for() -> None:
    """Though it is connected, and nobody else has the chunk."""
    late = LateChunks([2])
    with (
        serving(late) as slow,
        serving(HeldChunks([0])) as quick,
        looking(at(slow, quick)) as lookup,
    ):
        once_dialled(lambda: exist(lookup, [0, 1, 2]) == [True, False, True])
        late.is_late, started = True, time.monotonic()
        assert exist(lookup, [0, 1, 2], 10.0) == [True, False, False]
        assert time.monotonic() - started < 5.0
        late.gate.set()


class CountedTopology(PeerTopology):
    num_connected = 0

    def connect(self, node: Node, max_bytes: int) -> Client:
        self.num_connected += 1
        return super().connect(node, max_bytes)


def test_whom_nobody_waits_for_stays_connected() -> None:
    """The answer is there with the first peer that has everything; the others' come later."""
    with ExitStack() as stack:
        servers = [stack.enter_context(serving(HeldChunks(range(8)))) for _ in range(4)]
        parsed = [Address.parse(each) for each in at(*servers)]
        topology = CountedTopology(settings(), parsed, OWN, 0, time.monotonic)
        lookup = AnyLookup({Tier.PEER: PeerLookup(settings(), [PARTS], topology)}, time.monotonic)
        stack.callback(lookup.close)
        for _ in range(40):
            exist(lookup, range(8))
        assert exist(lookup, range(9)) == [True] * 8 + [False]
        assert topology.num_connected == 4


@pytest.mark.parametrize(
    "text",
    ["", ":1", "host", "host:0", "host:65536", "host:1x", "::1:7450", "a b:1", "dns:x", "-a:1"],
)
def test_impossible_addresses(text: str) -> None:
    with pytest.raises(ValueError, match=r"must be|brackets"):
        Address.parse(text, may_be_dns=True)


@pytest.mark.parametrize(
    ("text", "address", "is_loopback"),
    [
        ("127.0.0.1:7450", Address("127.0.0.1", 7450), True),
        ("[::1]:7450", Address("::1", 7450), True),
        ("localhost:1", Address("localhost", 1), True),
        ("dns:peers.svc:7450", Address("peers.svc", 7450, is_dns=True), False),
    ],
)
def test_addresses(text: str, address: Address, is_loopback: bool) -> None:
    found = Address.parse(text, may_be_dns=True)
    assert (found, str(found), found.is_loopback) == (address, text, is_loopback)
