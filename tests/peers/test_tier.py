"""Chunks of peers: each read from a peer that has it, without a delay by peers that are away."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import pytest

from lmcache_connector.kv_parts.owners import Owners, Share
from lmcache_connector.lookup.any_lookup import AnyLookup
from lmcache_connector.net.address import Address
from lmcache_connector.net.deadline import Deadline
from lmcache_connector.net.wire import Wire, wait_readable
from lmcache_connector.peers import lookup as peer_lookup
from lmcache_connector.peers.commands import Commands, Greeting, Reply
from lmcache_connector.peers.lookup import PeerLookup
from lmcache_connector.peers.server import PeerServer
from lmcache_connector.peers.tier import PeerTier
from lmcache_connector.peers.topology import PeerTopology
from lmcache_connector.peers.watch import TransferWatch
from lmcache_connector.plans import PeerSource, Tier
from lmcache_connector.storage.geometry import PartGeometries
from lmcache_connector.storage.redis.client.circuit_breaker import CircuitState
from lmcache_connector.storage.redis.config import RedisTierConfig
from lmcache_connector.storage.redis.connections import Connections
from lmcache_connector.storage.redis.lookup import NodeLookup, RedisLookup, await_answers
from lmcache_connector.storage.redis.topology import Node
from lmcache_connector.storage.redis.value_readers import ReadResult, ValueReaders
from tests.support.clock import Clock
from tests.support.peers import HeldChunks, once_dialled, read, serving
from tests.support.redis.chunks import (
    GEOMETRY,
    PARTS,
    chunk_data,
    chunk_key,
    config,
    open_tier,
    put_all,
)
from tests.support.redis.proxies import HeldReplies
from tests.support.redis.servers import Server, free_ports

OWN = Greeting(1, "the-reader")


def settings(**more: object) -> RedisTierConfig:
    return config("redis://peers", **{"connect_timeout_seconds": 0.3} | more)


def topology_of(
    addresses: Sequence[str], greeting: Greeting = OWN, share: Share | None = None
) -> PeerTopology:
    parsed = [Address.parse(each, may_be_dns=True) for each in addresses]
    return PeerTopology(settings(), parsed, greeting, share or Share(0), time.monotonic)


def at(*servers: PeerServer | HeldReplies | int) -> list[str]:
    ports = [each if isinstance(each, int) else each.port for each in servers]
    return [f"127.0.0.1:{port}" for port in ports]


@contextmanager
def reading(
    addresses: Sequence[str],
    parts: PartGeometries = PARTS,
    share: Share | None = None,
    **more: object,
) -> Iterator[PeerTier]:
    tier = PeerTier(settings(**more), parts, topology_of(addresses, share=share))
    try:
        yield tier
    finally:
        assert tier.close(5.0)


def read_once_connected(tier: PeerTier, indices: Sequence[int]) -> ReadResult:
    """Reads until all are hits, while connections are being made."""
    done: list[ReadResult] = []

    def is_whole() -> bool:
        result, found = read(tier, indices)
        done[:] = [result]
        if all(result.hits):
            assert found == [chunk_data(i) for i in indices]
        return all(result.hits)

    once_dialled(is_whole)
    return done[0]


@pytest.mark.parametrize("num_peers", [0, 1, 2])
def test_chunks_that_no_peer_has_count_as_no_failure(num_peers: int) -> None:
    """Otherwise the cost model would take the peers for stalled, and not use them for a while."""
    with ExitStack() as stack:
        servers = [stack.enter_context(serving(HeldChunks([0]))) for _ in range(num_peers)]
        tier = stack.enter_context(reading(at(*servers)))
        if servers:
            read_once_connected(tier, [0])
        for indices in ([1], [0, 1]):
            result, _ = read(tier, indices)
            assert result.hits == [bool(servers) and i == 0 for i in indices]
            assert not result.cut_off


def test_only_chunks_that_a_peer_has_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller copies into the paged cache what it is told of."""
    with (
        serving(HeldChunks([0, 1])) as one,
        serving(HeldChunks([0])) as other,
        reading(at(one, other)) as tier,
    ):
        read_once_connected(tier, [0, 1])
        buffers = [memoryview(bytearray(GEOMETRY.chunk_bytes)) for _ in range(3)]
        keys, arrived, readers = [chunk_key(i) for i in range(3)], list[int](), tier._readers

        def reading_on(*wanted: Any) -> ReadResult:
            """As if a reader thread were still busy when all chunks have arrived."""
            result = ValueReaders.read(readers, *wanted)
            wanted[-1](len(wanted[0]))
            return result

        monkeypatch.setattr(readers, "read", reading_on)
        result = tier.read(keys, buffers, time.monotonic() + 10.0, on_arrival=arrived.append)
        assert result.hits == [True, True, False]
        assert arrived[-1] == 2


