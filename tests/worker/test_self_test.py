"""The self-test measures both ways, leaves the cache as it was, and notices a wrong byte."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from lmcache_connector.config.tiered import parse_config
from lmcache_connector.copy_kv_blocks.copier import Copier, Direction, QueuedCopy, make_copier
from lmcache_connector.storage.geometry import ChunkGeometry, PartGeometries
from lmcache_connector.worker.build import banner
from lmcache_connector.worker.lmcache_engine import LMCacheEngineAdapter
from lmcache_connector.worker.lmcache_start import RankSettings
from lmcache_connector.worker.paged_part import PagedPart
from lmcache_connector.worker.self_test import SelfTestError, SelfTestResult, run_self_test
from tests.support.jobs import one_part, tier_config

LAYERS, HEADS, BLOCK_SIZE, CONTENT, CHUNK, NUM_BLOCKS = 2, 2, 32, 48, 64, 5
GEOMETRY = ChunkGeometry(CHUNK, 0, (CONTENT,) * LAYERS, tuple(range(HEADS)), HEADS, "uint8")


def make_cache(kernel_tokens: int, num_blocks: int = NUM_BLOCKS) -> PagedPart:
    """Blocks of 32 tokens, which an attention backend may split."""
    shape = (num_blocks * BLOCK_SIZE // kernel_tokens, HEADS, kernel_tokens, CONTENT)
    caches = {f"layers.{i}": torch.randint(0, 256, shape, dtype=torch.uint8) for i in range(LAYERS)}
    return PagedPart.from_kv_caches(one_part(GEOMETRY, BLOCK_SIZE)[0], 0, caches)


@dataclass
class CountingCopier:
    """Counts fences, and keeps which one each copy waits for."""

    inner: Copier
    num_fences: int = 0
    num_in_step: int = 0
    waited_for: list[Any] = field(default_factory=list)
    shares_cores: bool = True
    is_sound: bool = True

    def fence(self) -> Any:
        self.num_fences += 1
        return self.num_fences

    def copy(self, copies: Any, direction: Direction, after: Any = None) -> int:
        self.waited_for.append(after)
        return self.inner.copy(copies, direction)

    def enqueue(self, copies: Any) -> QueuedCopy:
        self.num_in_step += 1
        return self.inner.enqueue(copies if self.is_sound else copies[:0])

    def close(self) -> None:
        self.inner.close()


@pytest.fixture(scope="module")
def copier() -> Copier:
    return make_copier(torch.device("cpu"))


@pytest.fixture
def engines(copier: Copier) -> Iterator[list[LMCacheEngineAdapter]]:
    """Engines to close."""
    made: list[LMCacheEngineAdapter] = []
    yield made
    for engine in made:
        engine.close(0.0)


def make_engine(part: PagedPart, copier: Copier) -> LMCacheEngineAdapter:
    settings = RankSettings(tier_config(0.01))
    return LMCacheEngineAdapter(settings, [part], copier, None)


@pytest.mark.parametrize("kernel_tokens", [BLOCK_SIZE, 16, 8])
def test_the_cache_is_left_as_it_was(
    copier: Copier, engines: list[LMCacheEngineAdapter], kernel_tokens: int
) -> None:
    part = make_cache(kernel_tokens)
    before = [layer.clone() for layer in part.groups[0].owners]
    engines.append(make_engine(part, copier))
    result = run_self_test(engines[0], [part], time.monotonic, in_step=True)
    assert result is not None
    assert result.num_bytes == GEOMETRY.chunk_bytes
    assert all(torch.equal(a, b) for a, b in zip(part.groups[0].owners, before, strict=True))
    assert engines[0].cpu.num_chunks == 0
    assert engines[0].cpu.take_events() == ()


def test_copies_wait_for_what_the_test_has_written(
    copier: Copier, engines: list[LMCacheEngineAdapter]
) -> None:
    """On CUDA it has only been queued by then."""
    counting, part = CountingCopier(copier), make_cache(BLOCK_SIZE)
    engines.append(make_engine(part, counting))
    run_self_test(engines[0], [part], time.monotonic, in_step=True)
    assert counting.waited_for == [1, 2, 3, 4]  # each for the newest fence
    assert counting.num_in_step == 1


def test_other_bytes_stop_the_start(copier: Copier, engines: list[LMCacheEngineAdapter]) -> None:
    """The engine moves another cache than the one that is looked at."""
    engines.append(make_engine(make_cache(BLOCK_SIZE), copier))
    with pytest.raises(SelfTestError, match=r"other bytes than it stored in layer layers\.0"):
        run_self_test(engines[0], [make_cache(BLOCK_SIZE)], time.monotonic, in_step=True)


def test_layers_that_share_memory_stop_the_start(
    copier: Copier, engines: list[LMCacheEngineAdapter]
) -> None:
    layer = torch.zeros((NUM_BLOCKS, HEADS, BLOCK_SIZE, CONTENT), dtype=torch.uint8)
    caches = {f"layers.{i}": layer for i in range(LAYERS)}
    part = PagedPart.from_kv_caches(one_part(GEOMETRY, BLOCK_SIZE)[0], 0, caches)
    engines.append(make_engine(part, copier))
    with pytest.raises(SelfTestError, match=r"other bytes than it stored in layer layers\.0"):
        run_self_test(engines[0], [part], time.monotonic, in_step=True)


def test_a_load_inside_a_step_is_tested_too(
    copier: Copier, engines: list[LMCacheEngineAdapter]
) -> None:
    counting, part = CountingCopier(copier, is_sound=False), make_cache(BLOCK_SIZE)
    engines.append(make_engine(part, counting))
    with pytest.raises(SelfTestError, match=r"other bytes than it stored in layer layers\.0"):
        run_self_test(engines[0], [part], time.monotonic, in_step=True)
    assert run_self_test(engines[0], [part], time.monotonic, in_step=False) is not None


def test_a_self_test_quicker_than_the_clock_ends_no_start() -> None:
    config = parse_config({"cpu_gib": 1})
    result = SelfTestResult(num_bytes=1 << 20, store_seconds=0.0, load_seconds=0.5)
    line = banner(config, "0" * 64, PartGeometries((GEOMETRY,)), result)
    assert "self-test passed" in line
    assert "load 0.0 GB/s" in line
