"""LMCache's own CPU tier, told by the ledger what to evict: the bytes of what is kept are right."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

import pytest
import torch
from lmcache.v1 import memory_management

from lmcache_connector.copy_kv_blocks.copier import Copier, make_copier
from lmcache_connector.errors import ConfigError
from lmcache_connector.kv_parts.owners import Owners
from lmcache_connector.peers.tier import PeerTier
from lmcache_connector.plans import (
    Claim,
    Fetched,
    LoadJob,
    PartRun,
    PeerSource,
    PrefixUse,
    StoreJob,
)
from lmcache_connector.storage.geometry import ChunkGeometry, PartGeometries
from lmcache_connector.storage.redis.config import RedisTierConfig
from lmcache_connector.storage.redis.tier import RedisTier
from lmcache_connector.worker.lmcache_engine import LMCacheEngineAdapter
from lmcache_connector.worker.lmcache_start import RankSettings
from lmcache_connector.worker.paged_part import PagedPart
from lmcache_connector.worker.rank_tiers import by_tier
from tests.support.integrity import empty
from tests.support.jobs import at_once, one_part, tier_config
from tests.support.redis.servers import Server

GEOMETRY = ChunkGeometry(64, 0, (2048,) * 2, (0, 1), 2, "uint8")  # half a MiB a chunk
CAPACITY = 20  # chunks
NUM_BLOCKS = 16
MINE, CROWD = Claim(b"mine"), Claim(b"crowd")


def key(prompt: int, chunk: int) -> bytes:
    return bytes([chunk, prompt, 1]) + bytes(29)


@lru_cache
def one_copier() -> Copier:
    """For all engines: making one takes a second."""
    return make_copier(torch.device("cpu"))


@dataclass
class Rank:
    """An engine whose paged cache holds one prompt at a time, alone or over a Redis."""

    redis: RedisTier | None = None
    peers: PeerTier | None = None
    shares_memory: bool = False
    rank: int = 0
    owners: Owners | None = None
    cache: torch.Tensor = field(init=False)
    engine: LMCacheEngineAdapter = field(init=False)
    num_jobs: int = 0
    fetched: tuple[Fetched, ...] = ()
    num_bytes: int = 0  # of the last load
    copy_seconds: float = 0.0  # of the last load

    def __post_init__(self) -> None:
        self.cache = torch.zeros((2, NUM_BLOCKS, 2, 64, 2048), dtype=torch.uint8)
        caches = {f"layers.{i}": self.cache[i] for i in range(2)}
        self.part = PagedPart.from_kv_caches(one_part(GEOMETRY, 64)[0], 0, caches)
        rank_gib = CAPACITY * GEOMETRY.chunk_bytes / 2**30
        shares = {"tenant_share": 0.5, "pin_share": 0.5, "host_sharing": self.shares_memory}
        config = tier_config(rank_gib, **shares)
        settings = RankSettings(config, self.rank, 2 if self.owners else 1, self.owners)
        self.engine = LMCacheEngineAdapter(
            settings, [self.part], one_copier(), self.redis, self.peers
        )

    def store(self, prompt: int, claim: Claim, num_chunks: int = 4) -> None:
        self.num_jobs += 1
        for chunk in range(num_chunks):
            self.cache[:, chunk] = 10 * prompt + chunk
        job = StoreJob(self.num_jobs, "r", (run_of(prompt, num_chunks),), claim=claim)
        self.engine.store(job, at_once(job))

    def load(
        self,
        prompt: int,
        claim: Claim,
        num_chunks: int = 4,
        *,
        may_fetch: bool = False,
        source: PeerSource | None = None,
        is_cancelled: bool = False,
    ) -> int:
        """How many leading chunks came back, all of them as they were stored."""
        self.num_jobs += 1
        self.cache.zero_()
        run = run_of(prompt, num_chunks)
        may_fetch |= source is not None
        job = LoadJob(self.num_jobs, "r", (run,), 10.0, may_fetch, 0, claim=claim, source=source)
        queued = at_once(job)
        if is_cancelled:
            queued.cancelled.set()
        moved = self.engine.load(job, queued)
        self.fetched = tuple(by_tier([fetched for each in moved for fetched in each.fetched]))
        count = sum(each.num_chunks for each in moved)
        self.num_bytes = sum(each.num_bytes for each in moved)
        self.copy_seconds = sum(each.copy_seconds for each in moved)
        for chunk in range(count):
            assert (self.cache[:, chunk] == 10 * prompt + chunk).all()
        return count

    def flood(self, first_prompt: int, claim: Claim = CROWD) -> None:
        for i in range(CAPACITY):
            self.store(first_prompt + i, claim, 2)

    def check(self) -> None:
        """The ledger and the tier agree."""
        held = self.engine.cpu.ledger.holdings()
        assert len(self.engine.cpu.ledger._chunks) == self.engine.cpu.num_chunks
        assert sum(n for _, n in held.tenant_bytes) == self.engine.cpu.used_bytes


def run_of(prompt: int, num_chunks: int) -> PartRun:
    keys = tuple(key(prompt, i) for i in range(num_chunks))
    blocks = tuple(range(num_chunks))
    return PartRun(0, keys, blocks, (blocks,), parents=(b"", *keys[:-1]))


@pytest.fixture
def rank() -> Iterator[Rank]:
    rank = Rank()
    yield rank
    rank.check()
    rank.engine.close(0.0)


def test_the_engines_step_waits_for_no_lane(rank: Rank) -> None:
    """A lane may walk through a long prompt meanwhile, or look for something to evict."""
    rank.store(1, CROWD)

    def step() -> None:
        rank.engine.cpu.note([PrefixUse(Claim(b"crowd", pin=True), (key(1, 3),))])
        rank.engine.cpu.ledger.holdings()

    with rank.engine.cpu._backend.cpu_lock:
        thread = threading.Thread(target=step, daemon=True)
        thread.start()
        thread.join(10.0)
        assert not thread.is_alive()
    rank.flood(2)
    assert rank.load(1, CROWD) == 4


def test_a_tenant_keeps_its_half_beside_a_load_of_more(valkey: Server) -> None:
    """From Redis, in pieces: those that have come are the tenant's at once."""
    config = RedisTierConfig(url=f"redis://127.0.0.1:{valkey.port}")
    rank = Rank(RedisTier(config, PartGeometries((GEOMETRY,))))
    rank.store(1, CROWD, NUM_BLOCKS)
    assert rank.redis is not None
    assert rank.redis.flush(30.0)
    empty(rank.engine)
    for prompt in (2, 3):
        rank.store(prompt, MINE)
    assert rank.redis.flush(30.0)
    assert rank.load(1, CROWD, NUM_BLOCKS, may_fetch=True) == NUM_BLOCKS
    assert [rank.load(prompt, MINE) for prompt in (2, 3)] == [4, 4]
    assert rank.load(1, CROWD, CAPACITY // 2) == CAPACITY // 2  # its end has made room
    rank.check()
    rank.engine.close(0.0)


@pytest.mark.parametrize(
    ("rank_gib", "overrides", "said"),
    [
        pytest.param(
            2.0**18, {}, r"CPU tier of .* GiB per rank, from cpu_gib: .*memory", id="no-memory"
        ),
        pytest.param(
            0.01,
            {"lmcache_hugepages": True},
            r"from cpu_gib and lmcache\.local_cpu_use_hugepages: mmap failed",
            id="no-pages",
        ),
    ],
)
def test_what_lmcache_cannot_allocate_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, rank_gib: float, overrides: dict[str, bool], said: str
) -> None:
    def no_pages(*_: object, **__: object) -> int:
        raise RuntimeError("mmap failed")

    monkeypatch.setattr(memory_management.device_ops, "alloc_hugepage_pinned_ptr", no_pages)
    settings = RankSettings(tier_config(rank_gib, **overrides))
    caches = {f"layers.{i}": torch.zeros((2, 2, 64, 2048), dtype=torch.uint8) for i in range(2)}
    part = PagedPart.from_kv_caches(one_part(GEOMETRY, 64)[0], 0, caches)
    with pytest.raises(ConfigError, match=said):
        LMCacheEngineAdapter(settings, [part], make_copier(torch.device("cpu")), None)
