"""The jobs that have been planned and not yet reported by every rank."""

from __future__ import annotations

from dataclasses import dataclass, field

from lmcache_connector.plans import Hold, JobResult, LoadJob, PrefillWork, StepPlan, StoreJob
from lmcache_connector.scheduler.request_state import RequestState


@dataclass(slots=True)
class PlannedJob:
    """``num_chunks``: that all ranks heard so far have; ``results``: one per rank heard."""

    state: RequestState
    job: LoadJob | StoreJob
    num_chunks: int
    results: list[JobResult] = field(default_factory=list)


class PlannedJobs:
    """A job has ended when each of ``num_ranks`` has said so. Owned by the scheduler side."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._jobs: dict[int, PlannedJob] = {}
        self._last_id = 0

    def new_id(self) -> int:
        """Greater than all before, over loads and stores together."""
        self._last_id += 1
        return self._last_id

    def start(self, state: RequestState, job: LoadJob | StoreJob) -> None:
        self._jobs[job.job_id] = PlannedJob(state, job, num_chunks=len(job.keys))

    def report(self, result: JobResult) -> tuple[PlannedJob, bool]:
        """The job after one rank's ``result``, and whether that was the last rank's."""
        running = self._jobs[result.job_id]
        running.num_chunks = min(running.num_chunks, result.num_chunks)
        running.results.append(result)
        ended = len(running.results) == self._num_ranks
        if ended:
            del self._jobs[result.job_id]
        return running, ended

    def __len__(self) -> int:
        return len(self._jobs)


# The plan of nearly every decode step.
_NOTHING_NEW = StepPlan()


class PlanDraft:
    """Collects on the scheduler's thread until the step's plan is taken."""

    def __init__(self) -> None:
        self.loads: list[LoadJob] = []
        self.stores: list[StoreJob] = []
        self.holds: list[Hold] = []
        self.cancelled_loads: list[int] = []

    def take(
        self,
        *,
        vacated_stores: tuple[int, ...],
        idle: bool,
        prefill: PrefillWork | None,
        probe: bool,
    ) -> StepPlan:
        """The plan of a step of which the rest is known now. The draft is empty then."""
        jobs = self.loads or self.stores or self.holds or self.cancelled_loads
        if not (idle or jobs or vacated_stores or prefill or probe):
            return _NOTHING_NEW
        plan = StepPlan(
            loads=tuple(self.loads),
            stores=tuple(self.stores),
            holds=tuple(self.holds),
            cancelled_loads=tuple(self.cancelled_loads),
            vacated_stores=vacated_stores,
            idle=idle,
            prefill=prefill,
            probe=probe,
        )
        self.loads, self.stores, self.holds, self.cancelled_loads = [], [], [], []
        return plan
