"""The cost model on the scheduler side: measurements from reports, waits, probes."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from lmcache_connector.cost_model.cost_model import CostModel
from lmcache_connector.cost_model.decision import LoadDecision, Reason
from lmcache_connector.cost_model.policy import LOOKUP_SHARE, LoadPolicy
from lmcache_connector.plans import (
    Fetched,
    ForwardTime,
    JobResult,
    LoadJob,
    Outcome,
    PrefillWork,
    RankReport,
    Tier,
)
from tests.support import jobs
from tests.support.clock import Clock

CHUNK_TOKENS, CHUNK_BYTES = 256, 1 << 20
PROMPT = 32 * CHUNK_TOKENS
RECOMPUTE = 0.8192  # seconds to compute PROMPT
KEYS = [bytes([i]) * 32 for i in range(32)]


@pytest.fixture
def clock() -> Clock:
    return Clock()


def redis(num_bytes: int, seconds: float) -> Fetched:
    """A probe's result; zero bytes are a failure."""
    return Fetched(Tier.REDIS, num_bytes, seconds, not num_bytes)


def make_policy(
    clock: Clock, started: Fetched, tiers: tuple[Tier, ...] = (Tier.REDIS,)
) -> LoadPolicy:
    """A policy that knows prefill speed, memory's speed, and the start's measurement of Redis."""
    model = CostModel(clock, max_deadline_seconds=10.0)
    made = LoadPolicy(model, CHUNK_TOKENS, (CHUNK_BYTES,), clock, remote_tiers=tiers)
    made.observe_measured([(Fetched(Tier.CPU, CHUNK_BYTES, 0.0002), started)])
    made.observe_reports([forward(PROMPT, RECOMPUTE)])
    return made


@pytest.fixture
def policy(clock: Clock) -> LoadPolicy:
    return make_policy(clock, redis(1 << 23, 0.08))


def forward(num_tokens: int, seconds: float, rank: int = 0) -> RankReport:
    work = PrefillWork(num_tokens, 0)
    return RankReport(rank, (), (), forwards=(ForwardTime(work, seconds),))


def probed(num_bytes: int, seconds: float, rank: int = 0) -> RankReport:
    return RankReport(rank, (), (), measured=(redis(num_bytes, seconds),))


def load_job(job_id: int, keys: list[bytes]) -> LoadJob:
    return jobs.load_job(job_id, f"r{job_id}", tuple(keys), ((),), may_fetch=True)


def decide(policy: LoadPolicy, keys: list[bytes], num_cpu: int = 0, tier: Tier = Tier.REDIS) -> int:
    tiers = [Tier.CPU] * num_cpu + [tier] * (len(keys) - num_cpu)
    return policy.decide(0, PROMPT + 100, keys, tiers).num_chunks


def fetched(
    job_id: int, num_bytes: int, seconds: float, failed: bool = False, tier: Tier = Tier.REDIS
) -> JobResult:
    outcome = Outcome.DEADLINE if failed else Outcome.DONE
    fetches = (Fetched(tier, num_bytes, seconds, failed),)
    return JobResult(job_id, outcome, 0, num_bytes, seconds, fetches)


def load(
    policy: LoadPolicy, job_id: int, num_bytes: int, seconds: float, tier: Tier, **more: bool
) -> None:
    policy.load_planned(load_job(job_id, KEYS), [tier] * len(KEYS))
    policy.load_ended(job_id, [fetched(job_id, num_bytes, seconds, tier=tier, **more)])


def run_steps(policy: LoadPolicy, clock: Clock, seconds: float) -> None:
    """Other requests decode, in steps of ``seconds``."""
    for _ in range(8):
        policy.step_planned(4, 0, has_prefill=False)
        clock.now += seconds


def test_a_copy_is_part_of_a_load_from_redis(policy: LoadPolicy) -> None:
    copy = 1 / policy.model.tiers[Tier.CPU].seconds_per_byte
    load = 1 / policy.model.tiers[Tier.REDIS].seconds_per_byte
    assert 1 / load == pytest.approx(0.08 / (1 << 23) + 1 / copy)


