"""``model.generate`` with the tiers: restored, stored and refused KV."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, MistralConfig, MistralForCausalLM

from lmcache_connector.errors import UnsupportedError
from lmcache_connector.transformers import KVTiers, TieredCache
from tests.support.clock import within
from tests.support.device import DEVICE
from tests.support.engines.generate_child import generate_elsewhere, kv_digest
from tests.support.engines.settings import random_prompt
from tests.support.redis.servers import Server

CHUNK = 128
SMALL = {"cpu_gib": 0.05, "compute_or_load": "always"}
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 2, "min_new_tokens": 2}


# A test that is run again must not find what its first run has stored.
_SEEDS = count(1000)


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(DEVICE)


def prompt(seed: int, length: int) -> torch.Tensor:
    return torch.tensor([random_prompt(seed, length)], dtype=torch.long, device=DEVICE) % 60 + 2


@pytest.fixture(scope="module")
def llama(model: Path) -> Any:
    return load(model)


@pytest.fixture(scope="module")
def tiers(llama: Any) -> Iterator[KVTiers]:
    with KVTiers(llama, SMALL) as tiers:
        yield tiers


def cold(llama: Any, tiers: KVTiers, ids: torch.Tensor, **more: Any) -> TieredCache:
    """The cache of a run without hits that stored all its chunks."""
    cache, before = tiers.new_cache(), tiers.counts
    llama.generate(ids, past_key_values=cache, **(GREEDY | more))
    tiers.finish_stores()
    assert tiers.counts.hit_chunks == before.hit_chunks
    assert tiers.counts.stored_chunks > before.stored_chunks
    return cache


@contextmanager
def failing(llama: Any) -> Iterator[None]:
    """Passes raise before any computation, as on a CPU for tokens that the model does not have."""

    def fail(*_: object) -> None:
        raise IndexError("no such token")

    fail.__module__ = "transformers.test"  # or it would be an alteration
    handle = llama.model.embed_tokens.register_forward_pre_hook(fail)
    yield
    handle.remove()


def tail_logits(llama: Any, prefix: list[torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """Logits of the last token, from a plain cache with the KV of ``prefix``."""
    cache = DynamicCache(config=llama.config)
    for index, (keys, values) in enumerate(zip(prefix[::2], prefix[1::2], strict=True)):
        cache.update(keys, values, index)
    rest = ids[:, prefix[0].shape[2] :]
    with torch.no_grad():
        logits: torch.Tensor = llama(rest, past_key_values=cache, logits_to_keep=1).logits
    return logits


def test_a_hit_is_byte_equal_and_its_logits_follow_from_it(llama: Any, tiers: KVTiers) -> None:
    ids = prompt(1, 700)
    stored = [each[:, :, : 5 * CHUNK] for each in cold(llama, tiers, ids).tensors()]
    cache, before = tiers.new_cache(), tiers.counts
    hit = llama.generate(
        ids, past_key_values=cache, return_dict_in_generate=True, output_logits=True, **GREEDY
    )
    assert tiers.counts.hit_chunks == before.hit_chunks + 5
    for new, old in zip(cache.tensors(), stored, strict=True):
        assert torch.equal(new[:, :, : 5 * CHUNK], old)
    assert torch.equal(hit.logits[0], tail_logits(llama, stored, ids)[:, -1].float())


def test_positions_whose_logits_are_read_are_computed(llama: Any, tiers: KVTiers) -> None:
    """The prompt ends with a chunk. ``generate`` reads its last position, the other pass all."""
    ids = prompt(4, 3 * CHUNK)
    cold(llama, tiers, ids)
    before = tiers.counts
    llama.generate(ids, past_key_values=tiers.new_cache(), **GREEDY)
    assert tiers.counts.hit_chunks == before.hit_chunks + 2
    with torch.no_grad():
        assert llama(ids, past_key_values=tiers.new_cache()).logits.shape[1] == 3 * CHUNK
    assert tiers.counts.hit_chunks == before.hit_chunks + 2


def test_an_answer_is_a_hit_of_the_next_turn(llama: Any, tiers: KVTiers) -> None:
    ids = prompt(3, 200)
    cache = tiers.new_cache()
    answer = llama.generate(
        ids, past_key_values=cache, do_sample=False, max_new_tokens=200, min_new_tokens=200
    )
    tiers.finish_stores()
    stored = [each[:, :, : 3 * CHUNK].clone() for each in cache.tensors()]
    before, again = tiers.counts, tiers.new_cache()
    llama.generate(torch.cat([answer, ids], 1), past_key_values=again, **GREEDY)
    assert tiers.counts.hit_chunks == before.hit_chunks + 3
    assert all(
        torch.equal(a[:, :, : 3 * CHUNK], b) for a, b in zip(again.tensors(), stored, strict=True)
    )


def test_rejected_drafts_are_not_stored(llama: Any, tiers: KVTiers) -> None:
    ids = prompt(6, 50).repeat(1, 5)
    cache = tiers.new_cache()
    with patch.object(TieredCache, "crop", autospec=True, side_effect=TieredCache.crop) as crop:
        output = llama.generate(
            ids,
            past_key_values=cache,
            prompt_lookup_num_tokens=10,
            do_sample=False,
            max_new_tokens=150,
            min_new_tokens=150,
        )
    assert any(call.args[1] for call in crop.call_args_list)
    tiers.finish_stores()
    known = list(cache.token_ids)
    assert known == output[0, : len(known)].tolist()
    again, before = tiers.new_cache(), tiers.counts
    llama.generate(output, past_key_values=again, **GREEDY)
    assert tiers.counts.hit_chunks == before.hit_chunks + 3
    for new, old in zip(again.tensors(), cache.tensors(), strict=True):
        assert torch.equal(new[:, :, : 3 * CHUNK], old[:, :, : 3 * CHUNK])


def test_another_process_without_vllm_restores_from_redis(
    llama: Any, model: Path, valkey: Server
) -> None:
    ids, shared = prompt(9, 700), SMALL | {"redis_url": valkey.url}
    with KVTiers(llama, shared) as writer:
        stored = kv_digest(cold(llama, writer, ids).tensors(), 5 * CHUNK)
    found = generate_elsewhere(model, shared, ids[0].tolist(), kv_tokens=5 * CHUNK)
    assert found["counts"]["redis_chunks"] == found["counts"]["hit_chunks"] == 5
    assert found["kv"] == stored


def test_writes_go_on_after_a_failed_pass(
    llama: Any, valkey: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmcache_connector.worker.rank_tiers._STORE_DELAY_SECONDS", 60.0)
    client = valkey.client()
    with KVTiers(llama, SMALL | {"redis_url": valkey.url, "namespace": "failed"}) as tiers:
        with torch.no_grad():
            llama(prompt(18, 300), past_key_values=tiers.new_cache(), logits_to_keep=1)
        with failing(llama), pytest.raises(IndexError):
            llama.generate(prompt(19, 100), past_key_values=tiers.new_cache(), **GREEDY)
        tiers.finish_stores()
        assert within(20.0, lambda: bool(client.keys("lmc:{failed:*")))


# -- failed passes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("num_cached", [0, 200])
def test_a_failed_pass_leaves_no_keys(llama: Any, tiers: KVTiers, num_cached: int) -> None:
    """The model fails before any computation; other tokens then take the same places."""
    first, cache = prompt(next(_SEEDS), num_cached), tiers.new_cache()
    wrong, right = (torch.cat([first, prompt(next(_SEEDS), 300)], 1) for _ in range(2))
    if num_cached:
        with torch.no_grad():
            llama(first, past_key_values=cache)
    with failing(llama), pytest.raises(IndexError):
        llama.generate(wrong, past_key_values=cache, **GREEDY)
    llama.generate(right, past_key_values=cache, **GREEDY)
    tiers.finish_stores()
    before, again, number = tiers.counts, tiers.new_cache(), (num_cached + 300) // CHUNK
    llama.generate(right, past_key_values=again, **GREEDY)
    assert tiers.counts.hit_chunks == before.hit_chunks + number
    assert all(
        torch.equal(a[:, :, : number * CHUNK], b[:, :, : number * CHUNK])
        for a, b in zip(again.tensors(), cache.tensors(), strict=True)
    )


def test_kv_of_embeddings_is_not_that_of_a_failed_pass(llama: Any, tiers: KVTiers) -> None:
    cache, failed = tiers.new_cache(), prompt(23, 300)
    with failing(llama), pytest.raises(IndexError):
        llama.generate(failed, past_key_values=cache, **GREEDY)
    with torch.no_grad():
        llama(inputs_embeds=llama.model.embed_tokens(prompt(24, 300)), past_key_values=cache)
    cold(llama, tiers, failed)


# -- refusals --------------------------------------------------------------------------------------


def test_several_sequences_are_refused(llama: Any, tiers: KVTiers) -> None:
    ids = prompt(15, 40)
    for more in ({"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}):
        with pytest.raises(UnsupportedError, match="one sequence"):
            llama.generate(ids, past_key_values=tiers.new_cache(), **(GREEDY | more))
    with pytest.raises(UnsupportedError, match="one sequence"):
        llama.generate(ids.repeat(2, 1), past_key_values=tiers.new_cache(), **GREEDY)


def test_models_whose_kv_depends_on_length_are_refused(llama: Any) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64}
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    scaled = MistralForCausalLM(
        MistralConfig(**sizes, **heads, sliding_window=None, rope_parameters=rope)
    )
    with pytest.raises(UnsupportedError, match="dynamic"):
        KVTiers(scaled, SMALL)
