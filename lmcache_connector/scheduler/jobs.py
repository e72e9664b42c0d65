"""The jobs of the scheduler side, from their planning to the last rank's report."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from typing import Any

from lmcache_connector.plans import JobResult, LoadJob, PrefetchJob, StepPlan, StoreJob
from lmcache_connector.scheduler.request_state import RequestState


@dataclass(slots=True)
class PlannedJob:
    """A job and what has been heard of it: one of ``results`` per rank that has reported,
    ``num_chunks`` leading chunks that arrived on all of these. ``reads``: blocks that must not
    change before it has ended."""

    state: RequestState
    job: LoadJob | StoreJob | PrefetchJob
    num_chunks: int
    reads: frozenset[int] = frozenset()
    results: list[JobResult] = field(default_factory=list)


class PlannedJobs:
    """A job waits here for the step's plan, and then for the reports of ``num_ranks`` ranks.

    Jobs before ``first_id`` are nobody's any more. ``last_id``: of the last one.
    """

    def __init__(self, num_ranks: int, last_id: int = 0) -> None:
        self._num_ranks = num_ranks
        self._jobs: dict[int, PlannedJob] = {}
        self.first_id = last_id + 1
        self.last_id = last_id
        # For the next plan.
        self._loads: list[LoadJob] = []
        self._prefetches: list[PrefetchJob] = []
        self._stores: list[StoreJob] = []
        self._cancelled_loads: list[int] = []
        self._vacated_stores: list[int] = []

    def __len__(self) -> int:
        """Jobs that have not ended."""
        return len(self._jobs)

    def new_id(self) -> int:
        """Greater than all before, over loads and stores together."""
        self.last_id += 1
        return self.last_id

    def add(self, state: RequestState, job: LoadJob | StoreJob | PrefetchJob) -> None:
        """Hand the job to the workers with the next plan."""
        self._jobs[job.job_id] = planned = PlannedJob(state, job, num_chunks=len(job.keys))
        if isinstance(job, LoadJob):
            self._loads.append(job)
        elif isinstance(job, PrefetchJob):
            self._prefetches.append(job)
        else:
            planned.reads = job.blocks
            self._stores.append(job)

    def cancel_load(self, job: LoadJob | PrefetchJob) -> None:
        """Tell the workers with the next plan that nobody wants it any more."""
        self._cancelled_loads.append(job.job_id)

    @property
    def has_unattended(self) -> bool:
        """Whether a job has not ended that no request of vLLM's waits for."""
        jobs = (planned.job for planned in self._jobs.values())
        return any(not isinstance(job, LoadJob) or job.in_step for job in jobs)

    def vacate(self, block_ids: Set[int]) -> list[PlannedJob]:
        """The step being planned may overwrite these blocks: the stores that read them are
        cancelled, and returned. Those that no worker has heard of yet have ended with that."""
        vacated = [p for p in self._jobs.values() if not p.reads.isdisjoint(block_ids)]
        unsent = {job.job_id for job in self._stores}
        for planned in vacated:
            planned.reads = frozenset()  # once is enough
            if planned.job.job_id in unsent:
                del self._jobs[planned.job.job_id]
            else:
                self._vacated_stores.append(planned.job.job_id)
        self._stores = [job for job in self._stores if job.job_id in self._jobs]
        return vacated

    def drop_unsent_stores(self) -> list[PlannedJob]:
        """Stores and audits that no worker has heard of yet end with that."""
        dropped = [self._jobs.pop(job.job_id) for job in self._stores]
        self._stores = []
        return dropped

    def blocks_read_of(self, state: RequestState) -> list[int]:
        """Blocks that the request's open stores read."""
        planned = [self._jobs[job_id] for job_id in state.store.job_ids]
        return [block for p in planned if p.reads for block in p.reads]

    def read_after_the_end(self) -> Iterator[tuple[int, Set[int]]]:
        """Stores of finished requests, the oldest first, and the blocks that they read."""
        for job_id, planned in self._jobs.items():
            if planned.reads and planned.state.is_finished:
                yield job_id, planned.reads

    def is_open(self, job_id: int) -> bool:
        """Whether some rank has yet to report the job."""
        return job_id in self._jobs

    def take_plan(
        self,
        heard: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
        *,
        idle: bool,
        **news: Any,
    ) -> StepPlan | None:
        """The plan of a step: all that was added since the last one, and ``news``, other fields of
        the plan. ``None``, as for nearly every decode step: nothing. ``heard``: of each rank, the
        adapters and the weights that are known."""
        added = self._loads or self._stores or self._prefetches
        if not (
            added or self._cancelled_loads or self._vacated_stores or idle or any(news.values())
        ):
            return None
        plan = StepPlan(
            loads=tuple(self._loads),
            stores=tuple(self._stores),
            prefetches=tuple(self._prefetches),
            cancelled_loads=tuple(self._cancelled_loads),
            vacated_stores=tuple(self._vacated_stores),
            idle=idle,
            heard_adapters=heard[0],
            heard_weights=heard[1],
            **news,
        )
        self._loads, self._stores, self._prefetches = [], [], []
        self._cancelled_loads, self._vacated_stores = [], []
        return plan

    def report(self, result: JobResult) -> tuple[PlannedJob, bool]:
        """The job after one rank's ``result``, and whether it has ended with that."""
        planned = self._jobs[result.job_id]
        planned.num_chunks = min(planned.num_chunks, result.num_chunks)
        planned.results.append(result)
        has_ended = len(planned.results) == self._num_ranks
        if has_ended:
            del self._jobs[result.job_id]
        return planned, has_ended