def test_the_only_peer_of_a_model_with_several_parts_is_read_without_a_look_up() -> None:
    indices = [i for i in range(2000) if chunk_key(i)[-1] < 2][:4]  # the key names its part
    share = Share(0, Owners((((0,),), ((0,),))))
    with serving(HeldChunks(indices)) as server, reading(at(server), share=share) as tier:
        assert read_once_connected(tier, indices).hits == [True] * 4
        assert read(tier, [])[0].hits == []


def test_a_read_waits_for_the_look_up_of_another_until_its_deadline() -> None:
    with (
        serving(HeldChunks([0])) as one,
        serving(HeldChunks([0])) as other,
        reading(at(one, other)) as tier,
    ):
        read_once_connected(tier, [0])
        buffer = memoryview(bytearray(GEOMETRY.chunk_bytes))
        results = list[ReadResult]()

        def read_in_time() -> None:
            results.append(tier.read([chunk_key(0)], [buffer], time.monotonic() + 0.2))

        reader = threading.Thread(target=read_in_time)
        with tier._asking:
            reader.start()
            reader.join(10.0)
            assert [result.hits for result in results] == [[False]]
        reader.join()
        assert read(tier, [0])[0].hits == [True]


def silent_server() -> socket.socket:
    """Accepts connections and never replies, like a stopped process."""
    return socket.create_server(("127.0.0.1", 0), backlog=64)


@pytest.mark.parametrize("trouble", ["nobody", "silent", "other ranks", "itself"])
def test_a_peer_in_trouble_delays_nobody(trouble: str) -> None:
    """Chunks of another peer are hits; the circuit of the one in trouble opens."""
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
        if trouble == "itself":  # it is not its own peer
            once_dialled(lambda: at(bad)[0] in tier._topology._own)
        else:
            once_dialled(lambda: dict(tier._servers.states()).get(at(bad)[0]) is CircuitState.OPEN)
        assert read(tier, range(4))[0].hits == [True] * 4
        assert read(tier, [4])[0].hits == [False]  # another rank has other heads


def test_a_dns_name_is_resolved() -> None:
    """An unknown name keeps no other address out."""
    with serving(HeldChunks(range(2))) as server:
        port = server.port
        topology = topology_of([f"dns:localhost:{port}", f"dns:nobody.invalid:{port}"])
        topology.prepare()
        assert f"127.0.0.1:{port}" in topology.nodes()
        assert all(str(port) in node for node in topology.nodes())
        assert topology.is_current()


# -- lookups ------------------------------------------------------------------------------------


def exist(lookup: AnyLookup, indices: Sequence[int], seconds: float = 0.1) -> list[bool]:
    keys, found = [chunk_key(i) for i in indices], list[bool]()

    def finds_any() -> bool:
        lookup.maintain()
        places = lookup.find(keys, time.monotonic() + seconds)
        found[:] = [key in places for key in keys]
        return any(found)

    once_dialled(finds_any)
    return found


@contextmanager
def looking(addresses: Sequence[str], url: str = "") -> Iterator[AnyLookup]:
    peers = PeerLookup(settings(), [PARTS], topology_of(addresses))
    redis = {Tier.REDIS: RedisLookup(config(url), [PARTS])} if url else {}
    with closing(AnyLookup({Tier.PEER: peers, **redis}, time.monotonic)) as lookup:
        yield lookup


def test_peers_and_redis_are_asked_together(valkey: Server) -> None:
    with open_tier(valkey.url) as tier:
        assert all(put_all(tier, [4, 5]))
    held = HeldChunks([0, 1]), HeldChunks([1, 2])
    with (
        serving(held[0]) as one,
        serving(held[1]) as two,
        looking(at(one, two), valkey.url) as lookup,
    ):
        once_dialled(lambda: exist(lookup, [0]) + exist(lookup, [2]) == [True, True])
        assert exist(lookup, range(7)) == [True, True, True, False, True, True, False]
        assert lookup.absent == chunk_key(0), "Redis itself lacks it"


def test_peers_do_not_answer_for_a_redis_that_is_away() -> None:
    away = f"redis://127.0.0.1:{free_ports(1)}"
    with serving(HeldChunks([0])) as server, looking(at(server), away) as lookup:
        assert exist(lookup, [0, 1]) == [True, False]
        assert lookup.absent is None


