"""The cost model as the scheduler side keeps it: figures from reports, waits, probes."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from lmcache_connector.cost_model.cost_model import CostModel
from lmcache_connector.cost_model.decision import Reason
from lmcache_connector.cost_model.load_policy import LOOKUP_SHARE, LoadPolicy
from lmcache_connector.plans import (
    Calibration,
    ForwardTime,
    JobResult,
    LoadJob,
    Outcome,
    PrefillWork,
    RankReport,
    Tier,
    TransferTime,
)

CHUNK_TOKENS, CHUNK_BYTES = 256, 1 << 20
PROMPT = 32 * CHUNK_TOKENS
RECOMPUTE = 0.8192  # seconds of PROMPT
KEYS = [bytes([i]) * 32 for i in range(32)]


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def choice(clock: Clock) -> LoadPolicy:
    """One that knows its prefill speed and both links."""
    made = LoadPolicy(
        CostModel(clock, random.Random(1), 10.0, explores=frozenset()),
        CHUNK_TOKENS,
        CHUNK_BYTES,
        clock,
    )
    made.calibrate([Calibration(TransferTime(CHUNK_BYTES, 0.0002), TransferTime(1 << 23, 0.08))])
    made.observe_reports([forward(PROMPT, RECOMPUTE)])
    return made


def forward(num_tokens: int, seconds: float, rank: int = 0) -> RankReport:
    work = PrefillWork(num_tokens, 0, 0)
    return RankReport(rank, (), (), forwards=(ForwardTime(work, seconds),))


def probed(num_bytes: int, seconds: float, rank: int = 0) -> RankReport:
    return RankReport(rank, (), (), redis=TransferTime(num_bytes, seconds))


def load_job(job_id: int, keys: list[bytes]) -> LoadJob:
    return LoadJob(job_id, f"r{job_id}", tuple(keys), ((),), 0, 1.0, True, 0)


def decide(choice: LoadPolicy, keys: list[bytes], num_local: int = 0) -> int:
    local = set(keys[:num_local])
    return choice.decide(0, PROMPT + 100, keys, map(local.__contains__, keys)).num_chunks


def fetched(job_id: int, num_bytes: int, seconds: float, failed: bool = False) -> JobResult:
    outcome = Outcome.DEADLINE if failed else Outcome.DONE
    return JobResult(job_id, outcome, 0, num_bytes, num_bytes, seconds, seconds, failed)


def test_a_calibrated_link_is_used_from_the_first_request_on(choice: LoadPolicy) -> None:
    assert decide(choice, KEYS) == 32
    assert decide(choice, KEYS, num_local=10) == 32


def test_a_copy_is_part_of_a_load_from_redis(choice: LoadPolicy) -> None:
    links = choice.model.snapshot().links
    redis, local = links[Tier.REDIS], links[Tier.CPU]
    assert 1 / redis.bytes_per_second == pytest.approx(
        0.08 / (1 << 23) + 1 / local.bytes_per_second
    )


def test_the_slowest_rank_counts(choice: LoadPolicy) -> None:
    choice.observe_reports([probed(1 << 23, 0.01), probed(1 << 20, 0.5, rank=1)])
    assert choice.model.snapshot().links[Tier.REDIS].bytes_per_second < 3e6
    assert decide(choice, KEYS) == 0
    before = choice.model.compute_seconds(0, PROMPT)
    for _ in range(20):
        choice.observe_reports([forward(PROMPT, RECOMPUTE), forward(PROMPT, 1.5 * RECOMPUTE, 1)])
    after = choice.model.compute_seconds(0, PROMPT)
    assert before is not None
    assert after == pytest.approx(1.5 * before, rel=0.15)


def test_a_slow_load_teaches_what_redis_is_worth(choice: LoadPolicy) -> None:
    for job_id in range(4):
        choice.load_planned(load_job(job_id, KEYS), tuple(KEYS))
        choice.load_ended(job_id, [fetched(job_id, 32 * CHUNK_BYTES, 3.0)])
    assert decide(choice, KEYS) == 0
    assert decide(choice, KEYS, num_local=8) == 8


def test_a_load_that_was_cut_off_stalls_redis_until_a_probe_arrives(choice: LoadPolicy) -> None:
    choice.load_planned(load_job(1, KEYS), tuple(KEYS))
    choice.load_ended(1, [fetched(1, 0, 0.2, failed=True)])
    decision = choice.decide(0, PROMPT, KEYS, [False] * len(KEYS))
    assert (decision.num_chunks, decision.reason) == (0, Reason.SOURCE_STALLED)
    choice.observe_reports([probed(1 << 23, 0.01)])
    assert decide(choice, KEYS) == 32


def test_missing_chunks_say_nothing_of_the_link(choice: LoadPolicy) -> None:
    choice.load_planned(load_job(1, KEYS), tuple(KEYS))
    choice.load_ended(1, [JobResult(1, Outcome.MISSING, 0, 0, 0, 0.3, 0.3)])
    assert decide(choice, KEYS) == 32


def test_what_is_queued_for_redis_counts_until_it_ends(choice: LoadPolicy) -> None:
    others = [bytes([i, 1]) * 16 for i in range(255)]
    for job_id in range(3):
        choice.load_planned(load_job(job_id, others), tuple(others))
    assert decide(choice, KEYS) == 0
    for job_id in range(3):
        choice.load_ended(job_id, [fetched(job_id, 255 * CHUNK_BYTES, 2.55)])
    assert decide(choice, KEYS) == 32


def test_what_another_load_fetches_already_is_no_queue(choice: LoadPolicy) -> None:
    for job_id in range(3):
        choice.load_planned(load_job(job_id, KEYS), tuple(KEYS))
    assert decide(choice, KEYS) == 0  # two more than the one to share
    choice.load_ended(1, [fetched(1, 32 * CHUNK_BYTES, 0.33)])
    choice.load_ended(2, [fetched(2, 32 * CHUNK_BYTES, 0.33)])
    assert decide(choice, KEYS) == 32


def test_a_lookup_is_waited_for_as_long_as_the_prompt_is_worth(choice: LoadPolicy) -> None:
    patience = choice.lookup_seconds(0, PROMPT, last_lookup_seconds=0.0)
    assert patience == pytest.approx(LOOKUP_SHARE * RECOMPUTE, rel=0.01)
    assert choice.lookup_seconds(0, PROMPT, last_lookup_seconds=0.2) == 0.0
    assert choice.lookup_seconds(0, 8 * PROMPT, last_lookup_seconds=0.2) > 0.2
    choice.observe_reports([probed(0, 1.0)])
    assert choice.lookup_seconds(0, 8 * PROMPT, last_lookup_seconds=0.0) == 0.0


def test_redis_is_probed_only_while_somebody_wants_it(choice: LoadPolicy, clock: Clock) -> None:
    assert not choice.take_probe()
    choice.observe_reports([probed(0, 1.0)])
    assert not choice.take_probe()
    probes = 0
    for _ in range(600):
        clock.now += 1.0
        choice.lookup_seconds(0, PROMPT, 0.0)
        probes += choice.take_probe()
    assert 10 < probes < 20  # in ten minutes: at first every few seconds, then every minute
    choice.observe_reports([probed(1 << 23, 0.01)])
    choice.lookup_seconds(0, PROMPT, 0.0)
    assert not choice.take_probe()
    clock.now += 61.0
    choice.lookup_seconds(0, PROMPT, 0.0)
    assert choice.take_probe()  # the figures are old


def test_a_decision_against_redis_asks_for_a_probe(choice: LoadPolicy, clock: Clock) -> None:
    choice.observe_reports([probed(1 << 20, 0.9)])
    assert decide(choice, KEYS) == 0
    assert choice.take_probe()
    assert decide(choice, KEYS) == 0
    assert not choice.take_probe()
