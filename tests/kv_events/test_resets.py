"""KV cache events of resets and misses: routers credit an instance with the hits it would have."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmcache_connector.audit.verdicts import Verdict
from lmcache_connector.kv_events.log import KvEvent
from lmcache_connector.plans import RankReport, Tier
from tests.scheduler.test_auditor import audits
from tests.support.doubles.lives import CHUNK, calm, prompt, serve
from tests.support.doubles.shadow_engine import ShadowEngine, Shape

SHAPE = Shape(audit_share=1e-9, num_blocks=40, tier_chunks=40, kv_events=True)


class Router:
    """The chunks of an instance in each tier, as a router knows them."""

    def __init__(self, engine: ShadowEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = engine
        # Otherwise vLLM's scheduler takes the events with every step.
        monkeypatch.setattr(engine.scheduler.connector, "take_events", list)
        self.known: set[tuple[Tier, bytes]] = set()

    def take(self) -> list[KvEvent]:
        events = self.engine.adapter.kv_events.take()
        for event in events:
            names = {(event.tier, name) for name in event.blocks.hashes}
            self.known = self.known | names if event.is_stored else self.known - names
        return events


@pytest.fixture
def router(model: Path, monkeypatch: pytest.MonkeyPatch) -> Router:
    return Router(calm(model, SHAPE), monkeypatch)


def test_chunks_of_old_weights_earn_no_credit(router: Router) -> None:
    """Old chunks are no hits any more. New ones are hits for instances with the same update."""
    engine, tokens = router.engine, prompt(1, 3 * CHUNK + 5)
    serve(engine, tokens)
    router.take()
    before = set(router.known)
    assert before
    assert engine.reset()
    engine.forget_prefixes()
    removed = router.take()
    assert removed
    assert not any(event.is_stored for event in removed)
    assert router.known == set()
    serve(engine, tokens)
    assert all(event.blocks.shared for event in router.take())
    assert router.known == before, "vLLM's names of the blocks know nothing of weights"


def test_chunks_of_the_same_weights_keep_their_credit(router: Router) -> None:
    engine, tokens = router.engine, prompt(1, 3 * CHUNK + 5)
    serve(engine, tokens)
    router.take()
    before = set(router.known)
    assert engine.reset(new_weights=False)
    engine.forget_prefixes()
    assert router.take() == []
    assert router.known == before


def test_a_chunk_of_wrong_kv_earns_no_credit(router: Router) -> None:
    engine, tokens = router.engine, prompt(1, 3 * CHUNK + 5)
    engine.adapter.auditor.noise.judge = lambda error, **_: Verdict.MISMATCH  # type: ignore[method-assign]
    serve(engine, tokens)
    router.take()
    assert router.known
    serve(engine, tokens)
    assert audits(engine) == {"mismatch": 1}
    told = router.take()
    assert not all(event.is_stored for event in told)
    assert not any(event.is_stored and event.blocks.shared for event in told)
    serve(engine, prompt(2, 3 * CHUNK + 5))  # under keys of this instance alone
    stored = [event for event in router.take() if event.is_stored]
    assert stored
    assert not any(event.blocks.shared for event in stored)


def test_a_miss_of_memory_says_nothing_of_redis(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk was evicted before a load planned from memory, which asks no other tier."""
    shape = Shape(num_blocks=40, tier_chunks=40, redis=True, kv_events=True)
    router = Router(calm(model, shape), monkeypatch)
    engine, tokens = router.engine, prompt(1, 3 * CHUNK + 5)
    serve(engine, tokens)
    (rank,) = engine.ranks
    engine.adapter.kv_events.apply(RankReport(0, (), (), written=tuple(rank.remote)))
    router.take()
    rank.tier.clear()
    monkeypatch.setattr(rank.chance, "choice", lambda outcomes: outcomes[0])
    serve(engine, tokens)
    (load,) = [job for plan in engine.plans for job in plan.loads]
    assert not load.may_fetch
    told = [event for event in router.take() if not event.is_stored]
    assert {event.tier for event in told} == {Tier.CPU}
