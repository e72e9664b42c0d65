"""Tests of a rank at start: of its own copies, and of reading other ranks' memory.

The self-test: a pattern must survive a store and a load byte for byte. Every part of the model is
tested, in all its KV cache groups at once, on the real paged cache. The test runs before vLLM
serves requests, and restores the cache. Until its first job, a rank that has KV in common with
other ranks of the engine keeps a sample in its CPU tier for them to read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from lmcache_connector.kv_layout.chunk_buffers import rows_of
from lmcache_connector.kv_layout.paged_cache import PagedLayout
from lmcache_connector.kv_parts.part import part_key
from lmcache_connector.plans import LoadJob, PartRun, StoreJob
from lmcache_connector.threads import Background, Task
from lmcache_connector.worker.job_queue import QueuedJob
from lmcache_connector.worker.lmcache_engine import LMCacheEngineAdapter, RunTransfer
from lmcache_connector.worker.paged_part import PagedPart

if TYPE_CHECKING:
    from lmcache_connector.peers.server import PeerServer
    from lmcache_connector.peers.tier import PeerTier

_KEY = b"\0" * 31 + b"\1"  # never a BLAKE3 output in practice
_DEADLINE_SECONDS = 60.0
_FIND_SECONDS = 5.0


class SelfTestError(RuntimeError):
    """A chunk could not be stored and loaded, or came back with other bytes."""


@dataclass(frozen=True, slots=True)
class SelfTestResult:
    """``num_bytes`` were copied in each direction, over all parts."""

    num_bytes: int
    store_seconds: float
    load_seconds: float


def run_self_test(
    engine: LMCacheEngineAdapter,
    parts: Sequence[PagedPart],
    clock: Callable[[], float],
    *,
    in_step: bool,
) -> SelfTestResult | None:
    """Store, load and compare a chunk of each part. ``in_step``: also load it as inside a step,
    where a device that has no memory left for the copy would end the engine.

    Returns ``None`` if the cache is too small for some part. Raises :class:`SelfTestError`.
    """
    trials = [_Trial.of(engine, parts, number, clock) for number in range(len(parts))]
    results = [trial.run(in_step=in_step) for trial in trials if trial is not None]
    if len(results) < len(parts):
        return None
    return SelfTestResult(
        sum(result.num_bytes for result in results),
        sum(result.store_seconds for result in results),
        sum(result.load_seconds for result in results),
    )


def store_sample(engine: LMCacheEngineAdapter, parts: Sequence[PagedPart]) -> tuple[bytes, ...]:
    """Store one chunk of each part with whatever the paged cache holds, so that other ranks can try
    to read from this one. Returns the chunks' keys."""
    trials = [_Trial.of(engine, parts, number, time.monotonic) for number in range(len(parts))]
    for trial in trials:
        if trial is not None:
            trial.store()
    engine.cpu.drop_events()
    return tuple(part_key(_KEY, number, len(parts)) for number in range(len(parts)))


