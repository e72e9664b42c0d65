"""Two ranks that hold the same: each chunk is in the memory of one, and in the blocks of both."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from lmcache_connector.kv_parts.owners import Owners, Share
from lmcache_connector.lookup.chunk_index import ChunkIndex
from lmcache_connector.peers.commands import Greeting
from lmcache_connector.peers.host import HostFolder, HostSocket
from lmcache_connector.peers.tier import PeerTier
from lmcache_connector.peers.topology import PeerTopology
from lmcache_connector.storage.geometry import PartGeometries
from lmcache_connector.worker.self_test import store_sample
from tests.support.peers import CONFIG, name_of, serving
from tests.worker.test_what_is_kept import GEOMETRY, MINE, Rank, key

PARTS = PartGeometries((GEOMETRY,))
PAIR = Owners((((0, 1),),))


@dataclass
class Pair:
    """The ranks of one engine."""

    folder: HostFolder
    stack: ExitStack
    owners: Owners = PAIR
    ranks: list[Rank] = field(default_factory=list)
    tiers: list[PeerTier] = field(default_factory=list)
    servers: list[ExitStack] = field(default_factory=list)

    def start(self, rank: int) -> Rank:
        num_ranks = len(self.owners.alike[0][0])
        share, greeting = Share(rank, self.owners), Greeting(num_ranks, "pair")
        topology = PeerTopology(CONFIG, (), greeting, share, time.monotonic, self.folder)
        tier = PeerTier(CONFIG, PARTS, topology)
        made = Rank(None, tier, shares_memory=True, rank=rank, owners=self.owners)
        self.stack.callback(made.engine.close, 1.0)
        self.stack.callback(tier.close, 1.0)
        self.sample = store_sample(made.engine, [made.part])
        server = self.stack.enter_context(ExitStack())
        host_socket = HostSocket(self.folder, name_of("pair", rank, num_ranks))
        server.enter_context(
            serving(
                made.engine.cpu,
                ranks=(PARTS,) * num_ranks,
                rank=rank,
                engine_id="pair",
                host_socket=host_socket,
            )
        )
        self.ranks.append(made)
        self.tiers.append(tier)
        self.servers.append(server)
        return made

    def find(self) -> None:
        """Find which ranks each can read, as at start; then forget the sample."""
        for rank, tier in zip(self.ranks, self.tiers, strict=True):
            rank.engine.cpu.share.reads = tier.find_ranks(self.sample, threading.Event())
        for rank in self.ranks:
            for each in self.sample:
                rank.engine.cpu.forget(each)
            rank.engine.cpu.take_events()

    def store(self, prompt: int, num_chunks: int = 4) -> None:
        for rank in self.ranks:
            rank.store(prompt, MINE, num_chunks)

    def held(self) -> list[set[bytes]]:
        return [set(rank.engine.cpu.all_keys()) for rank in self.ranks]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with ExitStack() as stack:
        made = Pair(HostFolder(tmp_path / "host"), stack)
        for rank in range(2):
            made.start(rank)
        made.find()
        yield made


def test_each_chunk_is_in_one_memory_and_in_the_blocks_of_both(pair: Pair) -> None:
    assert [rank.engine.cpu.share.reads for rank in pair.ranks] == [{1}, {0}]
    pair.store(1)
    zero, one = pair.held()
    assert zero | one == {key(1, chunk) for chunk in range(4)}
    assert zero == {key(1, chunk) for chunk in (0, 2)}
    assert not zero & one
    used = [rank.engine.cpu.used_bytes for rank in pair.ranks]
    assert used == [2 * GEOMETRY.chunk_bytes] * 2
    for rank, tier in zip(pair.ranks, pair.tiers, strict=True):
        assert rank.load(1, MINE) == 4  # the bytes are compared there
        assert tier.num_mapped == 2
        assert rank.fetched == ()  # it counts as a load from the CPU tier
    assert pair.held() == [zero, one]
    assert [rank.engine.cpu.used_bytes for rank in pair.ranks] == used


def test_a_load_that_was_given_up_tells_nothing_of_other_ranks(pair: Pair) -> None:
    pair.store(1)
    for rank, own in zip(pair.ranks, ((0, 2), (1, 3)), strict=True):
        rank.engine.cpu.take_events()
        assert rank.load(1, MINE, is_cancelled=True) == 0
        told = {event.key for event in rank.engine.cpu.take_events()}
        assert told <= {key(1, number) for number in own}


def test_a_rank_that_cannot_read_stores_everything(tmp_path: Path) -> None:
    """The other rank has not started, and nobody waits for it for ever."""
    with ExitStack() as stack:
        pair = Pair(HostFolder(tmp_path / "host"), stack)
        rank = pair.start(0)
        given_up = threading.Event()
        given_up.set()
        rank.engine.cpu.share.reads = pair.tiers[0].find_ranks(pair.sample, given_up)
        assert rank.engine.cpu.share.reads == frozenset()
        rank.store(1, MINE)
        assert rank.engine.cpu.used_bytes == (4 + len(pair.sample)) * GEOMETRY.chunk_bytes


def test_a_rank_that_does_not_come_keeps_nobody_from_reading_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a rank on another host; here the first one by number."""
    with ExitStack() as stack:
        trio = Pair(HostFolder(tmp_path / "host"), stack, owners=Owners((((0, 1, 2),),)))
        for number in (1, 2):
            trio.start(number)
        looks, given_up = itertools.count(1), threading.Event()
        monkeypatch.setattr(given_up, "wait", lambda _: next(looks) == 20)
        found = trio.tiers[0].find_ranks(trio.sample, given_up)
        assert found == {2}


