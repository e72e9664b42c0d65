"""The start-up self-test: a pattern goes through store and load, and must come back byte for byte.

Every part of the model takes its turn, in all its KV cache groups at once. It runs before vLLM
serves anything, on the real paged cache, and leaves it as it was.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lmcache_connector.kv_layout.paged_cache import PagedLayout
from lmcache_connector.kv_parts.part import part_key
from lmcache_connector.plans import LoadJob, PartRun, StoreJob
from lmcache_connector.worker.lmcache_engine import LMCacheEngineAdapter
from lmcache_connector.worker.paged_part import PagedPart
from lmcache_connector.worker.waiting_jobs import StepGate

_KEY = b"\0" * 31 + b"\1"  # no BLAKE3 output anyone will meet
_DEADLINE_SECONDS = 60.0


class SelfTestError(RuntimeError):
    """What was loaded is not what was stored."""


@dataclass(frozen=True, slots=True)
class SelfTestResult:
    """``num_bytes`` went each way, in so many seconds, over all parts."""

    num_bytes: int
    store_seconds: float
    load_seconds: float


def run_self_test(
    engine: LMCacheEngineAdapter, parts: Sequence[PagedPart], clock: Callable[[], float]
) -> SelfTestResult | None:
    """Store, load and compare what a chunk has of each part.

    Returns ``None`` if the cache is smaller than a chunk. Raises :class:`SelfTestError` if that
    cannot be stored and loaded, or comes back with other bytes.
    """
    trials = [_Trial.of(engine, parts, number, clock) for number in range(len(parts))]
    results = [trial.run() for trial in trials if trial is not None]
    if len(results) < len(parts):
        return None
    return SelfTestResult(
        sum(result.num_bytes for result in results),
        sum(result.store_seconds for result in results),
        sum(result.load_seconds for result in results),
    )


@dataclass(frozen=True, slots=True)
class _Trial:
    """One chunk of a part. The bytes of its blocks are lists over layers, as :meth:`read` returns
    them."""

    engine: LMCacheEngineAdapter
    part: PagedPart
    run_of_one: PartRun
    clock: Callable[[], float]

    @classmethod
    def of(
        cls,
        engine: LMCacheEngineAdapter,
        parts: Sequence[PagedPart],
        number: int,
        clock: Callable[[], float],
    ) -> _Trial | None:
        """``None`` if the cache has too few blocks."""
        part = parts[number]
        per_chunk, num_blocks = part.blocks_per_chunk, min(g.num_blocks for g in part.groups)
        if num_blocks < per_chunk * len(part.groups):
            return None
        # Last to first: an order no straight copy of neighbours would get right. No two groups have
        # a block in common.
        firsts = range(num_blocks - 1, -1, -per_chunk)[: len(part.groups)]
        block_ids = tuple(tuple(range(last, last - per_chunk, -1)) for last in firsts)
        key = part_key(_KEY, number, len(parts))
        return cls(engine, part, PartRun(number, (key,), (0,), block_ids), clock)

    def run(self) -> SelfTestResult:
        (key,) = self.run_of_one.keys
        before = self.read()
        pattern = [torch.randint(0, 256, layer.shape, dtype=torch.uint8) for layer in before]
        try:
            # The first trip touches memory and compiles; the second is what transfers will cost.
            self.round_trip(pattern)
            self.engine.forget(key)
            return self.round_trip(pattern)
        finally:
            self.write(before)
            self.engine.forget(key)
            self.engine.drop_events()

    def round_trip(self, pattern: Sequence[torch.Tensor]) -> SelfTestResult:
        self.write(pattern)
        never, started = threading.Event(), self.clock()
        store = StoreJob(0, "self-test", (self.run_of_one,), redis_keys=frozenset())
        stored = self.engine.store(store, self.engine.fence(), never, StepGate())
        store_seconds = self.clock() - started
        self.write([torch.zeros_like(layer) for layer in pattern])
        started = self.clock()
        load = LoadJob(0, "self-test", (self.run_of_one,), _DEADLINE_SECONDS, False, 0)
        fence, deadline = self.engine.fence(), started + _DEADLINE_SECONDS
        loaded = self.engine.load(load, fence, never, deadline)
        load_seconds = self.clock() - started
        if stored.num_chunks != 1 or loaded.num_chunks != 1:
            raise SelfTestError("the self-test could not store and load one chunk: raise cpu_gib")
        names = [name for group in self.part.groups for name in group.names]
        for name, found, wanted in zip(names, self.read(), pattern, strict=True):
            if not torch.equal(found, wanted):
                raise SelfTestError(
                    f"the self-test loaded other bytes than it stored in layer {name}; "
                    "refusing to start, please report this with your model and vLLM command line"
                )
        return SelfTestResult(stored.num_bytes, store_seconds, load_seconds)

    def read(self) -> list[torch.Tensor]:
        """uint8 ``[rows, heads, tokens, content bytes]`` of each layer, on the CPU."""
        return [
            layer[rows.to(layer.device)].contiguous().cpu().view(torch.uint8)
            for group, rows in self._groups()
            for layer in group.owners
        ]

    def write(self, layers: Sequence[torch.Tensor]) -> None:
        data = iter(layers)
        for group, rows in self._groups():
            for layer in group.owners:
                layer[rows.to(layer.device)] = next(data).view(layer.dtype).to(layer.device)

    def _groups(self) -> Iterator[tuple[PagedLayout, torch.Tensor]]:
        """Each group, and indices of the blocks in a layer's tensor there, several for each block
        where vLLM splits them."""
        for group, ids in zip(self.part.groups, self.run_of_one.block_ids, strict=True):
            block_ids = np.array(ids, np.int64)
            yield group, torch.from_numpy(group.rows(block_ids, group.row_tokens).index)
