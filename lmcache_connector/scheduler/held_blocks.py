"""Keeps vLLM from reusing blocks that a store still reads.

vLLM frees blocks that have left a window when it schedules the next step, and reuses them in the
same step, which would cancel most stores of such blocks. So the blocks are *pinned*: vLLM counts
them as in use until the store has ended.

The free of a finished request's blocks is *delayed* within one call of vLLM, to schedule a step or
to process its output, and never between two calls: a reset would find the blocks in use. A request
that waits for blocks waits a little longer.

Both are bounded in blocks, steps and seconds. Stores run in order: while one is overdue and a
request waits to begin, no blocks are kept for later stores. None are kept when no request runs.
Before free blocks run out, pins end, newest first: the newest stores would take longest, and their
requests have stored earlier chunks already.

vLLM reuses released blocks last, and reuse cancels a store that still reads the block.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcache_connector.kv_parts.part import Rule
from lmcache_connector.plans import StoreJob
from lmcache_connector.scheduler.block_witness import BlockWitness
from lmcache_connector.scheduler.jobs import PlannedJobs
from lmcache_connector.scheduler.request_state import SchedulerSettings

if TYPE_CHECKING:
    from lmcache_connector.vllm_compat.api.names import KVCacheBlock

MAX_STEPS = 32
"""A store takes a few milliseconds, and starts 30 ms late."""
MAX_SECONDS = 0.5
"""Steps with long prompts take 0.25 s."""
MAX_SHARE = 0.5
"""Share of all blocks."""


@dataclass(slots=True)
class _Pin:
    """Blocks pinned for one store, and since when; blocks whose free is delayed are not listed."""

    since: float
    blocks: list[KVCacheBlock]
    num_steps: int = 0

    def is_over(self, now: float) -> bool:
        return self.num_steps > MAX_STEPS or now - self.since > MAX_SECONDS


class HeldBlocks:
    """Owns all pins and delayed frees. ``is_holding``: whether there are any; a plain attribute,
    cheap to poll every step. ``clock`` is monotonic, in seconds."""

    def __init__(
        self,
        settings: SchedulerSettings,
        witness: BlockWitness,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.is_holding = False
        self._lasting = {i for i, p in enumerate(settings.parts) if p.rule is Rule.PREFIX}
        self._witness = witness
        self._clock = clock
        self._pins: dict[int, _Pin] = {}  # by store, the oldest first
        self._num_pinned = 0
        self._is_short = False  # vLLM could not schedule a request
        self._waited_for: dict[int, _Pin] = {}  # by job id, of finished requests' stores
        self._overdue: set[int] = set()  # job ids
        self._delayed: list[list[KVCacheBlock]] = []
        self._has_delayed = False  # since `free_delayed`
        self._is_crowded = False  # a request waited to begin in the last step

    @property
    def num_pins(self) -> int:
        return len(self._pins)

    def next_step(self) -> None:
        self._is_crowded = self._has_delayed
        self.free_delayed()
        now = self._clock()
        for job_id, pin in list(self._pins.items()):
            pin.num_steps += 1
            if is_over := pin.is_over(now):
                self._overdue.add(job_id)
            if is_over or self._is_short or self._must_yield:
                self.unpin(job_id)
        self._is_short = False
        self.is_holding = bool(self._pins) or self._is_crowded

    def forget(self, job_id: int) -> None:
        """The store has ended."""
        self.unpin(job_id)
        self._waited_for.pop(job_id, None)
        self._overdue.discard(job_id)

    # -- pins ------------------------------------------------------------------------------------

    def pin(self, job: StoreJob) -> None:
        """Pin the blocks of windows and states that the store reads, if the bounds allow."""
        runs = [run for run in job.runs if run.part not in self._lasting]
        block_ids = [i for run in runs for ids in run.block_ids for i in ids]
        if not block_ids or self._must_yield:
            return
        if self._num_pinned + len(block_ids) <= self._max_blocks:
            self._pins[job.job_id] = _Pin(self._clock(), self._witness.pin(block_ids))
            self._num_pinned += len(block_ids)
            self.is_holding = True

    def unpin(self, job_id: int) -> None:
        """The job has ended, or its time is over."""
        pin = self._pins.pop(job_id, None)
        if pin is not None:
            self._num_pinned -= len(pin.blocks)
            self._witness.unpin(pin.blocks)

    def unpin_all(self) -> None:
        for job_id in list(self._pins):
            self.unpin(job_id)

    def unpin_for(self, num_blocks: int) -> None:
        """End pins until ``num_blocks`` are free for the next step. A block that its request still
        uses counts too: it is free in the next step."""
        num_free = self._witness.num_free_blocks
        for job_id in reversed(list(self._pins)):
            if num_free >= num_blocks:
                return
            num_free += len(self._pins[job_id].blocks)
            self.unpin(job_id)

    def should_wait(self) -> bool:
        """vLLM found too few free blocks, and asks whether to wait one step instead of preempting
        a request: yes if pins can end in that step."""
        self._is_short = bool(self._pins)
        return self._is_short

    # -- delayed within a call -------------------------------------------------------------------

    def delay_free(self, block_ids: Iterable[int]) -> None:
        """Keep vLLM from reusing these blocks until :meth:`free_delayed`."""
        self._delayed.append(self._witness.pin(block_ids))
        self.is_holding = True

    def delay_free_for_stores(self, jobs: PlannedJobs) -> None:
        """Delay the free of blocks that stores of finished requests read, oldest first. Acts once
        until :meth:`free_delayed`."""
        if self._has_delayed:
            return
        self._has_delayed = self.is_holding = True
        now, block_ids = self._clock(), list[int]()
        for job_id, reads in jobs.read_after_the_end():
            waited = self._waited_for.setdefault(job_id, _Pin(now, []))
            waited.num_steps += 1
            if waited.is_over(now):
                self._overdue.add(job_id)
            if self._overdue or len(block_ids) + len(reads) > self._max_blocks:
                break
            block_ids += reads
        if block_ids:
            self.delay_free(block_ids)

    def free_delayed(self) -> None:
        """Free these blocks so that vLLM reuses them last. vLLM itself would put blocks outside its
        prefix cache first."""
        delayed, self._delayed, self._has_delayed = self._delayed, [], False
        for blocks in delayed:
            self._witness.unpin(blocks)

    # -- details ---------------------------------------------------------------------------------

    @property
    def _must_yield(self) -> bool:
        return self._is_crowded and bool(self._overdue)

    @property
    def _max_blocks(self) -> float:
        return MAX_SHARE * self._witness.num_blocks