@pytest.mark.parametrize("said", [b"+111", b"+12", b"+1x", b":1", b"+", b"-ERR no", b"$2"])
def test_a_malformed_reply_misses_and_opens_the_circuit(said: bytes) -> None:
    with (
        patch.object(Commands, "_holds", lambda *_: Reply((said, b"\r\n"))),
        serving(HeldChunks([0, 1])) as liar,
        closing(
            PeerLookup(settings(), [PARTS], topology_of(at(liar)), connect_share=1.0)
        ) as lookup,
    ):
        keys = [chunk_key(0), chunk_key(1)]
        for _ in range(3):
            assert lookup.exist(keys, time.monotonic() + 1.0) == [False, False]
        assert dict(lookup.servers())[at(liar)[0]] is CircuitState.OPEN


@contextmanager
def late_peer(indices: Sequence[int]) -> Iterator[HeldReplies]:
    with serving(HeldChunks(indices)) as server, HeldReplies(server.port) as late:
        yield late


def test_a_look_up_does_not_wait_for_a_late_peer() -> None:
    """Although it is connected, and no other peer has the chunk."""
    with (
        late_peer([2]) as late,
        serving(HeldChunks([0])) as quick,
        looking(at(late, quick)) as lookup,
    ):
        once_dialled(lambda: exist(lookup, [0, 1, 2]) == [True, False, True])
        late.is_holding = True
        started = time.monotonic()
        assert exist(lookup, [0, 1, 2], 10.0) == [True, False, False]
        assert time.monotonic() - started < 5.0


@dataclass
class LateLookup:
    """Asks one peer that holds chunks 1, 2 and 4, two per command. Its clock is the test's."""

    peer: HeldReplies
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        topology = self.topology = topology_of(at(self.peer))
        self.lookup = PeerLookup(settings(), [PARTS], topology, self.clock, connect_share=1.0)
        once_dialled(lambda: self.finds([1, 3]) == [True, False])
        self.peer.is_holding = True

    def ask(self, indices: Sequence[int]) -> list[NodeLookup]:
        return self.lookup.ask([chunk_key(i) for i in indices], self.within(20.0))

    def leave(self, indices: Sequence[int]) -> Wire:
        """Ask, and do not wait for the answer."""
        (asked,) = self.ask(indices)
        await_answers([asked], self.within(-1.0))
        return asked.wire

    def finds(self, indices: Sequence[int], let: int = 0) -> list[bool]:
        """Whether the peer holds each. First let through ``let`` bytes of its held replies."""
        asked = self.ask(indices)
        if let:
            self.peer.let(let)
        await_answers(asked, self.within(20.0))
        return self.lookup.found([chunk_key(i) for i in indices], asked)

    def within(self, seconds: float) -> Deadline:
        return Deadline(time.monotonic() + seconds, time.monotonic)


@pytest.fixture
def late() -> Iterator[LateLookup]:
    with patch.object(peer_lookup, "MAX_ASKED", 2), late_peer([1, 2, 4]) as peer:
        late = LateLookup(peer)
        yield late
        late.lookup.close()


@pytest.mark.parametrize("comes", ["before", "while asked"])
def test_a_peer_answers_one_look_up_after_the_other(late: LateLookup, comes: str) -> None:
    """On one connection, wherever the stream of its answers is cut."""
    peers = late.topology.peers
    answers = len(b"+01\r\n+1\r\n+1\r\n"), len(b"+01\r\n+0\r\n")
    wires = set[Wire]()
    for cut in range(answers[0] + 1):
        wire = late.leave([0, 1, 2])
        wires |= {wire, late.leave([4])}

        def come(cut: int = cut, wire: Wire = wire) -> tuple[Node, ...]:
            late.peer.let(cut)
            assert not cut or wait_readable([wire], 20.0)
            return peers()

        if comes == "before":
            come()
            late.lookup.maintain()
        with patch.object(late.topology, "peers", come if comes == "while asked" else peers):
            (asked,) = late.ask([3, 4, 0])
        late.peer.let(sum(answers) - cut)
        await_answers([asked], late.within(20.0))
        assert late.lookup.found([chunk_key(i) for i in (3, 4, 0)], [asked]) == [False, True, False]
        wires.add(asked.wire)
    assert len(wires) == 1


def test_a_late_peer_is_asked_again_once_it_has_answered(late: LateLookup) -> None:
    wire, answer = late.leave([1]), len(b"+1\r\n")
    late.clock.now += 0.015
    late.leave([2])
    late.clock.now += 0.015
    assert not late.ask([4])
    late.peer.let(answer)
    assert wait_readable([wire], 20.0)
    late.leave([0])  # it owes the second answer for 15 ms only
    late.clock.now += 0.015
    assert not late.ask([4])
    late.peer.let(2 * answer)
    assert wait_readable([wire], 20.0)
    assert late.finds([3, 4], len(b"+01\r\n")) == [False, True]


