"""What tells models apart, and what does not, on real engines that share one Redis."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.asks import Ask, ask_all
from tests.support.engines.calls import check_integrity, chunk_keys, wait_for_writes
from tests.support.engines.instance import StartInstance, VllmInstance
from tests.support.engines.probe import Served
from tests.support.engines.settings import BLOCK_SIZE, CHUNK_SIZE, kv_transfer
from tests.support.engines.tiny_variants import (
    build_adapter,
    build_long_rope_model,
    retrain_rows,
)
from tests.support.limits import PATIENT
from tests.support.prompts import random_prompt
from tests.support.redis.servers import Server
from tests.support.redis.values import wait_for_chunks

LIMITS = PATIENT

HIT = 3 * CHUNK_SIZE
NUM_TOKENS = HIT + 100
NUM_HEADS = 4
ROWS = range(1000, 1064)
PROMPT = [*range(990, 1070), *random_prompt(1, NUM_TOKENS - 80)]


@pytest.fixture(scope="module")
def transfer(valkey: Server) -> dict[str, Any]:
    return kv_transfer(redis_url=valkey.unix_url)


def store(instance: VllmInstance, valkey: Server) -> Served:
    """Compute the prompt, and wait until all its chunks are in Redis."""
    cold = instance.serve(PROMPT)
    assert cold.external_hit_tokens == 0
    wait_for_chunks(valkey, instance.call(chunk_keys, PROMPT), NUM_HEADS)
    instance.call(check_integrity)
    return cold


@pytest.fixture(scope="module")
def cold(start: StartInstance, transfer: dict[str, Any], valkey: Server) -> Served:
    """The prompt as an instance of 8,192 tokens has computed and stored it."""
    with start(transfer) as instance:
        return store(instance, valkey)


def test_another_limit_of_length_shares_where_the_model_does_not_compute_with_it(
    start: StartInstance, transfer: dict[str, Any], cold: Served
) -> None:
    with start(transfer, max_model_len=2048) as instance:
        hit = instance.serve(PROMPT)
    assert hit.external_hit_tokens == HIT
    blocks = HIT // BLOCK_SIZE
    assert hit.block_digests[:blocks] == cold.block_digests[:blocks]


def test_retrained_rows_of_an_embedding_are_another_model(
    start: StartInstance,
    transfer: dict[str, Any],
    cold: Served,
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    """A digest of samples did not see them, and KV of the old rows was served for the new ones."""
    folder = retrain_rows(tiny_model, tmp_path / "retrained", ROWS)
    with start(transfer, folder=folder) as instance:
        other = instance.serve(PROMPT)
    assert other.external_hit_tokens == 0
    assert other.block_digests[0] != cold.block_digests[0]


@pytest.mark.soak  # two engines; tests/vllm_compat/test_excused.py has the limit
@pytest.mark.parametrize("tp_size", [1, 2])  # two ranks change it in processes of their own
def test_a_limit_of_length_that_the_model_computes_with_keeps_instances_apart(
    start: StartInstance, transfer: dict[str, Any], valkey: Server, tmp_path: Path, tp_size: int
) -> None:
    """LongRoPE takes other angles for every position where prompts may be long."""
    folder = build_long_rope_model(tmp_path / "model")
    transfer = copy.deepcopy(transfer)
    transfer["kv_connector_extra_config"]["namespace"] = f"long{tp_size}"
    with start(transfer, folder=folder, max_model_len=1024) as short:
        stored = store(short, valkey)
    with start(transfer, folder, max_model_len=4096, tensor_parallel_size=tp_size) as long:
        other = long.serve(PROMPT)
        assert other.external_hit_tokens == 0
        if tp_size == 1:
            assert other.block_digests[0] != stored.block_digests[0]
        long.reset_prefix_cache()
        assert long.serve(PROMPT).external_hit_tokens == HIT
        long.call(check_integrity)
    if tp_size > 1:
        with start(transfer, folder, max_model_len=1024, tensor_parallel_size=tp_size) as again:
            assert again.serve(PROMPT).external_hit_tokens == HIT


@pytest.mark.soak  # two engines, for what the tests of the root show without one
def test_an_adapter_that_is_applied_to_other_modules_is_another(
    start: StartInstance, transfer: dict[str, Any], valkey: Server, tmp_path: Path
) -> None:
    """``--lora-target-modules`` leaves out what of an adapter's files is not named."""
    ask = Ask(PROMPT, lora=("mine", 1, str(build_adapter(tmp_path / "adapter", 1))))
    settings = {"enable_lora": True, "max_lora_rank": 8}
    transfer = copy.deepcopy(transfer)
    transfer["kv_connector_extra_config"]["namespace"] = "modules"
    with start(transfer, **settings) as whole:
        cold = whole.call(ask_all, [ask])
        whole.reset_prefix_cache()
        assert whole.call(ask_all, [ask]).loaded_tokens == HIT
        whole.call(wait_for_writes)
    with start(transfer, **settings, lora_target_modules=["o_proj"]) as part:
        other = part.call(ask_all, [ask])
        assert other.loaded_tokens == 0
        assert other.answers[0].blocks[0] != cold.answers[0].blocks[0]
        part.call(check_integrity)
