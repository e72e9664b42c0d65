"""Which chunks go on to Redis: by how often they are wanted, or by what a load would take."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from lmcache_connector.cost_model.cost_model import CostModel
from lmcache_connector.cost_model.load_policy import LoadPolicy
from lmcache_connector.plans import Tier
from lmcache_connector.scheduler.store_planner import ReuseTracker
from tests.scheduler.test_adapter import CHUNK, prompt
from tests.support.doubles.shadow_engine import ShadowEngine, Shape
from tests.support.doubles.shadow_worker import Faults


def test_sights_are_counted() -> None:
    tracker = ReuseTracker()
    assert [tracker.sight(b"a") for _ in range(3)] == [1, 2, 3]
    assert tracker.sight(b"b") == 1


def test_the_chunk_not_seen_for_longest_is_forgotten() -> None:
    tracker = ReuseTracker(capacity=2)
    for key in (b"a", b"b", b"a", b"c"):  # b goes
        tracker.sight(key)
    assert tracker.sight(b"b") == 1  # and now a
    assert tracker.sight(b"c") == 2


class Engine(ShadowEngine):
    """A load from Redis wins from three chunks on. ``sent``: the chunks that went on to Redis, by
    the request that sent them."""

    def __init__(self, model: Path) -> None:
        super().__init__(model, Shape(redis=True, admission="worth"), 0, Faults(slow=0.0))
        self.asked: list[tuple[int, int]] = []
        self.adapter.policy.pays_from_redis = self._pays  # type: ignore[method-assign]

    def _pays(self, end: int, num_bytes: int) -> bool:
        self.asked.append((end, num_bytes))
        return end >= 3 * CHUNK

    def sent_by(self, tokens: list[int], max_tokens: int = 1) -> list[int]:
        """Places in the request of the chunks that this request sends to Redis."""
        before = len(self.plans)
        name = self.add(tokens, max_tokens)
        self.run_until_idle()
        jobs = [job for plan in self.plans[before:] for job in plan.stores]
        assert all(job.request_id == name for job in jobs)
        return [
            chunk
            for job in jobs
            for run in job.runs
            for key, chunk in zip(run.keys, run.chunks, strict=True)
            if job.redis_keys is None or key in job.redis_keys
        ]


def test_only_prompts_that_could_win_a_load_are_written_to_redis(model: Path) -> None:
    engine = Engine(model)
    tokens = prompt(4, 5 * CHUNK)
    assert engine.sent_by(tokens[: 2 * CHUNK + 1]) == []
    assert not engine.ranks[0].remote
    assert len(engine.ranks[0].tier) == 2, "memory keeps it all the same"
    chunk_bytes = engine.asked[0][1] * CHUNK // engine.asked[0][0]
    assert (2 * CHUNK, 2 * chunk_bytes) in engine.asked
    assert engine.sent_by(tokens[: 4 * CHUNK + 1]) == [0, 1, 2, 3], "from memory, and computed"
    assert len(engine.ranks[0].remote) == 4
    assert engine.sent_by(tokens) == [4], "once"
    engine.check_whole()


def test_a_request_that_grows_long_enough_sends_what_came_before(model: Path) -> None:
    engine = Engine(model)
    sent = engine.sent_by(prompt(9, 2 * CHUNK + 1), 2 * CHUNK)
    assert sent == list(range(len(sent)))
    assert len(sent) >= 3
    engine.check_whole()


@pytest.mark.parametrize("mode", ["auto", "always"])
def test_redis_is_written_while_nothing_is_measured_and_where_every_hit_is_loaded(
    mode: Literal["auto", "always"],
) -> None:
    model = CostModel(clock=lambda: 0.0, max_deadline_seconds=10.0, mode=mode)
    policy = LoadPolicy(model, 128, (1 << 20,), lambda: 0.0)
    assert policy.pays_from_redis(128, 1 << 20)
    for _ in range(8):
        model.observe_prefill(1000, 0, 0.1)  # 10,000 tokens a second
    assert policy.pays_from_redis(128, 1 << 20), "how fast Redis is, nobody knows"
    model.calibrate(Tier.REDIS, 1e9, 0.02)  # a chunk a millisecond, after 20
    assert policy.pays_from_redis(128, 1 << 20) == (mode == "always")
    assert policy.pays_from_redis(1280, 10 << 20)
    model.calibrate(Tier.REDIS, 50e6, 0.0)
    assert policy.pays_from_redis(12800, 100 << 20) == (mode == "always")
