"""The jobs of the scheduler side, from their planning to the last rank's report."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any

from lmcache_connector.plans import JobResult, LoadJob, Outcome, StepPlan, StoreJob
from lmcache_connector.scheduler.request_state import RequestState


@dataclass(slots=True)
class PlannedJob:
    """A planned job and its reports: one of ``results`` per rank that has reported. ``num_chunks``:
    how many leading chunks have arrived on all of these ranks; all, before any has reported.
    ``reads``: blocks that must not change before the job ends."""

    state: RequestState
    job: LoadJob | StoreJob
    num_chunks: int
    reads: frozenset[int] = frozenset()
    results: list[JobResult] = field(default_factory=list)

    def span_attributes(self) -> dict[str, str | int | float]:
        results = self.results  # none of a store that was never sent
        outcomes = [result.outcome for result in results] or [Outcome.CANCELLED]
        return {
            "chunks": len(self.job.keys),
            "chunks_done": self.num_chunks if results else 0,
            "bytes": sum(result.num_bytes for result in results),
            "fetched_bytes": sum(result.fetched_bytes for result in results),
            "waited_seconds": max((result.waited_seconds for result in results), default=0.0),
            "outcome": next((o.value for o in outcomes if o is not Outcome.DONE), "done"),
        }


def span_name(job: LoadJob | StoreJob) -> str:
    kind = type(job).__name__.removesuffix("Job").lower()
    return f"{kind} {job.job_id}"


class PlannedJobs:
    """Holds each job until the step's plan, and then until ``num_ranks`` ranks have reported.

    Jobs before ``first_id`` are void. ``last_id``: id of the last job.
    """

    def __init__(self, num_ranks: int, last_id: int = 0) -> None:
        self._num_ranks = num_ranks
        self._jobs: dict[int, PlannedJob] = {}
        self.first_id = last_id + 1
        self.last_id = last_id
        self._unsent: list[LoadJob | StoreJob] = []
        self._cancelled_loads: list[int] = []
        self._vacated_stores: list[int] = []

    def __len__(self) -> int:
        """Number of open jobs."""
        return len(self._jobs)

    def new_id(self) -> int:
        """A greater id than all before, across all kinds of jobs."""
        self.last_id += 1
        return self.last_id

    def add(self, state: RequestState, job: LoadJob | StoreJob) -> None:
        """Hand the job to the workers with the next plan."""
        self._jobs[job.job_id] = planned = PlannedJob(state, job, num_chunks=len(job.keys))
        if isinstance(job, StoreJob):
            planned.reads = job.blocks
        self._unsent.append(job)

    def cancel_load(self, job: LoadJob) -> None:
        """Tell the workers with the next plan to cancel the job."""
        self._cancelled_loads.append(job.job_id)

    @property
    def has_unattended(self) -> bool:
        """Whether there is an open job that no vLLM request waits for."""
        return any(isinstance(p.job, StoreJob) or p.job.in_step for p in self._jobs.values())

    def vacate(self, block_ids: Set[int]) -> list[PlannedJob]:
        """Cancel and return the stores that read these blocks, which the step being planned may
        overwrite. Stores not yet sent to the workers end at once."""
        vacated = [p for p in self._jobs.values() if not p.reads.isdisjoint(block_ids)]
        unsent = {job.job_id for job in self._unsent}
        for planned in vacated:
            planned.reads = frozenset()  # cancel once only
            if planned.job.job_id in unsent:
                del self._jobs[planned.job.job_id]
            else:
                self._vacated_stores.append(planned.job.job_id)
        self._unsent = [job for job in self._unsent if job.job_id in self._jobs]
        return vacated

    def drop_unsent_stores(self) -> list[PlannedJob]:
        """End all stores and audits not yet sent to the workers."""
        dropped = [self._jobs.pop(j.job_id) for j in self._unsent if isinstance(j, StoreJob)]
        self._unsent = [job for job in self._unsent if job.job_id in self._jobs]
        return dropped

    @property
    def states(self) -> list[RequestState]:
        """The requests of open jobs."""
        return [planned.state for planned in self._jobs.values()]

    def stores_of(self, state: RequestState) -> dict[int, Set[int]]:
        """The request's open stores by id, each with the blocks that it reads."""
        return {
            job_id: planned.reads
            for job_id, planned in self._jobs.items()
            if planned.state is state and isinstance(planned.job, StoreJob)
        }

    def is_open(self, job_id: int) -> bool:
        """Whether some rank has not reported the job."""
        return job_id in self._jobs

    def take_plan(
        self,
        acked: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
        *,
        idle: bool,
        **fields: Any,
    ) -> StepPlan | None:
        """The plan of a step: everything added since the last plan, and further ``fields``;
        ``None`` if there is nothing to tell, as in most decode steps. ``acked``: per rank, the
        number of the last list of adapters, and the version of the weights, that are known."""
        unsent, cancelled = self._unsent, self._cancelled_loads or self._vacated_stores
        if not (unsent or cancelled or idle or any(fields.values())):
            return None
        plan = StepPlan(
            loads=tuple(job for job in unsent if isinstance(job, LoadJob)),
            stores=tuple(job for job in unsent if isinstance(job, StoreJob)),
            cancelled_loads=tuple(self._cancelled_loads),
            vacated_stores=tuple(self._vacated_stores),
            idle=idle,
            acked_adapters=acked[0],
            acked_weights=acked[1],
            **fields,
        )
        self._unsent, self._cancelled_loads, self._vacated_stores = [], [], []
        return plan

    def report(self, result: JobResult) -> tuple[PlannedJob, bool]:
        """Apply one rank's ``result``. Returns the job, and whether it has ended."""
        planned = self._jobs[result.job_id]
        planned.num_chunks = min(planned.num_chunks, result.num_chunks)
        planned.results.append(result)
        if has_ended := len(planned.results) == self._num_ranks:
            del self._jobs[result.job_id]
        return planned, has_ended
