"""A job from its planning to the last rank's report."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lmcache_connector.keys.prefix_hash import PrefixHasher
from lmcache_connector.keys.request_keys import RequestIdentity, RequestKeys
from lmcache_connector.plans import JobResult, Outcome, StepPlan
from lmcache_connector.scheduler.jobs import PlannedJobs
from lmcache_connector.scheduler.request_state import RequestState
from tests.support.jobs import load_job, store_job

STATE = RequestState(
    SimpleNamespace(request_id="r"), RequestKeys(PrefixHasher({}, 256), RequestIdentity())
)


def take(jobs: PlannedJobs) -> StepPlan:
    return jobs.take_plan(idle=False, prefill=None, probe=False) or StepPlan()


@pytest.mark.parametrize("arrived", [(1, 3), (3, 1)])
def test_a_job_is_in_one_plan_and_ends_with_what_arrived_on_all_ranks(
    arrived: tuple[int, int],
) -> None:
    jobs = PlannedJobs(num_ranks=2)
    job = load_job(jobs.new_id(), "r", (b"a", b"b", b"c"), ((0, 1, 2),))
    jobs.add(STATE, job)
    assert take(jobs) == StepPlan(loads=(job,))
    assert take(jobs) == StepPlan()
    ends = []
    for num_chunks in arrived:
        assert len(jobs) == 1
        result = JobResult(job.job_id, Outcome.MISSING, num_chunks, 0, 0.0)
        planned, has_ended = jobs.report(result)
        ends.append(has_ended)
    assert ends == [False, True]
    assert (planned.num_chunks, len(planned.results), len(jobs)) == (1, 2, 0)


def test_a_store_is_cancelled_when_vLLM_hands_out_a_block_it_reads() -> None:
    jobs = PlannedJobs(num_ranks=1)
    sent = store_job(jobs.new_id(), "r", (b"a",), ((1, 2),))
    other = store_job(jobs.new_id(), "r", (b"b",), ((3, 4),))
    jobs.add(STATE, sent)
    jobs.add(STATE, other)
    assert take(jobs).stores == (sent, other)
    unsent = store_job(jobs.new_id(), "r", (b"c",), ((2, 5),))
    jobs.add(STATE, unsent)
    vacated = jobs.vacate({2, 9})
    assert [planned.job for planned in vacated] == [sent, unsent]
    assert not jobs.is_open(unsent.job_id), "it must not reach the workers"
    assert take(jobs) == StepPlan(vacated_stores=(sent.job_id,))
    assert jobs.vacate({1}) == []
    assert take(jobs) == StepPlan(), "once is enough"
    assert (len(jobs), jobs.has_unattended) == (2, True)