def test_the_slowest_rank_counts(policy: LoadPolicy) -> None:
    policy.observe_reports([probed(1 << 23, 0.01), probed(1 << 20, 0.5, rank=1)])
    assert 1 / policy.model.tiers[Tier.REDIS].seconds_per_byte < 3e6
    assert decide(policy, KEYS) == 0
    before = policy.model.compute_seconds(0, PROMPT)
    for _ in range(20):
        policy.observe_reports([forward(PROMPT, RECOMPUTE), forward(PROMPT, 1.5 * RECOMPUTE, 1)])
    after = policy.model.compute_seconds(0, PROMPT)
    assert before is not None
    assert after == pytest.approx(1.5 * before, rel=0.15)


def test_a_load_cut_off_stalls_redis_until_a_probe_arrives(policy: LoadPolicy) -> None:
    load(policy, 1, 0, 0.2, Tier.REDIS, failed=True)
    decision = policy.decide(0, PROMPT, KEYS, [Tier.REDIS] * len(KEYS))
    assert (decision.num_chunks, decision.reason) == (0, Reason.SOURCE_STALLED)
    policy.observe_reports([probed(1 << 23, 0.01)])
    assert decide(policy, KEYS) == 32


def test_missing_chunks_do_not_stall_the_tier(policy: LoadPolicy) -> None:
    policy.load_planned(load_job(1, KEYS), [Tier.REDIS] * len(KEYS))
    policy.load_ended(1, [JobResult(1, Outcome.MISSING, 0, 0, 0.3, (Fetched(Tier.REDIS, 0, 0.3),))])
    assert decide(policy, KEYS) == 32


def test_a_load_of_the_same_chunks_is_no_queue(policy: LoadPolicy) -> None:
    for job_id in range(3):
        policy.load_planned(load_job(job_id, KEYS), [Tier.REDIS] * len(KEYS))
    assert decide(policy, KEYS) == 0  # one load may be shared; two are queued
    policy.load_ended(1, [fetched(1, 32 * CHUNK_BYTES, 0.33)])
    policy.load_ended(2, [fetched(2, 32 * CHUNK_BYTES, 0.33)])
    assert decide(policy, KEYS) == 32


def test_the_wait_for_a_look_up_is_a_share_of_recompute(policy: LoadPolicy) -> None:
    seconds = policy.lookup_seconds(0, PROMPT, expected_seconds={})
    assert seconds == pytest.approx(LOOKUP_SHARE * RECOMPUTE, rel=0.01)
    assert policy.lookup_seconds(0, PROMPT, expected_seconds={Tier.REDIS: 0.2}) == 0.0
    assert policy.lookup_seconds(0, 8 * PROMPT, expected_seconds={Tier.REDIS: 0.2}) > 0.2
    assert policy.lookup_seconds(0, 8 * PROMPT, expected_seconds={Tier.REDIS: inf}) == 0.0
    policy.observe_reports([probed(0, 1.0)])
    assert policy.lookup_seconds(0, 8 * PROMPT, expected_seconds={}) == 0.0


