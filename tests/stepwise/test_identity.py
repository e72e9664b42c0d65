"""The identity of a model in memory: which changes change its keys."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

from lmcache_connector.config.tiered import parse_config
from lmcache_connector.errors import UnsupportedError
from lmcache_connector.keys.request_keys import RequestIdentity, RequestKeys
from lmcache_connector.scheduler.build import make_root_hasher
from lmcache_connector.stepwise.form import KVForm
from lmcache_connector.stepwise.identity import ModelIdentity, alteration, weights_in_memory

FORM = KVForm(num_heads=2, widths=(16, 16), dtype="bfloat16")
IDS = list(range(32))


def tiny() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))


def key(
    model: object, engine: str = "e", form: KVForm = FORM, label: str = "", **config: Any
) -> bytes:
    settings = parse_config({"chunk_size": 32} | config)
    identity = ModelIdentity(model, engine, form, settings, label=label)
    identity.refresh()
    keys = identity.keys()
    keys.extend(IDS)
    return keys.keys[0]


def test_vllm_never_has_these_keys() -> None:
    """The root of a model in memory has one name more than vLLM's."""
    config = parse_config({"chunk_size": 32})
    identity = ModelIdentity(tiny(), "vllm", FORM, config)
    identity.refresh()
    own = identity.keys()
    own.extend(IDS)
    hasher = make_root_hasher(config, 0, {"engine": "vllm"})
    theirs = RequestKeys(hasher, RequestIdentity(weights=weights_in_memory(tiny())))
    theirs.extend(IDS)
    assert "engine" in identity.root
    assert len(own.keys) == len(theirs.keys) == 1
    assert own.keys != theirs.keys


def _scale(model: LlamaForCausalLM) -> None:
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1


def _swap(model: LlamaForCausalLM) -> None:
    """Another configuration with the same weights."""
    model.config.rms_norm_eps = 1e-3


def _cast(model: LlamaForCausalLM) -> None:
    model.to(torch.bfloat16)


def _cast_and_back(model: Any) -> None:
    """Rounds the rotary embeddings' frequencies, which are in no file."""
    weights = {name: each.clone() for name, each in model.state_dict().items()}
    model.to(torch.bfloat16)
    model.to(torch.float32)
    model.load_state_dict(weights)


@pytest.mark.parametrize("change", [_scale, _swap, _cast, _cast_and_back])
def test_any_change_of_a_model_changes_its_keys(change: Callable[[LlamaForCausalLM], None]) -> None:
    model = tiny()
    before = key(model)
    change(model)
    assert key(model) != before


def test_code_has_a_label(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code replaced in a class leaves no trace in a model's state."""
    before = key(tiny(), label="rotated")
    with monkeypatch.context() as patch:
        patch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, *_, **__: (q, k))
        assert key(tiny(), label="rotated") == before
        assert key(tiny(), label="not rotated") != before
    assert key(tiny()) != before


def test_matmul_precision_changes_keys() -> None:
    before = key(tiny())
    torch.set_float32_matmul_precision("medium")
    try:
        assert key(tiny()) != before
    finally:
        torch.set_float32_matmul_precision("highest")


def test_weights_of_several_tensors_are_watched() -> None:
    """Some quantized weights have no bytes of their own."""
    model = tiny()
    weight = model.lm_head.weight.detach()
    model.lm_head.weight = torch.nn.Parameter(TwoTensor(weight, weight.clone()))
    with pytest.raises(UnsupportedError, match="model_digest"):
        key(model)
    identity = ModelIdentity(model, "e", FORM, parse_config({"model_digest": "mine"}))
    assert not identity.refresh()
    assert not identity.refresh()
    model.lm_head.weight.a.data[0, 0] += 1
    assert identity.refresh()


def test_engines_forms_and_namespaces_differ() -> None:
    model = tiny()
    wider = KVForm(num_heads=4, widths=(8, 8), dtype="bfloat16")
    found = [
        key(model),
        key(model, engine="f"),
        key(model, form=wider),
        key(model, namespace="other"),
        key(model, hash_key="sixteen bytes or more"),
        key(model, weights_label="next"),
    ]
    assert len(set(found)) == len(found)


def test_a_label_that_cannot_be_read_gives_keys_that_nobody_has(tmp_path: Path) -> None:
    """As while it is written."""
    label = tmp_path / "label"
    label.write_text("step 1")
    identity = ModelIdentity(tiny(), "e", FORM, parse_config({"weights_label": f"file:{label}"}))
    identity.refresh()

    def first_key() -> bytes:
        keys = identity.keys()
        keys.extend(range(200))
        return keys.keys[0]

    before = first_key()
    label.write_text("")
    assert len({before, first_key(), first_key()}) == 3
    label.write_text("step 1")
    assert first_key() == before


def test_changes_in_place_are_noticed() -> None:
    model = tiny()
    identity = ModelIdentity(model, "e", FORM, parse_config({}))
    assert not identity.refresh()
    assert not identity.refresh()
    _scale(model)
    assert identity.refresh()
    assert not identity.refresh()
    model.model.layers[0].mlp = copy.deepcopy(model.model.layers[0].mlp)
    assert identity.refresh()
    model.config.rope_theta = 7.0
    assert identity.refresh()
    assert not identity.refresh()
    assert identity.version == 4


def test_model_digest_names_the_first_weights() -> None:
    model = tiny()
    identity = ModelIdentity(model, "e", FORM, parse_config({"model_digest": "mine"}))
    found = []
    for _ in range(2):
        identity.refresh()
        keys = identity.keys()
        keys.extend(IDS * 4)
        found.append(keys.keys[0])
        _scale(model)
    assert found[0] != found[1]


def test_another_thread_may_change_hooks_meanwhile() -> None:
    module = torch.nn.Linear(1, 1).eval()

    class Hook:
        """Looking at it takes as long as another thread needs to register one more."""

        @property
        def __module__(self) -> str:  # type: ignore[override]
            module.register_forward_hook(Hook())
            return "transformers.test"

        def __call__(self, *_: object) -> None: ...

    for _ in range(2):
        module.register_forward_hook(Hook())
    assert alteration(module, "cpu") == ""


def test_switchable_adapters_are_refused() -> None:
    switched = type("Linear", (torch.nn.Linear,), {"__module__": "peft.tuners.lora.layer"})
    model = tiny()
    model.model.layers[0].self_attn.q_proj = switched(8, 8)
    with pytest.raises(UnsupportedError, match="merge"):
        ModelIdentity(model, "e", FORM, parse_config({})).refresh()


def test_absent_weights_need_a_digest() -> None:
    with torch.device("meta"):
        absent = tiny()
    with pytest.raises(UnsupportedError, match="model_digest"):
        key(absent)
    assert key(absent, model_digest="mine") == key(absent, model_digest="mine")
