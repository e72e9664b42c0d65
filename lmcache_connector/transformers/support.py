"""Which models of transformers can be served, and the form of their KV, found by a forward pass."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from lmcache_connector.errors import UnsupportedError
from lmcache_connector.stepwise.form import KVForm
from lmcache_connector.vllm_compat.excused import INDEPENDENT_ROPE_TYPES


def check_configuration(model: PreTrainedModel) -> None:
    """Whether KV follows from the tokens before alone. Raises :class:`UnsupportedError`."""
    if model.config.is_encoder_decoder:
        raise _unsupported("models with an encoder, whose KV follows from another text")
    odd = sorted({*_rope_types(model.config.to_dict())} - INDEPENDENT_ROPE_TYPES)
    if odd:
        raise _unsupported(f"rotary embeddings ({', '.join(odd)}) that change with the length")


def find_form(model: PreTrainedModel) -> KVForm:
    """The form of the model's KV. Computes one token, and keeps nothing of it. Raises
    :class:`UnsupportedError`."""
    check_configuration(model)
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise _unsupported(f"{type(model).__name__}, whose forward has no logits_to_keep")
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    with torch.no_grad():
        token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
        model(input_ids=token, past_key_values=cache, use_cache=True, logits_to_keep=1)
    for layer in cache.layers:
        if type(layer) is not DynamicLayer:
            raise _unsupported(f"layers such as {type(layer).__name__}: sliding windows and states")
        if not layer.is_initialized:
            raise _unsupported("layers without KV of their own")
    return KVForm.of([half for layer in cache.layers for half in (layer.keys, layer.values)])


def _rope_types(config: Any) -> Iterator[str]:
    """At any depth: some models have several."""
    if isinstance(config, dict):
        for name, value in config.items():
            if name == "rope_type" and isinstance(value, str):
                yield value
            elif name == "rope_scaling" and isinstance(value, dict):
                yield str(value.get("rope_type", value.get("type", "default")))
            else:
                yield from _rope_types(value)
    elif isinstance(config, list):
        for each in config:
            yield from _rope_types(each)


def _unsupported(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"lmcache-connector does not support {what}: generate with transformers' own cache."
    )
