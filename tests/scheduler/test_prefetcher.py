"""What is fetched ahead for requests that wait in vLLM's queue, and what is given back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm.v1.core.sched.interface import PauseState

from lmcache_connector.cost_model.cost_model import CostModel
from lmcache_connector.cost_model.policy import LoadPolicy
from lmcache_connector.keys.prefix_hash import PrefixHasher
from lmcache_connector.keys.request_keys import RequestIdentity, RequestKeys
from lmcache_connector.kv_parts.part import Part, Rule
from lmcache_connector.lookup.background_lookup import PENDING, Pending, RequestLookup
from lmcache_connector.lookup.chunk_index import ChunkIndex
from lmcache_connector.lookup.hit_finder import FetchAhead, HitFinder
from lmcache_connector.metrics.samples import Tally
from lmcache_connector.plans import Fetched, JobResult, Outcome, PrefetchJob, Tier
from lmcache_connector.scheduler.prefetcher import Prefetcher
from lmcache_connector.scheduler.request_state import RequestState, SchedulerSettings
from tests.support.doubles.lives import CHUNK, prompt
from tests.support.doubles.shadow_engine import ShadowEngine, Shape
from tests.support.doubles.shadow_worker import Faults
from tests.support.measured import calibrate

PARTS = (Part(Rule.PREFIX, (0,), 16),)
MIB = 1 << 20
SIZE = 128  # tokens of a chunk, which takes a MiB


class Answers(HitFinder):
    """What Redis has of each request: its leading chunks. None: it has not answered."""

    def __init__(self) -> None:
        self.held: dict[str, int | None] = {}
        self.num_looked_at = 0  # chunks of prompts

    def find_ahead(self, asked: RequestLookup, num_computed_tokens: int) -> FetchAhead | Pending:
        self.num_looked_at += len(asked.keys.keys)
        end = self.held[asked.request.request_id]
        if end is None:
            return PENDING
        first = num_computed_tokens // SIZE
        chunks = range(first, end)
        return FetchAhead(end, tuple((0, i, asked.keys.keys[i]) for i in chunks))


class Scene:
    """``mib``: may be fetched ahead. A prompt of 1,000 tokens takes a second to compute."""

    def __init__(self, mib: int) -> None:
        settings = SchedulerSettings(
            SIZE, PARTS, 1, loads=True, stores=True, prefetch_bytes=mib * MIB
        )
        self.model = CostModel(clock=lambda: 0.0, max_deadline_seconds=10.0)
        for _ in range(8):
            self.model.observe_prefill(1000, 0, 1.0)
        for tier in Tier:
            calibrate(self.model, tier, 1e9, 0.0)
        policy = LoadPolicy(self.model, SIZE, (MIB,), lambda: 0.0)
        self.tally, self.hits = Tally(), Answers()
        self.prefetcher = Prefetcher(settings, policy, self.tally, count(1).__next__, ChunkIndex(1))
        self._hasher = PrefixHasher({}, SIZE)

    def queue(self, name: str, num_chunks: int | None, tokens: Sequence[int] = ()) -> RequestState:
        """A request whose first ``num_chunks`` Redis has."""
        keys = RequestKeys(self._hasher, RequestIdentity(cache_salt=None if tokens else name))
        tokens = tokens or [0] * 1000
        keys.extend(tokens)
        request = SimpleNamespace(request_id=name, num_tokens=len(tokens))
        state = RequestState(request, keys)
        self.hits.held[name] = num_chunks
        self.prefetcher.queued(state)
        return state

    def plan(self) -> list[tuple[str, int]]:
        """Whose jobs, and of how many chunks."""
        self.jobs = list(self.prefetcher.plan(self.hits))
        return [(state.request.request_id, len(job.keys)) for state, job in self.jobs]

    def end(self, state: RequestState, *jobs: PrefetchJob, failed: bool = False) -> None:
        for job in jobs:
            outcome = Outcome.DEADLINE if failed else Outcome.DONE
            result = JobResult(
                job.job_id, outcome, 0, 0, 1.0, (Fetched(Tier.REDIS, 0, 1.0, failed),)
            )
            self.prefetcher.ended(state, job, [result])


def test_who_came_first_is_served_first_and_the_others_wait_for_room() -> None:
    scene = Scene(mib=6)
    first, second, third = (scene.queue(name, 4) for name in "abc")
    assert scene.plan() == [("a", 4), ("b", 2)]
    assert scene.plan() == []
    assert scene.prefetcher.release(first) == [job for job, _ in first.prefetch.jobs.values()]
    assert scene.plan() == [], "its job is under way"
    scene.end(first, *(job for job, _ in list(first.prefetch.jobs.values())))
    assert scene.plan() == [("c", 4)]
    for state in (second, third):
        scene.prefetcher.release(state)
        scene.end(state, *(job for job, _ in list(state.prefetch.jobs.values())))
    scene.prefetcher.check_integrity()


def test_what_two_requests_share_is_fetched_once_and_kept_while_one_waits() -> None:
    scene = Scene(mib=100)
    tokens = [1] * 1000
    first, second = (scene.queue(name, 5, tokens) for name in "ab")
    assert scene.plan() == [("a", 5)]
    scene.end(first, scene.jobs[0][1])
    scene.prefetcher.release(first)
    assert scene.prefetcher.take_unwanted() == ()
    scene.prefetcher.release(second, loaded=first.keys.keys[:2])
    assert scene.prefetcher.take_unwanted() == tuple(first.keys.keys[2:5])
    scene.prefetcher.check_integrity()


def test_redis_that_does_not_answer_is_not_asked_for_more() -> None:
    scene = Scene(mib=100)
    calibrate(scene.model, Tier.REDIS, 20e6, 0.0)
    state, other = scene.queue("a", 3), scene.queue("b", None)
    assert scene.plan() == [("a", 1)] * 3
    jobs = [job for _, job in scene.jobs]
    scene.hits.held["b"] = 3
    result = JobResult(
        jobs[0].job_id, Outcome.DEADLINE, 0, 0, 1.0, (Fetched(Tier.REDIS, 0, 1.0, True),)
    )
    assert scene.prefetcher.ended(state, jobs[0], [result]) == jobs[1:], "they are cancelled"
    assert scene.plan() == [], "it has stalled"
    calibrate(scene.model, Tier.REDIS, 20e6, 0.0)
    assert scene.plan() == [("b", 1)] * 3
    assert other.prefetch.jobs.keys() == {job.job_id for _, job in scene.jobs}


def test_a_step_with_a_long_queue_looks_at_few_prompts() -> None:
    """Each long one takes as long as a decode step of a fast model."""
    scene = Scene(mib=10_000)
    for i in range(40):
        scene.queue(f"long{i}", 100, [i] * (100 * SIZE))
    planned = 0
    for _ in range(40):
        before = scene.hits.num_looked_at
        planned += len({name for name, _ in scene.plan()})
        assert 0 < scene.hits.num_looked_at - before <= 300 or planned == 40
    assert planned == 40, "all are served in the end"


# -- under vLLM's scheduler --------------------------------------------------------------------


def crowded(model: Path, **shape: object) -> tuple[ShadowEngine, str, list[int]]:
    """A request runs and takes nearly all blocks. Redis has the prompt of another that waits, and
    memory has nothing. Returns the name of the one that waits."""
    engine = ShadowEngine(model, Shape(redis=True, **shape), 3, Faults(slow=0.0))  # type: ignore[arg-type]
    # Whether it pays is tested with the policy; here it would follow from how busy the machine is.
    engine.adapter.policy.pays_from = lambda *_: True  # type: ignore[method-assign]
    wanted = prompt(5, 4 * CHUNK + 3)
    engine.add(wanted, 1)
    engine.run_until_idle()
    engine.scheduler.reset_prefix_cache()
    for rank in engine.ranks:
        rank.evict(100)
    engine.add(prompt(6, 9 * CHUNK), 60)
    while not engine.scheduler.running:
        engine.step()
    for _ in range(engine.shape.depth):  # what has left memory is told with a later step
        engine.step()
    return engine, engine.add(wanted, 3), wanted


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("depth", [1, 2])
def test_chunks_come_into_memory_before_their_request_is_scheduled(
    model: Path, world_size: int, depth: int
) -> None:
    engine, waiting, _ = crowded(model, world_size=world_size, depth=depth)
    for _ in range(40):
        engine.step()
        if all(rank.num_prefetched_chunks == 4 for rank in engine.ranks):
            break
    assert engine.requests[waiting].num_computed_tokens == 0
    assert not engine.is_loading(waiting)
    assert [rank.num_prefetched_chunks for rank in engine.ranks] == [4] * world_size
    before = len(engine.plans)
    engine.run_until_idle()
    (load,) = [job for plan in engine.plans[before:] for job in plan.loads]
    assert not load.may_fetch
    assert sum(rank.num_prefetched_chunks for rank in engine.ranks) == 4 * world_size
    engine.check_whole()
    engine.check_answer(waiting)


def test_a_pause_waits_for_no_prefetch(model: Path) -> None:
    """A slow Redis may take twice ``load_deadline_seconds`` for each."""
    engine, waiting, _ = crowded(model)
    faults = engine.ranks[0].faults
    faults.late_prefetches = True
    for _ in range(20):
        engine.step()
    assert any(plan.prefetches for plan in engine.plans)
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    engine.run_until_idle(max_steps=20)
    assert engine.ranks[0].num_prefetched_chunks == 0
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    faults.late_prefetches = False
    engine.run_until_idle()
    engine.check_whole()
    engine.check_answer(waiting)


@pytest.mark.parametrize("how", ["abort", "reset", "sleep"])
def test_nothing_is_left_of_what_was_fetched_for_nobody(model: Path, how: str) -> None:
    engine, waiting, _ = crowded(model)
    faults = engine.ranks[0].faults
    faults.stuck = True
    while not any(plan.prefetches for plan in engine.plans):
        engine.step()
    if how == "abort":
        engine.abort(waiting)
    elif how == "reset":
        assert engine.reset(preempt=True)
    faults.stuck = False
    if how == "sleep":
        engine.sleep()
    engine.step()
    cancelled = {job for plan in engine.plans for job in plan.cancelled_loads}
    assert cancelled >= {job.job_id for plan in engine.plans for job in plan.prefetches}
    assert sum((plan.unwanted for plan in engine.plans), ())
    engine.run_until_idle()
    engine.check_whole()
