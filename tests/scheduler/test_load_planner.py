"""A decision holds for as long as what it was made from."""

from __future__ import annotations

from itertools import count
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
    PrefillWork,
    RankReport,
    Tier,
)
from lmcache_connector.scheduler.load_planner import LoadPlanner
from lmcache_connector.scheduler.request_state import RequestState, SchedulerSettings

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
        forward = ForwardTime(PrefillWork(4096, 0, 0), 4.096)
        self.policy.observe_reports([RankReport(0, (), (), (forward,))])
        self.tally = Tally()
        self.planner = LoadPlanner(SETTINGS, index, self.policy, self.tally, count(1).__next__)

    def offer(self, num_computed_tokens: int) -> int:
        first = num_computed_tokens // CHUNK
        hit = Hit(first, range(first + 1, NUM_CHUNKS + 1), NUM_CHUNKS)
        return self.planner.offer(self.state, num_computed_tokens, hit, may_be_in_step=False)


def test_a_smaller_local_hit_gets_a_decision_and_a_deadline_of_its_own() -> None:
    """Under memory pressure vLLM evicts what it had of a request that still waits. The load that
    was allowed 10 ms takes 40 then: it was discarded, and recomputed in full."""
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
    planning, in_use = Planning(), BlocksInUse(2, is_told=True)
    in_use.freed([[7]])
    num_tokens = planning.offer(0)
    blocks = list(range(100, 100 + num_tokens // 16))
    assert not planning.planner.plan(planning.state, [blocks], num_tokens, in_use).after_passes
    blocks[3] = 7
    assert planning.planner.plan(planning.state, [blocks], num_tokens, in_use).after_passes
