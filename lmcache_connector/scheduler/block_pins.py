"""Blocks that a store reads and vLLM would hand out meanwhile.

What a window has left behind vLLM frees when it schedules the next step, and hands out again in the
same step. A store of such blocks that has not ended by then would be cancelled, as a rule. So they
are pinned: vLLM counts them as in use until the store has ended.

A pin may cost vLLM a wait, never more: it lasts for so many steps at most, and ends when no request
runs. After that the blocks are the last to be handed out, and a store that still reads them is
cancelled when they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lmcache_connector.kv_parts.part import Rule
from lmcache_connector.plans import StoreJob
from lmcache_connector.scheduler.block_witness import Block, BlockWitness
from lmcache_connector.scheduler.request_state import SchedulerSettings

_MAX_STEPS = 32
"""A store takes some milliseconds, and on CPU begins 30 later."""


@dataclass(slots=True)
class _Pin:
    blocks: list[Block]
    num_steps: int = 0


class BlockPins:
    """Owns the pins of all stores."""

    def __init__(self, settings: SchedulerSettings, witness: BlockWitness) -> None:
        self._lasting = {i for i, p in enumerate(settings.parts) if p.rule is Rule.PREFIX}
        self._witness = witness
        self._pins: dict[int, _Pin] = {}

    def __len__(self) -> int:
        return len(self._pins)

    def pin(self, job: StoreJob) -> None:
        """What it reads of windows and states."""
        runs = [run for run in job.runs if run.part not in self._lasting]
        if runs:
            block_ids = [i for run in runs for ids in run.block_ids for i in ids]
            self._pins[job.job_id] = _Pin(self._witness.pin(block_ids))

    def unpin(self, job_id: int) -> None:
        """The job has ended, or has been pinned for long enough."""
        pin = self._pins.pop(job_id, None)
        if pin is not None:
            self._witness.unpin(pin.blocks)

    def unpin_all(self) -> None:
        self._unpin_each(list(self._pins))

    def next_step(self) -> None:
        """A step is being planned."""
        for pin in self._pins.values():
            pin.num_steps += 1
        self._unpin_each([i for i, pin in self._pins.items() if pin.num_steps > _MAX_STEPS])

    def _unpin_each(self, job_ids: Iterable[int]) -> None:
        for job_id in job_ids:
            self.unpin(job_id)
