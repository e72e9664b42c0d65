"""The jobs that have been planned and not yet reported by every rank."""

from __future__ import annotations

from dataclasses import dataclass, field

from lmcache_connector.plans import JobResult, LoadJob, StoreJob
from lmcache_connector.request_state import RequestState


@dataclass(slots=True)
class RunningJob:
    """``num_chunks``: that all ranks heard so far have; ``results``: one per rank heard."""

    state: RequestState
    job: LoadJob | StoreJob
    num_chunks: int
    results: list[JobResult] = field(default_factory=list)


class RunningJobs:
    """A job has ended when each of ``num_ranks`` has said so. Owned by the scheduler side."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._jobs: dict[int, RunningJob] = {}
        self._last_id = 0

    def new_id(self) -> int:
        """Greater than all before, over loads and stores together."""
        self._last_id += 1
        return self._last_id

    def start(self, state: RequestState, job: LoadJob | StoreJob) -> None:
        self._jobs[job.job_id] = RunningJob(state, job, num_chunks=len(job.keys))

    def report(self, result: JobResult) -> tuple[RunningJob, bool]:
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
