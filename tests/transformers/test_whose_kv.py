"""A changed model shares no KV with the model before: neither loads the other's chunks."""

from __future__ import annotations

import copy
import os
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.modules.module import register_module_forward_hook
from transformers import AttentionInterface
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, eager_attention_forward

from lmcache_connector.errors import ConfigError, UnsupportedError
from lmcache_connector.transformers import KVTiers
from tests.support.device import DEVICE
from tests.support.engines.tiny_generations import (
    CHUNK,
    GREEDY,
    SMALL,
    distance_from_plain,
    generate_right,
    prompt_of,
    tiny_model,
)

PROMPT = prompt_of(1, 200)
CHUNKS = 200 // CHUNK


@contextmanager
def stored(**sizes: Any) -> Iterator[tuple[Any, KVTiers]]:
    """A model whose KV of :data:`PROMPT` is stored and a hit."""
    model = tiny_model(**sizes)
    with KVTiers(model, SMALL) as tiers:
        assert generate_right(model, tiers, PROMPT) == 0
        assert generate_right(model, tiers, PROMPT) == CHUNKS
        yield model, tiers


# -- models that change in place -------------------------------------------------------------------


def _rotate(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.5)


def _train(model: Any, kind: type[torch.optim.Optimizer]) -> None:
    optimizer = kind(model.parameters(), lr=0.05, fused=True)
    model(PROMPT, labels=PROMPT).loss.backward()
    optimizer.step()


def _merge(model: Any) -> None:
    """Merge an adapter as peft does."""
    for layer in model.model.layers:
        layer.self_attn.k_proj.weight.data += 0.05


def _load(model: Any) -> None:
    state = {name: each * 1.1 for name, each in model.state_dict().items()}
    model.load_state_dict(state)


