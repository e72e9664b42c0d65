"""What a small CPU tier of a real engine keeps, when many want it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from lmcache_connector.retention.hints import tenant_of
from tests.support.engines.asks import Answer, Ask, ask_all
from tests.support.engines.calls import check_integrity, worker_of
from tests.support.engines.instance import StartInstance, VllmInstance
from tests.support.engines.probe import EngineProbe
from tests.support.engines.settings import CHUNK_SIZE, kv_transfer
from tests.support.prompts import random_prompt

_CPU_GIB = 0.04
_PROMPT_TOKENS = 4 * CHUNK_SIZE + 10
_STORED_TOKENS = 4 * CHUNK_SIZE


@pytest.fixture(scope="module")
def instance(start: StartInstance) -> Iterator[VllmInstance]:
    with start(kv_transfer(cpu_gib=_CPU_GIB, pin_share=0.5)) as instance:
        yield instance


def ask(seed: int, salt: str | None = None, **hints: Any) -> Ask:
    sampling = {"extra_args": {"kv_transfer_params": hints}} if hints else {}
    return Ask(tuple(random_prompt(seed, _PROMPT_TOKENS)), salt=salt, sampling=sampling)


def serve(instance: VllmInstance, asked: Ask) -> tuple[Answer, int]:
    """And how many tokens the connector loaded for it."""
    done = instance.call(ask_all, [asked])
    return done.answers[0], done.loaded_tokens


def flood(instance: VllmInstance, seed: int, salt: str) -> None:
    """Twice as much as the tier holds, of other prompts."""
    num_prompts = 2 * instance.call(capacity_chunks) * CHUNK_SIZE // _STORED_TOKENS
    assert 4 <= num_prompts <= 200
    for i in range(num_prompts):
        serve(instance, ask(seed + i, salt))
    instance.reset_prefix_cache()


def capacity_chunks(probe: EngineProbe) -> int:
    worker = worker_of(probe)
    capacity = worker._settings.engine.rank_gib * 2**30
    return int(capacity / worker._settings.parts[0].geometries[0].chunk_bytes)


def holdings(probe: EngineProbe) -> Any:
    engine = worker_of(probe)._engine
    with engine._cpu.cpu_lock:
        engine._ledger.settle()
    return engine.holdings()


def test_a_pinned_prompt_survives_a_flood_of_others(instance: VllmInstance) -> None:
    """Pinned from the first request on, or by one that vLLM's own cache served; the same prompt
    without a pin is gone, and what comes back is what was computed."""
    cold, _ = serve(instance, ask(1, "crowd", pin=True, ttl_seconds=600))
    serve(instance, ask(2, "crowd"))
    serve(instance, ask(3, "crowd"))
    later, loaded = serve(instance, ask(3, "crowd", pin=True))
    assert (later.cached_tokens, loaded) == (_PROMPT_TOKENS // 128 * 128, 0)  # vLLM had it
    pinned_bytes = instance.call(holdings).pinned_bytes
    flood(instance, 1000, "crowd")
    assert instance.call(holdings).pinned_bytes == pinned_bytes > 0
    hit, loaded = serve(instance, ask(1, "crowd"))
    assert loaded == _STORED_TOKENS
    assert hit.blocks[: _STORED_TOKENS // 128] == cold.blocks[: _STORED_TOKENS // 128]
    assert serve(instance, ask(3, "crowd"))[1] == _STORED_TOKENS
    assert serve(instance, ask(2, "crowd"))[1] == 0
    instance.call(check_integrity)


def test_a_flood_takes_no_more_than_its_share(instance: VllmInstance) -> None:
    """Half of the tier: of what another tenant holds within its own half, all stays."""
    mine = [ask(10 + i, "mine") for i in range(2)]
    for asked in mine:
        serve(instance, asked)
    flood(instance, 2000, "greedy")
    assert [serve(instance, asked)[1] for asked in mine] == [_STORED_TOKENS] * 2
    held = dict(instance.call(holdings).tenant_bytes)
    assert held[tenant_of("greedy")[:1].hex()] <= 0.55 * _CPU_GIB * 2**30
    counts = instance.counts()
    assert counts.total("cpu_evictions", "over_share") > 0


def test_what_has_expired_makes_room_before_anything_else(instance: VllmInstance) -> None:
    before = instance.counts().total("cpu_evictions", "expired")
    serve(instance, ask(20, ttl_seconds=0.001))
    flood(instance, 3000, "crowd")
    assert instance.counts().total("cpu_evictions", "expired") > before


def test_hints_that_make_no_sense_change_nothing(instance: VllmInstance) -> None:
    before = instance.counts().total("retention_hints", "ignored")
    hints = {"pin": "always", "ttl_seconds": float("nan"), "priority": 10**18, "other": [{}] * 1000}
    serve(instance, ask(40, None, **hints))
    instance.reset_prefix_cache()
    assert serve(instance, ask(40))[1] == _STORED_TOKENS  # the same name with hints and without
    assert instance.counts().total("retention_hints", "ignored") == before + 3
