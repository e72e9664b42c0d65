"""What is planned of a request, how it ends, and what is told of it."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from lmcache_connector.cost_model.cost_model import CostModel
from lmcache_connector.cost_model.policy import LoadPolicy
from lmcache_connector.keys.prefix_hash import PrefixHasher
from lmcache_connector.keys.request_keys import RequestIdentity, RequestKeys
from lmcache_connector.kv_parts.blocks import BlocksInUse
from lmcache_connector.kv_parts.hit import Hit
from lmcache_connector.kv_parts.part import Part, Rule
from lmcache_connector.lookup.chunk_index import ChunkIndex
from lmcache_connector.metrics.samples import Tally
from lmcache_connector.plans import (
    CacheEvent,
    Fetched,
    ForwardTime,
    JobResult,
    Outcome,
    PrefillWork,
    RankReport,
    StepPlan,
    Tier,
)
from lmcache_connector.scheduler.jobs import PlannedJobs
from lmcache_connector.scheduler.load_planner import LoadPlanner
from lmcache_connector.scheduler.request_state import RequestState, SchedulerSettings
from lmcache_connector.scheduler.scheduler import Scheduler
from tests.scheduler.test_tails import long_answered, wide
from tests.support.doubles import lives
from tests.support.doubles.shadow_engine import ShadowEngine, Shape
from tests.support.doubles.shadow_worker import Faults
from tests.support.jobs import load_job, store_job

# -- jobs ------------------------------------------------------------------------------------------


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
    attributes = vacated[1].span_attributes()
    assert (attributes["outcome"], attributes["chunks_done"]) == ("cancelled", 0)
    assert take(jobs) == StepPlan(vacated_stores=(sent.job_id,))
    assert jobs.vacate({1}) == []
    assert take(jobs) == StepPlan(), "once is enough"
    assert (len(jobs), jobs.has_unattended) == (2, True)


# -- loads -----------------------------------------------------------------------------------------


CHUNK, CHUNK_BYTES, NUM_CHUNKS = 32, 1 << 20, 64
PROMPT = NUM_CHUNKS * CHUNK + 10
SETTINGS = SchedulerSettings(
    chunk_size=CHUNK,
    parts=(Part(Rule.PREFIX, groups=(0,), block_size=16),),
    world_size=1,
    loads=True,
    stores=True,
    num_batches=2,
)


class Planning:
    """One request whose chunks all lie in memory: a chunk takes 1 ms to load, 32 to compute."""

    def __init__(self) -> None:
        hasher = PrefixHasher({}, CHUNK)
        tokens = list(range(PROMPT))
        keys = RequestKeys(hasher, RequestIdentity())
        keys.extend(tokens)
        request = SimpleNamespace(
            request_id="r", num_tokens=PROMPT, num_computed_tokens=0, all_token_ids=tokens
        )
        self.state = RequestState(request, keys)
        index = ChunkIndex(1)
        index.apply(0, [CacheEvent(key, True) for key in keys.keys])
        model = CostModel(lambda: 0.0, max_deadline_seconds=10.0)
        self.policy = LoadPolicy(model, CHUNK, (CHUNK_BYTES,), lambda: 0.0)
        self.policy.observe_measured([(Fetched(Tier.CPU, CHUNK_BYTES, 0.001),)])
        forward = ForwardTime(PrefillWork(4096, 0), 4.096)
        self.policy.observe_reports([RankReport(0, (), (), (forward,))])
        self.tally = Tally()
        self.planner = LoadPlanner(SETTINGS, index, self.policy, self.tally, count(1).__next__)

    def offer(self, num_computed_tokens: int) -> int:
        first = num_computed_tokens // CHUNK
        hit = Hit(first, range(first + 1, NUM_CHUNKS + 1), NUM_CHUNKS)
        return self.planner.offer(self.state, num_computed_tokens, hit, may_be_in_step=False)


def test_a_smaller_local_hit_gets_a_decision_and_a_deadline_of_its_own() -> None:
    """Under memory pressure vLLM evicts what it had of a request that still waits. With the former
    deadline of 10 ms, a load of 40 ms would be discarded, and all of it recomputed."""
    planning = Planning()
    almost_all = (NUM_CHUNKS - 1) * CHUNK
    assert planning.offer(almost_all) == CHUNK
    short = planning.state.load.deadline_seconds
    assert planning.offer(0) == NUM_CHUNKS * CHUNK
    assert short < NUM_CHUNKS * 0.001
    assert planning.state.load.deadline_seconds == pytest.approx(3 * NUM_CHUNKS * 0.001, rel=1e-2)


def test_asked_the_same_again_it_answers_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each decision may put a tier on trial."""
    planning = Planning()
    assert planning.offer(0) == NUM_CHUNKS * CHUNK
    monkeypatch.delattr(LoadPolicy, "decide")
    assert planning.offer(0) == NUM_CHUNKS * CHUNK


