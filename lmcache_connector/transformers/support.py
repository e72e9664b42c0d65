"""Which transformers models are supported, the form of their KV, and what alters a pass."""

from __future__ import annotations

import inspect

import torch
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from lmcache_connector.errors import UnsupportedError
from lmcache_connector.stepwise.form import KVForm
from lmcache_connector.stepwise.identity import alteration, is_split
from lmcache_connector.vllm_compat.identity_tables import INDEPENDENT_ROPE_TYPES, rope_types

_NUM_EARLY = 8


def check_configuration(model: PreTrainedModel) -> None:
    """Raise :class:`UnsupportedError` unless KV depends only on the tokens before."""
    if model.config.is_encoder_decoder:
        raise _unsupported("models with an encoder, whose KV follows from another text")
    if is_split(model) or any(size not in (None, 1) for size in (model.tp_size, model.fsdp_size)):
        raise _unsupported("models that are split over several processes")
    odd = sorted(rope_types(model.config.to_dict()) - INDEPENDENT_ROPE_TYPES)
    if odd:
        raise _unsupported(f"rotary embeddings ({', '.join(odd)}) that change with the length")


def find_form(model: PreTrainedModel) -> KVForm:
    """The form of the model's KV, found by computing a few tokens. Raises
    :class:`UnsupportedError`."""
    if not isinstance(getattr(model, "config", None), PreTrainedConfig):
        raise UnsupportedError(
            f"KVTiers needs a model in memory, as from_pretrained makes it, not a {type(model)}."
        )
    check_configuration(model)
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise _unsupported(f"{type(model).__name__}, whose forward has no logits_to_keep")
    one, other = (_compute(model, last) for last in (0, 1))
    for layer in one.layers:
        if type(layer) is not DynamicLayer:
            raise _unsupported(f"layers such as {type(layer).__name__}: sliding windows and states")
        if not layer.is_initialized:
            raise _unsupported("layers without KV of their own")
    if any(map(_differ, _early(one), _early(other))):
        raise _unsupported(f"{type(model).__name__}, where KV follows from later tokens as well")
    return KVForm.of([half for layer in one.layers for half in (layer.keys, layer.values)])


def _compute(model: PreTrainedModel, last: int) -> DynamicCache:
    """KV of :data:`_NUM_EARLY` tokens 0 followed by as many tokens ``last``."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    was_training = [each for each in model.modules() if each.training]
    tokens = torch.tensor([[0] * _NUM_EARLY + [last] * _NUM_EARLY], device=model.device)
    try:
        model.eval()
        with torch.no_grad(), torch.autocast(model.device.type, enabled=False):
            model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
    except Exception as error:  # models may raise anything
        raise _unsupported(
            f"{type(model).__name__}, which fails with a DynamicCache ({error!r:.200})"
        ) from error
    finally:
        for each in was_training:
            each.training = True
    return cache


def _early(cache: DynamicCache) -> list[torch.Tensor]:
    halves = [half for layer in cache.layers for half in (layer.keys, layer.values)]
    return [half[..., :_NUM_EARLY, :] for half in halves]


def _differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether they differ by more than the order of sums."""
    mine, its = (each.cpu().double() for each in (one, other))
    return bool((mine - its).norm() > max(1e-4, 4 * torch.finfo(one.dtype).eps) * its.norm())


def _unsupported(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"lmcache-connector does not support {what}: generate with transformers' own cache."
    )


def find_alteration(model: PreTrainedModel, device: torch.device) -> str:
    """Why a pass on ``device`` computes other KV than configuration and weights determine, or is
    read for more than logits; empty if not."""
    if model.config.output_hidden_states or model.config.output_attentions:
        return "the configuration asks for hidden states or attentions"
    return alteration(model, device.type)
