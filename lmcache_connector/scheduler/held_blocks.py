"""Pins blocks that stores read: vLLM counts them as in use until the store has ended.

vLLM frees blocks that have left a window when it schedules the next step, and reuses them in the
same step, which would cancel most stores of such blocks: they are pinned when their store is
planned. Other blocks are freed when their request ends, and pinned then.

Pins are bounded in blocks, steps and seconds. Stores run in order: while one is overdue and a
request waits to begin, no blocks are pinned for later stores. No pin outlasts the last request that
runs, or a reset. Before free blocks run out, pins end, newest first: the newest stores would take
longest, and their requests have stored earlier chunks already.

Blocks whose pin has ended are reused last of all, which cancels a store that still reads them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcache_connector.kv_parts.part import Rule
from lmcache_connector.plans import StoreJob
from lmcache_connector.scheduler.block_witness import BlockWitness
from lmcache_connector.scheduler.request_state import SchedulerSettings

if TYPE_CHECKING:
    from lmcache_connector.vllm_compat.api.names import KVCacheBlock

MAX_STEPS = 32
"""A store takes a few milliseconds, and starts 30 ms after its workers know of it."""
MAX_SECONDS = 0.5
"""Steps with long prompts take 0.25 s."""
MAX_SHARE = 0.5
"""Share of all blocks."""


_Key = tuple[int, bool]
"""A store's job id, and whether its request has ended."""


@dataclass(slots=True)
class _Pin:
    """Blocks pinned for one store, and since when."""

    since: float
    blocks: list[KVCacheBlock]
    num_steps: int = 0

    def is_over(self, now: float) -> bool:
        return self.num_steps > MAX_STEPS or now - self.since > MAX_SECONDS


class HeldBlocks:
    """Owns all pins. ``is_holding``: whether :meth:`next_step` is due; a plain attribute, cheap to
    poll every step. ``clock`` is monotonic, in seconds."""

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
        self._pins: dict[_Key, _Pin] = {}  # the oldest first
        self._num_pinned = 0
        self._is_short = False  # vLLM could not schedule a request
        self._overdue: set[int] = set()  # job ids
        self._is_crowded = False  # a request waited to begin in the last step

    def next_step(self, *, is_crowded: bool) -> None:
        """A step is being planned. ``is_crowded``: some request waits, or begins in it."""
        self._is_crowded = is_crowded
        now = self._clock()
        for key, pin in list(self._pins.items()):
            pin.num_steps += 1
            if is_over := pin.is_over(now):
                self._overdue.add(key[0])
            if is_over or self._is_short or self._must_yield:
                self._unpin(key)
        self._is_short = False
        self.is_holding = bool(self._pins or self._overdue)

    def ended(self, job_id: int) -> None:
        """The store has ended."""
        self._unpin((job_id, False))
        self._unpin((job_id, True))
        self._overdue.discard(job_id)

    # -- pins ------------------------------------------------------------------------------------

    def pin_passing(self, job: StoreJob) -> None:
        """Pin the blocks of windows and states that the store reads, if the bounds allow. They take
        the place of blocks of ended requests, which vLLM does not reuse at once."""
        runs = [run for run in job.runs if run.part not in self._lasting]
        block_ids = [i for run in runs for ids in run.block_ids for i in ids]
        for key in [key for key in self._pins if key[1]] if block_ids else ():
            if not self._has_room(len(block_ids)):
                self._unpin(key)
        if self._has_room(len(block_ids)) and not self._must_yield:
            self._pin((job.job_id, False), block_ids)

    def pin_ended(self, job_id: int, block_ids: Collection[int]) -> None:
        """Pin the blocks that a store of an ended request reads, whatever the bounds, until
        :meth:`end_update`, because vLLM would reuse some of them before other free blocks."""
        self._pin((job_id, True), block_ids)

    def end_update(self, *, is_idle: bool) -> None:
        """vLLM has processed a step's output: end pins of ended requests that are beyond the
        bounds, and all of them if no request runs."""
        for key in reversed([key for key in self._pins if key[1]]):
            if is_idle or self._must_yield or not self._has_room(0):
                self._unpin(key)

    def unpin_all(self) -> None:
        for key in list(self._pins):
            self._unpin(key)

    def unpin_for(self, num_blocks: int) -> None:
        """End pins until ``num_blocks`` are free for the next step. A block that its request still
        uses counts too: it is free in the next step."""
        num_free = self._witness.num_free_blocks
        for key in reversed(list(self._pins)):
            if num_free >= num_blocks:
                return
            num_free += len(self._pins[key].blocks)
            self._unpin(key)

    def should_wait(self) -> bool:
        """vLLM found too few free blocks, and asks whether to wait one step instead of preempting
        a request: yes if pins can end in that step."""
        self._is_short = bool(self._pins)
        return self._is_short

    # -- details ---------------------------------------------------------------------------------

    @property
    def _must_yield(self) -> bool:
        return self._is_crowded and bool(self._overdue)

    def _has_room(self, num_blocks: int) -> bool:
        return self._num_pinned + num_blocks <= MAX_SHARE * self._witness.num_blocks

    def _pin(self, key: _Key, block_ids: Collection[int]) -> None:
        if block_ids:
            self._pins[key] = _Pin(self._clock(), self._witness.pin(block_ids))
            self._num_pinned += len(block_ids)
            self.is_holding = True

    def _unpin(self, key: _Key) -> None:
        if (pin := self._pins.pop(key, None)) is not None:
            self._num_pinned -= len(pin.blocks)
            self._witness.unpin(pin.blocks)