@dataclass(frozen=True, slots=True)
class _Trial:
    """The test of one part's chunk. The bytes of its blocks are lists over layers: see
    :meth:`read`."""

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
        # In descending order, to catch copies that assume ascending blocks. No two groups share a
        # block.
        firsts = range(num_blocks - 1, -1, -per_chunk)[: len(part.groups)]
        block_ids = tuple(tuple(range(last, last - per_chunk, -1)) for last in firsts)
        key = part_key(_KEY, number, len(parts))
        return cls(engine, part, PartRun(number, (key,), (0,), block_ids), clock)

    def run(self, *, in_step: bool) -> SelfTestResult:
        (key,) = self.run_of_one.keys
        before = self.read()
        pattern = [torch.randint(0, 256, layer.shape, dtype=torch.uint8) for layer in before]
        try:
            # The first trip touches memory and compiles; only the second one's times are returned.
            self.round_trip(pattern)
            if in_step:
                self.write([torch.zeros_like(layer) for layer in pattern])
                queued = self.engine.load_in_step(self.load_job)
                try:
                    self.compare(pattern)  # reads behind the copy
                finally:
                    queued.release()
            self.engine.cpu.forget(key)
            return self.round_trip(pattern)
        finally:
            self.write(before)
            self.engine.cpu.forget(key)
            self.engine.cpu.drop_events()

    def round_trip(self, pattern: Sequence[torch.Tensor]) -> SelfTestResult:
        self.write(pattern)
        started = self.clock()
        stored = self.store()
        store_seconds = self.clock() - started
        self.write([torch.zeros_like(layer) for layer in pattern])
        started = self.clock()
        (loaded,) = self.engine.load(self.load_job, self._now(self.load_job))
        load_seconds = self.clock() - started
        if stored.num_chunks != 1 or loaded.num_chunks != 1:
            raise SelfTestError("the self-test could not store and load one chunk: raise cpu_gib")
        self.compare(pattern)
        return SelfTestResult(stored.num_bytes, store_seconds, load_seconds)

    def compare(self, pattern: Sequence[torch.Tensor]) -> None:
        names = [name for group in self.part.groups for name in group.names]
        for name, found, wanted in zip(names, self.read(), pattern, strict=True):
            if not torch.equal(found, wanted):
                raise SelfTestError(
                    f"the self-test loaded other bytes than it stored in layer {name}; "
                    "refusing to start, please report this with your model and vLLM command line"
                )

    @property
    def load_job(self) -> LoadJob:
        return LoadJob(0, "self-test", (self.run_of_one,), _DEADLINE_SECONDS, False, 0)

    def store(self) -> RunTransfer:
        job = StoreJob(0, "self-test", (self.run_of_one,), redis_keys=frozenset())
        (stored,) = self.engine.store(job, self._now(job))
        return stored

    def _now(self, job: LoadJob | StoreJob) -> QueuedJob:
        return QueuedJob(job, self.engine.copier.fence(), self.clock())

    def read(self) -> list[torch.Tensor]:
        """uint8 ``[rows, heads, tokens, content bytes]`` per layer, on the CPU."""
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
        """Each group with the rows of the blocks in its layers' tensors."""
        for group, ids in zip(self.part.groups, self.run_of_one.block_ids, strict=True):
            block_ids = np.array(ids, np.int64)
            yield group, torch.from_numpy(rows_of(group, block_ids, group.row_tokens).index)


class RankFinder:
    """Create before other ranks can reach this one: stores the sample, if some rank may read it.
    ``peers``: ``None`` if this rank reads from no other. Runs on the engine's step thread."""

    def __init__(
        self,
        engine: LMCacheEngineAdapter,
        parts: Sequence[PagedPart],
        peers: PeerTier | None,
        clock: Callable[[], float],
    ) -> None:
        can_read = engine.cpu.share.others and engine.cpu.memory is not None
        self._cpu, self._clock = engine.cpu, clock
        self._peers = peers if can_read else None
        self._is_given_up, self._thread = threading.Event(), Background("lmc-ranks")
        self._give_up_at = float("inf")
        self._found = Task[frozenset[int]]()
        self._found.settle(frozenset())
        self._sample = store_sample(engine, parts) if self._peers else ()

    def begin(self, server: PeerServer | None, *, loads: bool) -> None:
        """Start reading other ranks' samples; ``server`` serves this rank's. Without ``loads``,
        read nothing, and leave chunks that other ranks own to them."""
        if not loads:
            self._found.settle(self._cpu.share.others)
        if self._peers and server and server.has_host_socket:
            find = partial(self._peers.find_ranks, self._sample, self._is_given_up)
            self._found = self._thread.submit(find)

    def find(self) -> frozenset[int] | None:
        """The ranks whose memory this rank reads; ``None``: unknown so far. Poll in each step: all
        ranks have started when the first step comes, or will within seconds."""
        now = self._clock()
        self._give_up_at = min(self._give_up_at, now + _FIND_SECONDS)
        if now >= self._give_up_at:
            self._is_given_up.set()
        if not self._found.is_done:
            return None
        return self._found.value or frozenset()

    def forget_sample(self) -> None:
        """All ranks have started, as there are jobs: drop the sample."""
        for key in self._sample:
            self._cpu.forget(key)
        self._sample = ()

    def close(self) -> None:
        self._is_given_up.set()
        self._thread.close()