def test_a_load_waits_for_forward_passes_only_if_they_use_its_blocks() -> None:
    planning, in_use = Planning(), BlocksInUse(2, hears_all_frees=True)
    in_use.freed([[7]])
    num_tokens = planning.offer(0)
    blocks = list(range(100, 100 + num_tokens // 16))
    assert not planning.planner.plan(planning.state, [blocks], num_tokens, in_use).after_passes
    blocks[3] = 7
    assert planning.planner.plan(planning.state, [blocks], num_tokens, in_use).after_passes


# -- stores ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("store_generated", "stored"), [(True, 2), (False, 1)])
def test_answers_are_stored_if_that_is_wanted(
    model: Path, store_generated: bool, stored: int
) -> None:
    engine = wide(model, Shape(store_generated=store_generated))
    engine.add(long_answered(lives.CHUNK + 4), max_tokens=lives.CHUNK)
    engine.run_until_idle()
    engine.check_whole()
    assert engine.ranks[0].num_stored_chunks == stored


# -- what is told ----------------------------------------------------------------------------------


def test_while_requests_run_metrics_are_taken_now_and_then(model: Path) -> None:
    engine = wide(model, Shape())
    adapter, now = engine.adapter, 100.0
    adapter.clock = lambda: now
    engine.add(long_answered(lives.CHUNK + 4), max_tokens=lives.CHUNK)
    engine.step()
    adapter.take_metrics()
    adapter.tally.count("probes")
    assert adapter.take_metrics() is None, "a step ago"
    now += 1.0
    assert taken_probes(adapter) == 1
    adapter.tally.count("probes", amount=2)
    assert adapter.take_metrics() is None
    engine.run_until_idle()
    adapter.take_metrics()
    adapter.tally.count("probes", amount=4)
    assert taken_probes(adapter) == 4  # there may be no next step
    assert adapter.take_metrics() is None
    assert adapter.tally.totals.total("probes") == 7


def taken_probes(adapter: Scheduler) -> float:
    taken = adapter.take_metrics()
    assert taken is not None
    return taken.total("probes")


def test_what_a_preempted_request_loads_again_counts_as_looked_up_again(model: Path) -> None:
    """No hit rate is above one."""
    shape = Shape(num_blocks=31, tier_chunks=200, max_batched_tokens=256, prefix_caching=False)
    engine = ShadowEngine(model, shape, 0, Faults(slow=0.0))
    engine.adapter.policy.model.mode = "always"
    prompts = [lives.prompt(seed, 161) for seed in (1, 2)]
    for each in prompts:
        engine.add(each, 1)
        engine.run_until_idle()

    def total(name: str) -> float:
        return engine.adapter.tally.totals.total(name)

    queried, saved = total("queried_tokens"), total("prefill_saved_tokens")
    for each in prompts:
        engine.add(each, 120)
    engine.run_until_idle()
    assert engine.num_preemptions > 0
    queried, saved = total("queried_tokens") - queried, total("prefill_saved_tokens") - saved
    assert 2 * 160 < saved <= queried
