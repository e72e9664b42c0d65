"""Weights that change under a running engine, or while it loads: no request gets KV of other
weights, and engines with equal weights share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.calls import (
    check_integrity,
    forget,
    sums_are_alike,
    wait_for_writes,
)
from tests.support.engines.instance import StartInstance, VllmInstance
from tests.support.engines.probe import Served
from tests.support.engines.settings import CHUNK_SIZE, PATIENT, kv_transfer, random_prompt
from tests.support.engines.updates import (
    accept_updates,
    build_other_layers,
    flip_one_bit,
    load_rows,
    move_weights,
    update_during_a_load,
    update_from,
    update_under_load,
    weights_name,
)
from tests.support.redis.servers import Server

LIMITS = PATIENT
NUM_TOKENS, HIT = 700, 2 * CHUNK_SIZE


@pytest.fixture(scope="module")
def engine(start: StartInstance, valkey: Server) -> Iterator[VllmInstance]:
    with start(sharing(valkey)) as instance:
        yield instance
        instance.call(check_integrity)


@pytest.fixture(scope="module")
def twin(start: StartInstance, valkey: Server) -> Iterator[VllmInstance]:
    with start(sharing(valkey)) as instance:
        yield instance
        instance.call(check_integrity)


def sharing(valkey: Server, **settings: Any) -> dict[str, Any]:
    return kv_transfer(redis_url=valkey.url, **settings)


def test_the_same_weights_hit_after_every_reset(engine: VllmInstance) -> None:
    prompt, name = random_prompt(1, NUM_TOKENS), engine.call(weights_name)
    cold = engine.serve(prompt)
    for _ in range(3):
        engine.reset_prefix_cache()
        hit = engine.serve(prompt)
        assert hit.external_hit_tokens == HIT
        assert hit.block_digests[:4] == cold.block_digests[:4]
    assert engine.call(weights_name) == name
    assert name.startswith("sha256:")


@pytest.mark.parametrize("strength", [0.02, 0.00001])
def test_after_an_update_no_request_gets_old_kv(
    engine: VllmInstance, twin: VllmInstance, strength: float
) -> None:
    """Reset by vLLM's defaults, as trainers do. An engine with the same update shares new
    chunks."""
    prompt = random_prompt(int(1 / strength), NUM_TOKENS)
    old = engine.serve(prompt)
    engine.reset_prefix_cache()
    assert engine.serve(prompt).external_hit_tokens == HIT
    for each in (engine, twin):
        assert each.call(move_weights, strength) > 0
        each.reset_prefix_cache()
    new = engine.serve(prompt)
    assert new.external_hit_tokens == 0
    assert new.block_digests[:4] != old.block_digests[:4]
    for _ in range(29):
        engine.reset_prefix_cache()
        again = engine.serve(prompt)
        assert again.external_hit_tokens == HIT
        assert again.block_digests[:4] == new.block_digests[:4]
    engine.call(wait_for_writes)
    shared = twin.serve(prompt)
    assert shared.external_hit_tokens == HIT
    assert shared.block_digests[:4] == new.block_digests[:4]


def test_one_bit_is_an_update(engine: VllmInstance) -> None:
    prompt = random_prompt(3, NUM_TOKENS)
    engine.serve(prompt)
    name = engine.call(weights_name)
    engine.call(flip_one_bit)
    engine.reset_prefix_cache()
    assert engine.serve(prompt).external_hit_tokens == 0
    engine.call(flip_one_bit)
    engine.reset_prefix_cache()
    assert engine.serve(prompt).external_hit_tokens == HIT
    assert engine.call(weights_name) == name


def test_weights_loaded_without_a_reset_are_noticed(engine: VllmInstance) -> None:
    prompt, other = random_prompt(4, NUM_TOKENS), random_prompt(5, NUM_TOKENS)
    old = engine.serve(prompt)
    name = engine.call(weights_name)
    engine.call(load_rows, 0.5)
    assert engine.call(weights_name) != name
    engine.serve(other)  # vLLM's own cache may have old KV of `prompt`
    engine.reset_prefix_cache()
    new = engine.serve(prompt)
    assert new.external_hit_tokens == 0
    assert new.block_digests[:4] != old.block_digests[:4]


def check_hit_of_now(engine: VllmInstance, prompt: list[int]) -> None:
    """Loaded KV equals KV computed with the weights in memory."""
    fresh = engine.serve(prompt, skip_reading_prefix_cache=True)
    engine.reset_prefix_cache()
    hit = engine.serve(prompt)
    assert fresh.external_hit_tokens == 0
    assert hit.external_hit_tokens == HIT
    assert hit.block_digests[:4] == fresh.block_digests[:4]


def test_an_update_beside_requests_mixes_no_kv(engine: VllmInstance) -> None:
    prompts = [random_prompt(20 + i, NUM_TOKENS) for i in range(4)]
    engine.serve(prompts[0])
    engine.reset_prefix_cache()
    assert engine.serve(prompts[0]).external_hit_tokens == HIT
    old = engine.call(weights_name)
    engine.reset_prefix_cache()
    engine.call(update_under_load, prompts, 0.5)
    assert engine.call(weights_name) != old
    if not sums_are_alike(engine):
        pytest.skip("runs to its end on a CPU on which a token's KV does not depend on its step")
    for prompt in prompts:
        check_hit_of_now(engine, prompt)


def test_an_update_during_a_load_from_redis_leaves_no_old_kv(engine: VllmInstance) -> None:
    prompt = random_prompt(30, NUM_TOKENS)
    engine.serve(prompt)
    engine.call(wait_for_writes)
    engine.call(forget)
    assert engine.call(update_during_a_load, prompt, 0.5) == HIT
    assert engine.serve(prompt).external_hit_tokens == 0
    check_hit_of_now(engine, prompt)


def test_engines_with_equal_updates_share(
    start: StartInstance, valkey: Server, tiny_model: Path, tmp_path: Path
) -> None:
    """By vLLM's own calls. Back at the first weights, the first chunks are hits again."""
    other = build_other_layers(tmp_path / "other", tiny_model)
    prompt, transfer = random_prompt(14, NUM_TOKENS), sharing(valkey, namespace="updated")
    arguments: dict[str, Any] = {
        "weight_transfer_config": {"backend": "folder"},
        "prepare": accept_updates,
    }

    def serve(engine: VllmInstance, folder: Path | None = None) -> Served:
        if folder is not None:
            engine.call(update_from, folder)
        engine.reset_prefix_cache()
        served = engine.serve(prompt)
        engine.call(wait_for_writes)
        return served

    with start(transfer, **arguments) as one:
        old, name = serve(one), one.call(weights_name)
        new, updated_name = serve(one, other), one.call(weights_name)
        assert new.external_hit_tokens == 0
        assert new.block_digests[:4] != old.block_digests[:4]
        back = serve(one, tiny_model)
        assert back.external_hit_tokens == HIT
        assert back.block_digests[:4] == old.block_digests[:4]
        assert one.call(weights_name) == name
    with start(transfer, **arguments) as two:
        assert serve(two).external_hit_tokens == HIT
        shared = serve(two, other)
        assert shared.external_hit_tokens == HIT
        assert shared.block_digests[:4] == new.block_digests[:4]
        assert two.call(weights_name) == updated_name