def test_a_silent_peer_is_left_after_a_second(late: LateLookup) -> None:
    wire = late.leave([1])
    late.clock.now += 0.9
    late.lookup.maintain()
    assert wire.fileno() >= 0
    late.clock.now += 0.2
    late.peer.is_holding = False
    late.lookup.maintain()
    assert wire.fileno() < 0
    once_dialled(lambda: late.finds([1, 3]) == [True, False])


@pytest.mark.parametrize("is_trial", [False, True])
def test_silence_counts_as_a_failure_if_a_request_has_asked(
    late: LateLookup, is_trial: bool
) -> None:
    for is_trial_too in (True, is_trial):
        (asked,) = late.ask([1])
        asked.is_trial = is_trial_too
    late.clock.now += 1.1
    drop = Connections.drop
    with patch.object(Connections, "drop", autospec=True, side_effect=drop) as dropped:
        late.lookup.maintain()
    assert [call.kwargs["blame"] for call in dropped.mock_calls] == [not is_trial]


def test_a_look_up_without_time_costs_no_connection(late: LateLookup) -> None:
    wire = late.leave([1])
    assert not late.lookup.ask([chunk_key(1)], late.within(-1.0))
    assert late.leave([2]) is wire


def test_a_connection_that_breaks_takes_its_answers_along(late: LateLookup) -> None:
    wire = late.leave([0, 1, 2])
    late.leave([4])
    late.peer.let(len(b"+0"))
    late.peer.cut()
    late.peer.is_holding = False
    late.clock.now += 0.1
    once_dialled(lambda: late.finds([2, 3]) == [True, False])
    assert wire.fileno() < 0


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


# -- replicated KV heads, whose chunks have an owner each ----------------------------------------

PAIR = Owners((((0, 1),),))
HEAD = replace(GEOMETRY, shards=(0,), num_shards_total=1)
ONE_HEAD = PartGeometries((HEAD,))
SHARES = [Share(rank, PAIR) for rank in range(2)]


@contextmanager
def a_pair(indices: Sequence[int]) -> Iterator[str]:
    """The address of an engine of two ranks, each with the chunks that it owns."""
    port = free_ports(2)
    with ExitStack() as stack:
        for rank, share in enumerate(SHARES):
            held = HeldChunks([i for i in indices if share.is_owner(chunk_key(i))], ONE_HEAD)
            assert 0 < len(held.data) < len(indices)
            held.elsewhere = {chunk_key(i) for i in range(99)} - {
                chunk_key(i) for i in range(99) if share.is_owner(chunk_key(i))
            }
            serves = {"ranks": (ONE_HEAD, ONE_HEAD), "rank": rank, "engine_id": "pair"}
            stack.enter_context(serving(held, port=port + rank, **serves))  # type: ignore[arg-type]
        yield f"127.0.0.1:{port}"


def read_heads(tier: PeerTier, count: int, source: PeerSource | None = None) -> list[bool]:
    """The hits among the first ``count`` chunks."""
    buffers = [bytearray(HEAD.chunk_bytes) for _ in range(count)]
    keys, views = [chunk_key(i) for i in range(count)], [memoryview(b) for b in buffers]
    hits = tier.read(keys, views, time.monotonic() + 5.0, source=source).hits
    for index, (hit, buffer) in enumerate(zip(hits, buffers, strict=True)):
        assert not hit or buffer == chunk_data(index, HEAD)
    return hits


def test_the_owner_is_asked_for_a_chunk() -> None:
    with a_pair(range(8)) as address:
        topology = topology_of([address], Greeting(2, "the reader"), SHARES[0])
        lookup = PeerLookup(settings(), [ONE_HEAD] * 2, topology, connect_share=1.0)
        keys, found = [chunk_key(i) for i in range(12)], list[bool]()

        def is_whole() -> bool:
            found[:] = lookup.exist(keys, time.monotonic() + 5.0)
            return all(found[:8])

        with closing(lookup):
            once_dialled(is_whole)
            assert found == [True] * 8 + [False] * 4


def test_an_engine_of_one_rank_reads_from_the_owners_of_two() -> None:
    with a_pair(range(8)) as address:
        host, _, port = address.partition(":")
        source = PeerSource(host, int(port), 2, is_trusted=True)
        with reading([], ONE_HEAD) as tier:
            once_dialled(lambda: read_heads(tier, 8, source) == [True] * 8)


def test_all_ranks_are_asked_what_an_engine_holds() -> None:
    with a_pair(range(8)) as address:
        keys = [chunk_key(i) for i in range(12)]
        with closing(TransferWatch(settings(connect_timeout_seconds=1.0), "reader")) as watch:
            awaited = watch.ask(Address.parse(address), "", 60.0, keys)
            assert awaited.wait(10.0)
            assert awaited.value is not None
            assert [awaited.value.holds(key) for key in keys] == [True] * 8 + [False] * 4
