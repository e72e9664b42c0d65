"""Loads from an instance that a request names: the bytes of one engine in the blocks of another."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from lmcache_connector.kv_parts.owners import Share
from lmcache_connector.peers.commands import Greeting
from lmcache_connector.peers.server import PeerServer
from lmcache_connector.peers.tier import PeerTier
from lmcache_connector.peers.topology import PeerTopology
from lmcache_connector.plans import PeerSource, Tier
from lmcache_connector.storage.geometry import PartGeometries
from lmcache_connector.storage.redis import pending_read
from lmcache_connector.storage.redis.config import RedisTierConfig
from lmcache_connector.storage.redis.pending_read import PendingRead, ValueRequest
from lmcache_connector.storage.redis.tier import RedisTier
from lmcache_connector.worker import lmcache_engine
from tests.support.clock import within
from tests.support.peers import serving
from tests.support.redis.servers import Server, free_ports
from tests.worker.test_what_is_kept import GEOMETRY, MINE, Rank, key, one_copier

PARTS = PartGeometries((GEOMETRY,))


@contextmanager
def two() -> Iterator[tuple[Rank, Rank, PeerServer]]:
    """One that serves what it has, and one that has no peers of its own."""
    settings = RedisTierConfig(url="redis://peers")
    topology = PeerTopology(settings, (), Greeting(1, "reader"), Share(0), time.monotonic)
    tier = PeerTier(settings, PARTS, topology)
    first, second = Rank(), Rank(peers=tier)
    try:
        with serving(first.engine.cpu, ranks=(PARTS,)) as server:
            yield first, second, server
    finally:
        assert tier.close(5.0)
        for rank in (first, second):
            rank.engine.close(1.0)


@pytest.mark.parametrize("is_trusted", [True, False])
def test_what_a_stranger_sends_is_not_kept(is_trusted: bool) -> None:
    with two() as (first, second, server):
        first.store(1, MINE)
        source = PeerSource("127.0.0.1", server.port, 1, is_trusted)
        assert second.load(1, MINE, source=source) == 4  # the bytes are compared there
        assert [(f.tier, f.num_bytes) for f in second.fetched] == [
            (Tier.PEER, 4 * GEOMETRY.chunk_bytes)
        ]
        kept = 4 if is_trusted else 0
        assert second.engine.cpu.num_chunks == kept
        assert second.engine.cpu.used_bytes == kept * GEOMETRY.chunk_bytes
        assert second.load(1, MINE) == kept


def test_chunks_that_the_source_lacks_are_misses() -> None:
    with two() as (first, second, server):
        first.store(1, MINE, 2)
        source = PeerSource("127.0.0.1", server.port, 1, is_trusted=False)
        assert second.load(1, MINE, source=source) == 2
        gone = PeerSource("127.0.0.1", free_ports(1), 1, is_trusted=True)
        assert second.load(2, MINE, source=gone) == 0
        assert second.engine.cpu.used_bytes == 0


def test_a_load_from_redis_tells_nothing_of_peers(valkey: Server) -> None:
    """This instance loads from peers that requests name, and has none of its own."""
    with two() as (_, second, _):
        writer = Rank(RedisTier(RedisTierConfig(url=valkey.url), PARTS))
        reader = Rank(RedisTier(RedisTierConfig(url=valkey.url), PARTS), second.peers)
        writer.store(1, MINE)
        writer.engine.close(5.0)
        assert within(10.0, lambda: reader.load(1, MINE, may_fetch=True) == 4)
        assert [(f.tier, f.has_failed) for f in reader.fetched if f.num_bytes or f.has_failed] == [
            (Tier.REDIS, False)
        ]
        reader.engine.close(1.0)


@pytest.mark.parametrize("num_own", [0, 1, 2])
def test_chunks_are_copied_while_others_come(monkeypatch: pytest.MonkeyPatch, num_own: int) -> None:
    """The last chunk counts as read only once the one before is in the paged cache."""
    monkeypatch.setattr(pending_read, "_ARRIVAL_BYTES", 1)
    monkeypatch.setattr(lmcache_engine, "_PIECE_SHARE", 1 / 2)
    settle, were_copied = PendingRead.settle, list[bool]()
    copy, directions = one_copier().copy, list[str]()

    def copying(copies: Any, direction: Any, after: Any = None) -> int:
        directions.append(direction)
        time.sleep(0.02)
        return copy(copies, direction, after)

    monkeypatch.setattr(one_copier(), "copy", copying)
    with two() as (first, second, server):

        def settling(self: PendingRead, request: ValueRequest) -> None:
            if request.chunk == 3 - num_own:
                were_copied.append(within(10.0, lambda: bool((second.cache[:, 2] == 12).all())))
            settle(self, request)

        first.store(1, MINE, 4)
        if num_own:
            second.store(1, MINE, num_own)
        monkeypatch.setattr(PendingRead, "settle", settling)
        source = PeerSource("127.0.0.1", server.port, 1, is_trusted=True)
        assert second.load(1, MINE, source=source) == 4
        assert were_copied == [True] * len(GEOMETRY.shards)
        assert second.num_bytes == 4 * GEOMETRY.chunk_bytes, "each once"
        assert second.copy_seconds >= 0.02 * directions.count("h2d") >= 0.04
        assert second.engine.cpu.num_chunks == 4


def test_nothing_behind_a_missing_chunk_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_read, "_ARRIVAL_BYTES", 1)
    monkeypatch.setattr(lmcache_engine, "_PIECE_SHARE", 1 / 2)
    with two() as (first, second, server):
        first.store(1, MINE, 4)
        first.engine.cpu.forget(key(1, 1))
        source = PeerSource("127.0.0.1", server.port, 1, is_trusted=True)
        assert second.load(1, MINE, source=source) == 1
        assert not second.cache[:, 1:].any()
