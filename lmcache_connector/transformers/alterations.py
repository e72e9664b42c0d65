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

    def are_there(self, device: torch.device, *, looks_anew: bool) -> bool:
        """Whether a pass on ``device`` computes other KV, or is read for more than its logits.
        ``looks_anew``: for modules that were exchanged as well."""
        if looks_anew or not self._modules:
            self._modules = list(self._model.modules())
        config = self._model.config
        return (
            torch.is_autocast_enabled(device.type)
            or bool(config.output_hidden_states or config.output_attentions)
            or _are_foreign(torch_module._global_forward_hooks.values())
            or _are_foreign(torch_module._global_forward_pre_hooks.values())
            or any(each.training for each in self._modules)
            or _are_foreign(self._hooks())
        )

    def _hooks(self) -> Iterator[Callable[..., object]]:
        for each in self._modules:
            if each._forward_hooks or each._forward_pre_hooks:
                yield from each._forward_hooks.values()
                yield from each._forward_pre_hooks.values()


def _are_foreign(hooks: Iterable[Callable[..., object]]) -> bool:
    return any(not str(getattr(hook, "__module__", "")).startswith(_HARMLESS) for hook in hooks)
