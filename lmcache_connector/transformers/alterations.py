"""What makes a model compute other KV than its configuration, code and weights say."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch.nn.modules import module as torch_module
from transformers import PreTrainedModel

# Whose forward hooks change nothing: they look at outputs, or are these and those of other tiers.
_HARMLESS = ("transformers.", "lmcache_connector.")


class Alterations:
    """Asked before every forward pass of ``model``, so it has to be quick."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._modules: list[torch.nn.Module] = []

    def find(self, device: torch.device, *, looks_anew: bool) -> str:
        """Why a pass on ``device`` computes other KV, or is read for more than its logits; empty
        where it does not. ``looks_anew``: for modules that were exchanged as well."""
        if looks_anew or not self._modules:
            self._modules = list(self._model.modules())
        config = self._model.config
        if torch.is_autocast_enabled(device.type):
            return "the model runs under autocast"
        if config.output_hidden_states or config.output_attentions:
            return "the configuration asks for hidden states or attentions"
        if any(each.training for each in self._modules):
            return "the model, or a part of it, is in training mode (model.eval() ends that)"
        everywhere = (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks)
        if any(_are_foreign(hooks.values()) for hooks in everywhere) or _are_foreign(self._hooks()):
            return "the model has forward hooks of other code"
        return ""

    def _hooks(self) -> Iterator[Callable[..., object]]:
        for each in self._modules:
            if each._forward_hooks or each._forward_pre_hooks:
                yield from each._forward_hooks.values()
                yield from each._forward_pre_hooks.values()


def _are_foreign(hooks: Iterable[Callable[..., object]]) -> bool:
    return any(not str(getattr(hook, "__module__", "")).startswith(_HARMLESS) for hook in hooks)