def _scale(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.scaling *= 8


def _attend_twice(module: Any, query: Any, *rest: Any, **more: Any) -> Any:
    return eager_attention_forward(module, query * 4, *rest, **more)


def _attend(model: Any) -> None:
    AttentionInterface.register("twice", _attend_twice)
    model.set_attn_implementation("twice")


def _forward_twice(self: Any, hidden_states: Any, *args: Any, **more: Any) -> Any:
    return LlamaAttention.forward(self, hidden_states * 2, *args, **more)


def _patch_one(model: Any) -> None:
    attention = model.model.layers[1].self_attn
    attention.forward = types.MethodType(_forward_twice, attention)


CHANGES: list[Callable[[Any], None]] = [
    _rotate,
    lambda model: _train(model, torch.optim.AdamW),
    lambda model: _train(model, torch.optim.SGD),
    _merge,
    _load,
    _scale,
    _attend,
    _patch_one,
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_changed_in_place_is_another_model(change: Callable[[Any], None]) -> None:
    with stored() as (model, tiers):
        change(model)
        assert generate_right(model, tiers, PROMPT) == 0
        assert generate_right(model, tiers, PROMPT) == CHUNKS


def test_a_cache_begun_with_other_weights_bypasses() -> None:
    model = tiny_model()
    with KVTiers(model, SMALL) as tiers:
        old = tiers.new_cache()
        model.generate(PROMPT[:, :100], past_key_values=old, **GREEDY)
        _merge(model)
        model.generate(PROMPT, past_key_values=old, **GREEDY)
        assert generate_right(model, tiers, PROMPT) == 0


# -- altered passes --------------------------------------------------------------------------------


@contextmanager
def altered(model: Any, how: str) -> Iterator[None]:
    handle = None
    if how == "training":
        model.train()
    if how == "a part in training":
        model.model.layers[0].self_attn.train()
    if how == "hook":
        handle = model.model.layers[0].mlp.register_forward_hook(lambda _, __, output: output * 2)
    if how == "weights":
        model.model.layers[1].self_attn.v_proj.weight.mul_(2)
    if how == "hook without a module":
        handle = model.model.layers[0].mlp.register_forward_pre_hook({}.__setitem__)
    if how == "hook of all modules":
        is_mlp = modeling_llama.LlamaMLP
        handle = register_module_forward_hook(
            lambda module, _, output: output * 2 if isinstance(module, is_mlp) else None
        )
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=how == "autocast"):
        yield
    model.eval()
    if how == "weights":
        model.model.layers[1].self_attn.v_proj.weight.mul_(0.5)
    if handle is not None:
        handle.remove()


ALTERATIONS = [
    "training",
    "a part in training",
    "hook",
    "hook without a module",
    "hook of all modules",
    "autocast",
]


@pytest.mark.parametrize("how", ALTERATIONS)
@pytest.mark.parametrize("one_by_one", [True, False])
def test_nothing_of_altered_passes_is_stored(how: str, one_by_one: bool) -> None:
    """The first chunk is computed normally; the rest is altered, in one pass or many."""
    model = tiny_model(attention_dropout=0.5)
    with KVTiers(model, SMALL) as tiers, torch.no_grad():
        cache = tiers.new_cache()
        model(PROMPT[:, :40], past_key_values=cache)
        with altered(model, how):
            step = 1 if one_by_one else 160
            for start in range(40, 200, step):
                model(PROMPT[:, start : start + step], past_key_values=cache)
        tiers.finish_stores()
        assert generate_right(model, tiers, PROMPT) == 1


@pytest.mark.parametrize("how", ["training", "hook", "weights"])
def test_nothing_of_a_pass_is_stored_that_another_thread_alters(how: str) -> None:
    """The alteration begins within the pass, and ends before the next one."""
    model = tiny_model(attention_dropout=0.5)
    with KVTiers(model, SMALL) as tiers, torch.no_grad(), ExitStack() as stack:

        def begin(*_: object) -> None:
            stack.enter_context(altered(model, how))

        begin.__module__ = "transformers.test"  # or it would be an alteration itself
        handle = model.model.embed_tokens.register_forward_hook(begin)
        model(PROMPT, past_key_values=tiers.new_cache(), logits_to_keep=1)
        handle.remove()
        stack.close()
        tiers.finish_stores()
        assert generate_right(model, tiers, PROMPT) == 0


# -- edited caches ---------------------------------------------------------------------------------


@pytest.mark.parametrize("in_place", [True, False])
def test_kv_after_an_edit_is_not_stored(in_place: bool) -> None:
    model = tiny_model()
    with KVTiers(model, SMALL) as tiers:
        cache = tiers.new_cache()
        begun = model.generate(PROMPT[:, :100], past_key_values=cache, **GREEDY)
        tiers.finish_stores()
        for layer in cache.layers:
            if in_place:
                layer.values.mul_(3)
            else:
                layer.values = layer.values * 3
        whole = torch.cat([begun, PROMPT[:, 100:]], 1)
        model.generate(whole, past_key_values=cache, **GREEDY)
        tiers.finish_stores()
        assert generate_right(model, tiers, whole) == 3


def test_kv_edited_during_its_store_is_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmcache_connector.worker.rank_tiers._STORE_DELAY_SECONDS", 60.0)
    model = tiny_model()
    with KVTiers(model, SMALL) as tiers, torch.no_grad():
        cache = tiers.new_cache()
        model(PROMPT, past_key_values=cache, logits_to_keep=1)
        for layer in cache.layers:
            layer.keys.mul_(3)
        tiers.finish_stores()
        assert tiers.counts.stored_chunks == 0
        assert generate_right(model, tiers, PROMPT) == 0


def test_copies_of_a_cache_are_own_sequences() -> None:
    """The way in which transformers' documentation reuses a prompt's KV."""
    model = tiny_model()
    one, other = (torch.cat([PROMPT, prompt_of(seed, 60)], 1) for seed in (2, 3))
    with KVTiers(model, SMALL) as tiers, torch.no_grad():
        cache = tiers.new_cache()
        model(PROMPT, past_key_values=cache, logits_to_keep=1)
        for ids in (one, other):
            mine = copy.deepcopy(cache)
            model.generate(ids, past_key_values=mine, **GREEDY)
            assert distance_from_plain(model, mine, ids) < 1e-4
        tiers.finish_stores()
        assert generate_right(model, tiers, one) == generate_right(model, tiers, other) == 8


# -- threads and processes -------------------------------------------------------------------------


def test_threads_generate_at_once() -> None:
    model = tiny_model()
    prompts = [prompt_of(seed % 6, 150 + seed % 6) for seed in range(24)]
    with KVTiers(model, SMALL) as tiers:

        def generate(ids: torch.Tensor) -> None:
            model.generate(ids, past_key_values=tiers.new_cache(), **GREEDY)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(generate, prompts))
        tiers.finish_stores()
        assert all(generate_right(model, tiers, ids) == 4 for ids in prompts[:6])


def test_a_model_that_torch_splits_over_processes_is_refused() -> None:
    """Its ranks would load each other's heads, and not load equally."""
    group.init_process_group("gloo", store=group.HashStore(), rank=0, world_size=1)
    try:
        model = tiny_model()
        parallelize_module(
            model, init_device_mesh(DEVICE.type, (1,)), {"lm_head": ColwiseParallel()}
        )
        with pytest.raises(UnsupportedError, match="several processes"):
            KVTiers(model, SMALL | {"model_digest": "mine"})
    finally:
        group.destroy_process_group()


def test_a_forked_process_bypasses_the_tiers() -> None:
    with stored() as (model, tiers):
        before, child = tiers.counts, os.fork()
        if child == 0:
            try:
                model.generate(PROMPT, past_key_values=tiers.new_cache(), **GREEDY)
                tiers.finish_stores()
                tiers.close()
            finally:
                os._exit(0 if tiers.counts == before and not model._forward_hooks else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert generate_right(model, tiers, PROMPT) == CHUNKS


def test_misuse_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="a model in memory"):
        KVTiers("a name", SMALL)
    with pytest.raises(ConfigError, match="a dict"):
        KVTiers(tiny_model(), "cpu_gib=1")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="did you mean 'cpu_gib'"):
        KVTiers(tiny_model(), cpu_gb=1)
