"""What tells two models in memory apart, and what does not."""

from __future__ import annotations

import pytest
import torch

from lmcache_connector.vllm_compat.tensor_digest import model_digest, model_form


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