@pytest.mark.parametrize("share_held", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("step_seconds", [0.01, 0.05, 0.25, 2.0])
def test_a_step_is_lost_for_an_answer_where_an_oracle_would(
    policy: LoadPolicy, clock: Clock, step_seconds: float, share_held: float
) -> None:
    """Requests come right before a step, beside others that decode, and are scheduled before Redis
    answers. The oracle knows how many of them are hits; it has all of them wait for the next step,
    or none."""
    run_steps(policy, clock, step_seconds)
    asks_again = policy.is_worth_a_step(
        0, PROMPT, len(KEYS) * CHUNK_BYTES, share_held, LOOKUP_SHARE * RECOMPUTE
    )
    recompute = policy.model.compute_seconds(0, PROMPT)
    assert recompute is not None
    load = policy.model.steps.wait_seconds(len(KEYS) * CHUNK_BYTES / (1 << 23) * 0.08, step_seconds)
    hit = min(recompute, load)
    waited = step_seconds + share_held * hit + (1 - share_held) * recompute
    ours = waited if asks_again else recompute
    assert ours <= 1.1 * min(recompute, waited)
    assert ours <= (1 + LOOKUP_SHARE) * recompute  # never much slower than recompute


def test_a_crowd_waits_where_one_request_would_not(policy: LoadPolicy, clock: Clock) -> None:
    """While one waits, the others are computed, and it would have waited for them."""
    run_steps(policy, clock, 0.25)
    question = (0, PROMPT, len(KEYS) * CHUNK_BYTES, 0.2, 0.0)
    policy.request_arrived("r0")
    assert not policy.is_worth_a_step(*question)
    for number in range(1, 8):
        policy.request_arrived(f"r{number}")
    assert policy.is_worth_a_step(*question)


def test_redis_is_probed_only_while_requests_come(policy: LoadPolicy, clock: Clock) -> None:
    assert not policy.probes.take()
    policy.observe_reports([probed(0, 1.0)])
    assert not policy.probes.take()
    probes = 0
    for _ in range(600):
        clock.now += 1.0
        policy.lookup_seconds(0, PROMPT, {})
        probes += policy.probes.take()
    assert 10 < probes < 20  # in ten minutes: first every few seconds, then every minute
    policy.observe_reports([probed(1 << 23, 0.01)])
    policy.lookup_seconds(0, PROMPT, {})
    assert not policy.probes.take()
    clock.now += 61.0
    policy.lookup_seconds(0, PROMPT, {})
    assert policy.probes.take()  # the measurement is old


ANSWERED = Fetched(Tier.REDIS, 0, 0.001)


@pytest.fixture
def reader(clock: Clock) -> LoadPolicy:
    """A policy with a read-only Redis, in which a probe finds nothing to read."""
    return make_policy(clock, ANSWERED)


def test_a_read_only_redis_is_used_again_after_a_stall(reader: LoadPolicy) -> None:
    assert decide(reader, KEYS) == 32
    load(reader, 1, 0, 0.05, Tier.REDIS, failed=True)
    assert decide(reader, KEYS) == 0
    reader.observe_reports([probed(0, 1.0)])
    assert decide(reader, KEYS) == 0, "it is still silent"
    reader.observe_measured([[redis(0, 1.0)], [ANSWERED]])
    assert decide(reader, KEYS) == 0, "one rank hears nothing yet"
    reader.observe_measured([[ANSWERED]])
    assert decide(reader, KEYS) > 0


def test_a_redis_that_stalls_every_load_costs_a_load_a_minute(
    reader: LoadPolicy, clock: Clock
) -> None:
    num_loads = 0
    for i in range(36_000):  # an hour
        clock.now += 0.1
        if reader.lookup_seconds(0, PROMPT, {}) > 0.0 and decide(reader, KEYS) > 0:
            num_loads += 1
            load(reader, i, 0, 0.05, Tier.REDIS, failed=True)
        if reader.probes.take():
            reader.observe_measured([[ANSWERED]])
    assert 1 <= num_loads <= 70


@pytest.mark.parametrize(("step", "loads"), [(0.010, True), (0.250, False)])
def test_beside_long_steps_a_small_hit_is_computed(
    policy: LoadPolicy, clock: Clock, step: float, loads: bool
) -> None:
    """A load takes at least two steps until it is reported."""
    keys = KEYS[:8]
    run_steps(policy, clock, step)
    assert policy.model.steps.decode_seconds == pytest.approx(step)
    assert bool(decide(policy, keys, num_cpu=8)) is loads
    policy.request_ended("r", 0)  # nothing else runs
    assert decide(policy, keys, num_cpu=8) == 8


def test_a_crowd_loads_small_hits_despite_long_steps(policy: LoadPolicy, clock: Clock) -> None:
    """Each would be quicker by compute, and all would wait for that."""
    keys = KEYS[:8]
    run_steps(policy, clock, 0.150)
    for number in range(4):
        policy.request_arrived(f"r{number}")
        assert bool(decide(policy, keys, num_cpu=8)) is (number > 0), number
    for number in range(3):
        policy.request_admitted(f"r{number}", 0)
    assert decide(policy, keys, num_cpu=8) == 0


def test_a_crowd_loads_to_its_last_request(policy: LoadPolicy, clock: Clock) -> None:
    """The last request's load queues for longer than its own compute, but all would wait for that
    compute. Nothing else runs."""
    for _ in range(9):
        policy.observe_reports([forward(PROMPT, 0.05 * RECOMPUTE)])
    for number in range(40):
        policy.request_arrived(f"r{number}")
    for number in range(40):
        assert decide(policy, KEYS, num_cpu=32) == 32, number
        job = jobs.load_job(number, f"r{number}", tuple(KEYS), ((),))
        policy.load_planned(job, [Tier.CPU] * len(KEYS))


def test_prefills_of_others_make_steps_longer(policy: LoadPolicy, clock: Clock) -> None:
    """The next steps compute the rest of them, and take longer than measured decode steps."""
    policy.model.max_step_tokens = PROMPT // 2
    run_steps(policy, clock, 0.001)
    keys = KEYS[:8]
    assert decide(policy, keys, num_cpu=8) == 8
    policy.request_admitted("s", PROMPT // 2)  # its last step
    assert decide(policy, keys, num_cpu=8) == 8
    policy.request_admitted("s", 4 * PROMPT)
    assert decide(policy, keys, num_cpu=8) == 0


def test_loads_that_expire_in_the_queue_get_more_time_or_none(
    policy: LoadPolicy, clock: Clock
) -> None:
    """Loads from memory, whose deadlines passed in the queue."""

    def decided(keys: list[bytes]) -> LoadDecision:
        return policy.decide(0, PROMPT + 100, keys, [Tier.CPU] * len(keys))

    few = KEYS[:1]
    before = decided(KEYS).deadline_seconds
    assert decided(few).num_chunks == 1
    for job_id in range(20):
        job = jobs.load_job(job_id, "r", tuple(few), ((),))
        policy.load_planned(job, [Tier.CPU] * len(few))
        late = JobResult(job_id, Outcome.DEADLINE, 0, 0, 0.0, waited_seconds=0.05)
        policy.load_ended(job_id, [late])
    assert decided(few).num_chunks == 0
    assert decided(KEYS).num_chunks == len(KEYS)
    assert decided(KEYS).deadline_seconds > before + 0.05
    clock.now += 61.0
    assert decided(few).num_chunks == 1


def test_one_long_forward_pass_prevents_no_load(policy: LoadPolicy, clock: Clock) -> None:
    """A load waited 30 s for a pass that used its blocks; compute would have waited, too."""
    run_steps(policy, clock, 0.010)
    job = jobs.load_job(1, "r", tuple(KEYS), ((),), deadline_seconds=0.1)
    policy.load_planned(replace(job, after_passes=True), [Tier.CPU] * len(KEYS))
    clock.now += 30.0
    loaded = JobResult(1, Outcome.DONE, len(KEYS), 32 * CHUNK_BYTES, 0.006, waited_seconds=30.0)
    policy.load_ended(1, [loaded])
    run_steps(policy, clock, 0.010)
    assert decide(policy, KEYS, num_cpu=32) == 32


def test_a_load_waits_for_the_store_of_its_chunks(policy: LoadPolicy, clock: Clock) -> None:
    for job_id in range(1, 9):
        policy.stores.planned(job_id)
        policy.stores.ended(job_id, [4.5])
    policy.stores.planned(9)

    def decided(after_job: int) -> LoadDecision:
        return policy.decide(0, PROMPT + 100, KEYS, [Tier.CPU] * len(KEYS), after_job=after_job)

    assert decided(8).num_chunks == len(KEYS)
    assert decided(9).num_chunks == 0
    clock.now += 3.9  # nearly done
    assert decided(9).num_chunks == len(KEYS)
    assert decided(9).deadline_seconds > decided(8).deadline_seconds


# -- peers ---------------------------------------------------------------------------------------


@pytest.fixture
def sharing(clock: Clock) -> LoadPolicy:
    """A policy with peers and Redis, equally fast so far."""
    made = make_policy(clock, redis(1 << 23, 0.08), (Tier.PEER, Tier.REDIS))
    for job_id in range(8):
        load(made, job_id, 32 * CHUNK_BYTES, 0.32, Tier.PEER)
    return made


def test_slow_peers_make_redis_no_slower(sharing: LoadPolicy) -> None:
    redis_speed = sharing.model.tiers[Tier.REDIS].seconds_per_byte
    for job_id in range(8, 12):
        load(sharing, job_id, 32 * CHUNK_BYTES, 3.0, Tier.PEER)
    assert sharing.model.tiers[Tier.REDIS].seconds_per_byte == redis_speed
    assert decide(sharing, KEYS, tier=Tier.PEER) == 0
    assert decide(sharing, KEYS, tier=Tier.REDIS) == 32


def test_a_load_of_two_tiers_measures_each(sharing: LoadPolicy) -> None:
    half = 16 * CHUNK_BYTES
    for job_id in range(8, 20):
        sharing.load_planned(load_job(job_id, KEYS), [Tier.PEER] * 16 + [Tier.REDIS] * 16)
        fetches = (Fetched(Tier.PEER, half, 0.04), Fetched(Tier.REDIS, half, 0.4))
        sharing.load_ended(job_id, [JobResult(job_id, Outcome.DONE, 32, 2 * half, 0.44, fetches)])
    peers, redis = (half * sharing.model.tiers[t].seconds_per_byte for t in (Tier.PEER, Tier.REDIS))
    assert peers == pytest.approx(0.04, rel=0.2)
    assert redis == pytest.approx(0.4, rel=0.2)


def test_stalled_peers_are_tried_again_without_a_probe(sharing: LoadPolicy, clock: Clock) -> None:
    load(sharing, 8, 0, 0.2, Tier.PEER, failed=True)
    assert decide(sharing, KEYS, tier=Tier.PEER) == 0
    assert decide(sharing, KEYS, tier=Tier.REDIS) == 32
    clock.now += 61.0
    assert decide(sharing, KEYS, tier=Tier.PEER) == 1, "on trial"
    load(sharing, 9, CHUNK_BYTES, 0.01, Tier.PEER)
    assert decide(sharing, KEYS, tier=Tier.PEER) == 32


def test_a_look_up_is_waited_for_if_one_tier_is_quick(sharing: LoadPolicy, clock: Clock) -> None:
    for slow, quick in ((Tier.PEER, Tier.REDIS), (Tier.REDIS, Tier.PEER)):
        assert sharing.lookup_seconds(0, PROMPT, {slow: 5.0, quick: 0.001}) > 0.0
    assert sharing.lookup_seconds(0, PROMPT, {Tier.PEER: 5.0, Tier.REDIS: 5.0}) == 0.0
    load(sharing, 8, 0, 0.2, Tier.REDIS, failed=True)
    assert sharing.lookup_seconds(0, PROMPT, {Tier.PEER: 0.001}) > 0.0
    assert sharing.lookup_seconds(0, PROMPT, {Tier.PEER: 5.0, Tier.REDIS: 0.0}) == 0.0
    load(sharing, 9, 0, 0.2, Tier.PEER, failed=True)
    assert sharing.lookup_seconds(0, PROMPT, {}) == 0.0


def test_a_trial_of_a_model_with_a_window_in_every_layer(clock: Clock) -> None:
    """Its prompts have no chunks that every hit loads: a hit loads the last few alone."""
    model = CostModel(clock, max_deadline_seconds=10.0)
    policy = LoadPolicy(model, CHUNK_TOKENS, (CHUNK_BYTES,), clock, num_prefix_parts=0)
    model.tiers[Tier.CPU].arrived(clock(), CHUNK_BYTES, 10 * RECOMPUTE)
    policy.observe_reports([forward(PROMPT, RECOMPUTE)] * 5)
    loaded = {tier: CHUNK_BYTES * (tier is Tier.CPU) for tier in Tier}

    def decided() -> LoadDecision:
        return policy.decide(0, PROMPT, [], [Tier.CPU] * 4, ends=(4,), other_bytes=lambda _: loaded)

    assert decided().num_chunks == 0
    clock.now += 200.0
    assert decided().num_chunks == 4
    assert decided().num_chunks == 0  # so the load before was a trial
