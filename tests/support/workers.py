"""Worker sides that a test steps as vLLM does, and what they report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from lmcache_connector.change_count import ChangeCount
from lmcache_connector.plans import (
    CacheEvent,
    JobResult,
    Outcome,
    RankReport,
    StepPlan,
    WeightsInMemory,
)
from lmcache_connector.vllm_compat.loaded_weights import LoadedWeights
from lmcache_connector.worker.adapter import WorkerAdapter
from tests.support.clock import wait_until


class FixedWeights(LoadedWeights):
    """Weights that nobody changes, for workers without a model."""

    def __init__(self) -> None:
        self.changes = ChangeCount()
        self.has_updates = True
        self._question = 0

    def ask(self, question: int) -> None:
        self._question, self.has_updates = question, True

    def take(self) -> WeightsInMemory | None:
        if not self.has_updates:
            return None
        self.has_updates = False
        return WeightsInMemory(self.changes.number, self._question)

    def close(self) -> None:
        self.changes.close()


@dataclass
class SteppedWorker:
    """``cache``: the paged cache that the worker moves KV of, by layer. The end of a ``with`` shuts
    the worker down, which writes what is queued."""

    worker: WorkerAdapter
    cache: dict[str, torch.Tensor]
    results: dict[int, JobResult] = field(default_factory=dict)
    events: list[CacheEvent] = field(default_factory=list)

    def __enter__(self) -> SteppedWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self.worker.shutdown()

    def run(self, plan: StepPlan) -> tuple[RankReport, ...]:
        self.worker.handle_preemptions(plan)
        self.worker.start_forward(plan)
        self.worker.start_loads(plan)
        self.worker.end_forward(plan)
        reports = self.worker.finish_step().reports
        for report in reports:
            self.events += report.events
            self.results |= {result.job_id: result for result in report.results}
        return reports

    def wait_for(self, job_id: int) -> JobResult:
        for _ in range(20_000):
            if job_id in self.results:
                return self.results[job_id]
            self.run(StepPlan(idle=True))  # waits a few milliseconds for something to end
        raise AssertionError(f"job {job_id} does not end")

    def wait_for_quiet(self) -> None:
        """Until there is nothing to report."""
        wait_until(lambda: not self.run(StepPlan()), "the rank goes on reporting")

    def outcome(self, job_id: int) -> Outcome:
        return self.wait_for(job_id).outcome

    def blocks(self, block_ids: Iterable[int]) -> list[torch.Tensor]:
        return [layer[list(block_ids)].clone() for layer in self.cache.values()]