def test_what_cannot_be_read_any_more_is_stored_here(pair: Pair) -> None:
    """Or each request with that prompt would load it in vain and compute it again, for ever."""
    pair.store(1)
    pair.servers[1].close()
    loaded = []
    for _ in range(12):
        loaded.append(pair.ranks[0].load(1, MINE))
        if loaded[-1] < 4:  # computed again, and stored as what is computed is
            pair.store(1)
    assert loaded[-4:] == [4] * 4, loaded


def test_the_first_load_that_finds_nothing_is_the_last(pair: Pair) -> None:
    """Even if the rank that could not read had a copy of its own until then."""
    index = ChunkIndex(2)
    index.share(PAIR.needed([rank.engine.cpu.share.reads for rank in pair.ranks]), PAIR.numbers)
    pair.store(1)
    first, chunk = pair.ranks[0], key(1, 1)
    first.engine.cpu.share.reads = frozenset()  # as while its owner was away
    first.store(1, MINE)
    first.engine.cpu.share.reads = frozenset({1})
    for number, rank in enumerate(pair.ranks):
        index.apply(number, rank.engine.cpu.take_events())
    assert chunk in index
    first.engine.cpu.forget(chunk)
    pair.ranks[1].engine.cpu.forget(chunk)
    pair.ranks[1].engine.cpu.take_events()  # lost, or late
    assert first.load(1, MINE) == 1
    index.apply(0, first.engine.cpu.take_events())
    assert chunk not in index


def test_an_owner_that_answers_is_not_away(tmp_path: Path) -> None:
    """While a third rank, asked by the same load, has gone."""
    with ExitStack() as stack:
        trio = Pair(HostFolder(tmp_path / "host"), stack, owners=Owners((((0, 1, 2),),)))
        for number in range(3):
            trio.start(number)
        trio.find()
        trio.store(1, 6)
        tier, share = trio.tiers[0], trio.ranks[0].engine.cpu.share
        keys = [key(1, chunk) for chunk in range(6) if not share.is_owner(key(1, chunk))]
        assert {share.owner(each) for each in keys} == {1, 2}
        for each in keys:
            if share.owner(each) == 2:
                trio.ranks[2].engine.cpu.forget(each)
        trio.servers[1].close()
        until = time.monotonic() + 20.0
        while not tier.is_away(1):
            assert time.monotonic() < until
            buffers = [memoryview(bytearray(GEOMETRY.chunk_bytes)) for _ in keys]
            assert not any(tier.read_ranks(keys, buffers, time.monotonic() + 0.5))
        assert not tier.is_away(2)
