"""What makes KV unique, on real engines: salts, LoRA adapters, embeddings, pictures, pooling."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.engines.asks import Ask, Round, ask_again, ask_all
from tests.support.engines.calls import check_integrity
from tests.support.engines.instance import StartInstance, VllmInstance
from tests.support.engines.settings import BLOCK_SIZE, kv_transfer
from tests.support.engines.tiny_variants import build_adapter
from tests.support.prompts import random_prompt

NUM_TOKENS = 700
FULL = 512


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [build_adapter(folder / str(seed), seed) for seed in range(2)]


@pytest.fixture(scope="module")
def engine(start: StartInstance) -> Iterator[VllmInstance]:
    """Every request needs a salt here."""
    with start(
        kv_transfer(require_cache_salt=True),
        enable_lora=True,
        max_lora_rank=8,
        max_loras=2,
        max_cpu_loras=2,
        enable_prompt_embeds=True,
    ) as instance:
        yield instance
        instance.call(check_integrity)


def assert_same_kv(hit: Round, cold: Round, num_tokens: int) -> None:
    """All of it was loaded, and the bytes are those that were computed."""
    assert hit.loaded_tokens == num_tokens
    (loaded,), (computed,) = hit.answers, cold.answers
    blocks = num_tokens // BLOCK_SIZE
    assert loaded.blocks[:blocks] == computed.blocks[:blocks] != ()
    assert loaded.token_ids[0][0] == computed.token_ids[0][0]


def test_tenants_are_isolated(engine: VllmInstance) -> None:
    ask = Ask(random_prompt(1, NUM_TOKENS), salt="one")
    cold, hit = engine.call(ask_again, ask)
    assert_same_kv(hit, cold, FULL)
    other = replace(ask, salt="two")
    for first in engine.call(ask_again, other):
        assert first.answers[0].blocks == cold.answers[0].blocks  # the same KV, computed ...
    assert first.loaded_tokens == FULL  # ... and stored again, for the other tenant
    engine.reset_prefix_cache()
    assert engine.call(ask_all, [replace(ask, salt="three")]).loaded_tokens == 0


def test_where_salts_are_required_unsalted_requests_leave_nothing(engine: VllmInstance) -> None:
    ask = Ask(random_prompt(2, NUM_TOKENS))
    before = engine.counts()
    for served in engine.call(ask_again, ask):
        assert served.loaded_tokens == 0
    after = engine.counts()
    assert after.total("store_jobs") == before.total("store_jobs")
    assert after.total("lookups") == before.total("lookups")


def test_adapters_are_known_by_their_weights(engine: VllmInstance, adapters: list[Path]) -> None:
    one, two = map(str, adapters)
    plain = Ask(random_prompt(3, NUM_TOKENS), salt="s")
    asks = {
        "plain": plain,
        "one": replace(plain, lora=("one", 1, one)),
        "two": replace(plain, lora=("two", 2, two)),
    }
    cold = {name: engine.call(ask_all, [ask]) for name, ask in asks.items()}
    assert [served.loaded_tokens for served in cold.values()] == [0, 0, 0]
    assert len({served.answers[0].blocks for served in cold.values()}) == 3
    engine.reset_prefix_cache()
    for name, ask in asks.items():
        assert_same_kv(engine.call(ask_all, [ask]), cold[name], FULL)
    engine.reset_prefix_cache()
    renamed = replace(plain, lora=("one, said otherwise", 3, one))
    assert_same_kv(engine.call(ask_all, [renamed]), cold["one"], FULL)
    engine.reset_prefix_cache()
    namesake = replace(plain, lora=("one", 4, two))
    assert_same_kv(engine.call(ask_all, [namesake]), cold["two"], FULL)


def test_an_adapter_overwritten_under_a_running_engine_is_left_alone(
    engine: VllmInstance, tmp_path: Path
) -> None:
    path = build_adapter(tmp_path / "a", 10)
    ask = Ask(random_prompt(4, NUM_TOKENS), salt="s", lora=("mine", 10, str(path)))
    cold, hit = engine.call(ask_again, ask)
    assert_same_kv(hit, cold, FULL)
    build_adapter(path, 11)
    engine.reset_prefix_cache()
    before = engine.counts().total("store_jobs")
    # vLLM still computes with the weights it has read: stored under the new files' name, this KV
    # would be wrong for whoever reads them.
    still = engine.call(ask_all, [ask])
    assert still.loaded_tokens == 0
    assert still.answers[0].blocks == cold.answers[0].blocks
    assert engine.counts().total("store_jobs") == before
    engine.reset_prefix_cache()
    new = replace(ask, lora=("mine", 11, str(path)))
    changed = engine.call(ask_all, [new])
    assert changed.loaded_tokens == 0
    assert changed.answers[0].blocks[0] != cold.answers[0].blocks[0]


def test_prompt_embeddings(engine: VllmInstance) -> None:
    ask = Ask([0] * NUM_TOKENS, salt="s", embeds=1)
    cold, hit = engine.call(ask_again, ask)
    assert_same_kv(hit, cold, FULL)
    engine.reset_prefix_cache()
    other = engine.call(ask_all, [replace(ask, embeds=2)])
    assert other.loaded_tokens == 0
    assert other.answers[0].blocks[0] != cold.answers[0].blocks[0]
    # Where embeddings stand, the ids that vLLM shows are zeros.
    engine.reset_prefix_cache()
    assert engine.call(ask_all, [replace(ask, embeds=None)]).loaded_tokens == 0
