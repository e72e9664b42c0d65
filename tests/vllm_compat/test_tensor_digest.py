"""Digests of the weights in memory: any change of an element, its place, form or name shows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lmcache_connector.vllm_compat.tensor_digest import (
    has_hidden_weights,
    model_digest,
    model_form,
    tensor_digest,
)


class Model(nn.Module):
    def __init__(self, **tensors: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))


def counted(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def digest(*packed: bytes, **tensors: torch.Tensor) -> str:
    found = model_digest({"model": Model(**tensors)}, packed)
    assert found is not None
    return found


@given(st.permutations([0, 1, 2]))
def test_axes_in_another_order_are_read_in_that_of_memory(axes: list[int]) -> None:
    tensor = counted(2, 3, 5)
    view = tensor.permute(axes)
    assert tensor_digest(view) == tensor_digest(tensor)
    assert (digest(w=view) == digest(w=tensor)) == (axes == [0, 1, 2])


def test_a_view_with_gaps_is_its_own_elements() -> None:
    table = counted(8, 6)
    view = table[1::2, :4]
    before = tensor_digest(view)
    assert before == tensor_digest(view.clone())
    table[0, 0] = table[1, 5] = -1.0  # beside the view
    assert tensor_digest(view) == before
    table[3, 3] = -1.0
    assert tensor_digest(view) != before


def test_names_types_and_shapes_count() -> None:
    zeros = torch.zeros(4)
    found = [
        digest(w=zeros),
        digest(v=zeros),
        digest(w=zeros.view(torch.int32)),
        digest(w=zeros.view(2, 2)),
        digest(w=zeros, v=zeros.clone()),
        digest(b"packed", w=zeros),
        digest(b"pack", b"ed", w=zeros),
        model_digest({"drafter": Model(w=zeros)}, ()),
    ]
    assert len(set(found)) == len(found)


def test_tied_weights_count_under_each_name() -> None:
    tied = counted(4)
    parameter = nn.Parameter(tied, requires_grad=False)
    model = Model(a=tied)
    model.register_parameter("b", parameter)
    model.register_parameter("c", parameter)
    before = model_digest({"model": model}, ())
    assert before == digest(a=tied, b=tied.clone(), c=tied.clone())
    tied[0] = 5.0
    assert model_digest({"model": model}, ()) != before


def test_buffers_count_even_those_that_are_not_saved() -> None:
    model = Model(w=torch.zeros(4))
    model.register_buffer("inverse_frequencies", counted(4), persistent=False)
    before = model_digest({"model": model}, ())
    model.inverse_frequencies[1] = 7.0
    assert model_digest({"model": model}, ()) != before


@pytest.mark.parametrize("follows_from", ["the configuration", "parameters", "a file"])
def test_what_vllm_computes_at_first_use_does_not_count(follows_from: str) -> None:
    """Sines and cosines are cast then, unless they are what FoPE makes of its coefficients."""
    rotary = nn.Module()
    rotary.register_buffer("cos_sin_cache", counted(4), persistent=follows_from == "a file")
    if follows_from == "parameters":
        rotary.cos_coef = nn.Parameter(counted(2), requires_grad=False)
    model = Model(w=torch.zeros(4))
    model.add_module("rotary", rotary)
    models = {"model": model}
    before = model_digest(models, ()), model_form(models)
    rotary.cos_sin_cache = rotary.cos_sin_cache.to(torch.bfloat16)
    after = model_digest(models, ()), model_form(models)
    assert (after == before) == (follows_from == "the configuration")


def test_what_a_compiled_linear_layer_keeps_counts() -> None:
    """vLLM's build for CPUs puts a function with packed weights into ``cpu_linear``."""
    model, packed = Model(w=torch.empty(0)), counted(4)
    model.cpu_linear = lambda inputs: inputs @ packed
    before = model_digest({"model": model}, ())
    packed[3] = -1.0
    assert model_digest({"model": model}, ()) != before


def test_a_read_ends_once_nobody_wants_it() -> None:
    assert model_digest({"model": Model(w=torch.zeros(4))}, (), lambda: True) is None


def test_weights_are_hidden_where_a_parameter_is_left_empty() -> None:
    assert has_hidden_weights({"model": Model(a=torch.zeros(4), b=torch.empty(0))})
    assert not has_hidden_weights({"model": Model(a=torch.zeros(4))})


# -- whole models ----------------------------------------------------------------------------------


def test_the_form_of_a_model_is_its_names_and_shapes_and_no_weight() -> None:
    one, other, wrapped = torch.nn.Linear(4, 6), torch.nn.Linear(4, 6), torch.nn.Module()
    wrapped.base_layer = one
    forms = [model_form({"model": each}) for each in (one, other, wrapped, torch.nn.Linear(6, 4))]
    assert forms[0] == forms[1]
    assert len(set(forms)) == 3
    assert model_digest({"model": one}, ()) != model_digest({"model": other}, ())


@pytest.mark.parametrize("offset", range(4))
def test_words_of_a_tensor_that_begins_anywhere_in_its_storage(offset: int) -> None:
    sums = pytest.importorskip("lmcache_connector.vllm_compat.tensor_sums")
    tensor = torch.arange(23, dtype=torch.float32).to(torch.bfloat16)[offset : offset + 9]
    words, rest = sums.split_words(tensor)
    data = words.numpy().tobytes() + rest.numpy().tobytes()
    assert data == tensor.contiguous().view(torch.int16).numpy().tobytes()
    assert rest.numel() == 2


def test_what_mla_derives_of_its_weights_counts() -> None:
    layer = torch.nn.Linear(4, 6)
    vars(layer)["W_UV"] = layer.weight.detach().clone()
    before = model_digest({"model": layer}, ())
    layer.W_UV += 1
    assert model_digest({"model": layer}, ()) != before
