"""The cache of one sequence, its tokens, and the forward passes that continue it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedConfig

from lmcache_connector.errors import UnsupportedError
from lmcache_connector.keys.request_keys import RequestKeys
from lmcache_connector.stepwise.tiers import writes_of

# Arguments that do not affect KV or are checked below. Passes with others, such as images,
# embeddings or attentions to return, bypass the tiers.
_UNDERSTOOD = frozenset(
    {
        "input_ids",
        "attention_mask",
        "position_ids",
        "cache_position",
        "past_key_values",
        "use_cache",
        "logits_to_keep",
        "return_dict",
    }
)


class TieredCache(DynamicCache):
    """A ``DynamicCache`` whose KV is restored from and stored in the tiers.

    Made by ``KVTiers.new_cache()`` for one sequence, which several calls of ``generate`` may
    continue. Its KV was computed from ``token_ids``, as observed at the model. Once part of the KV
    has unknown tokens, it is a plain ``DynamicCache``.
    """

    def __init__(
        self, config: PreTrainedConfig, owner: object, cache_salt: str | None = None
    ) -> None:
        """``owner``: the tiers that made it."""
        super().__init__(config=config.get_text_config(decoder=True))
        self.owner = owner
        self.cache_salt = cache_salt
        self.running: ForwardCall | None = None
        """The forward pass in progress."""
        self.keys: RequestKeys | None = None
        """Of the sequence, from its first pass on."""
        self.version = 0
        """The model's version that the keys are for."""
        self.bypasses = False
        """Whether it no longer uses the tiers."""
        self.token_ids: list[int] = []
        """Tokens whose KV is known to be here."""
        self.num_prompt_tokens = 0
        """Number of tokens before those computed one by one, which count as generated."""
        self.num_kept = 0
        """Leading chunks restored from or stored in the tiers."""
        self._recorded: list[torch.Tensor] = []
        self._writes: list[int] = []
        self._record()

    @property
    def is_unmodified(self) -> bool:
        """Whether no other code has written to or replaced the KV."""
        now = self.tensors()
        return (
            len(now) == len(self._recorded)
            and all(new is old for new, old in zip(now, self._recorded, strict=True))
            and writes_of(now) == self._writes
        )

    def tensors(self) -> list[torch.Tensor]:
        """K and V of each layer in turn, ``[1, heads, tokens, content]``."""
        return [half for layer in self.layers for half in (layer.keys, layer.values)]

    def put(self, tensors: Sequence[torch.Tensor], token_ids: Sequence[int]) -> None:
        """Replace the content by ``tensors``, of the form that :meth:`tensors` returns: KV of the
        tokens so far, followed by ``token_ids``."""
        for layer, keys, values in zip(self.layers, tensors[::2], tensors[1::2], strict=True):
            if not layer.is_initialized:
                layer.update(keys[..., :0, :], values[..., :0, :])
            layer.keys, layer.values = keys, values
        self.token_ids += token_ids
        self.num_prompt_tokens = len(self.token_ids)
        self._record()

    def computed(self, token_ids: Sequence[int]) -> None:
        """A forward pass has appended the KV of ``token_ids``."""
        self.token_ids += token_ids
        if len(token_ids) > 1:
            self.num_prompt_tokens = len(self.token_ids)
        self._record()

    # -- called by generate --------------------------------------------------------------------

    def crop(self, tokens_to_remove: int) -> None:
        """Called by assisted decoding to remove rejected tokens."""
        if not self.is_unmodified:
            self.bypasses = True
        super().crop(tokens_to_remove)
        left = self.get_seq_length()
        del self.token_ids[left:]
        self.num_prompt_tokens = min(self.num_prompt_tokens, left)
        if self.keys is not None:
            self.keys.shorten(left)
            self.num_kept = min(self.num_kept, len(self.keys.keys))
        self._record()

    def __deepcopy__(self, memo: dict[int, Any]) -> TieredCache:
        """For another continuation, with the same tiers."""
        is_unmodified = self.is_unmodified
        new = memo[id(self)] = copy.copy(self)
        for name, value in vars(self).items():
            setattr(new, name, value if name == "owner" else copy.deepcopy(value, memo))
        new._record()
        if not is_unmodified:
            new.bypasses = True
        return new

    def reset(self) -> None:
        super().reset()
        self.bypasses = True

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        raise several_sequences()

    def batch_repeat_interleave(self, repeats: int) -> None:
        if repeats != 1:
            raise several_sequences()

    def batch_select_indices(self, indices: Any) -> None:
        raise several_sequences()

    def _record(self) -> None:
        """Record the current KV as that of the tokens."""
        self._recorded = self.tensors()
        self._writes = writes_of(self._recorded)


def several_sequences() -> UnsupportedError:
    return UnsupportedError(
        "A TieredCache holds one sequence: batches, beams and several returned sequences are not "
        "supported, so generate them one by one, each with a cache of its own."
    )


@dataclass(frozen=True, slots=True)
class ForwardCall:
    """A pass that computes ``token_ids`` behind the cached tokens. ``num_read``: number of last
    tokens whose logits the caller reads."""

    token_ids: tuple[int, ...]
    num_read: int

    @classmethod
    def of(cls, arguments: Mapping[str, Any], num_cached: int) -> ForwardCall | str:
        """A string says why tokens do not determine the pass. ``arguments``: of ``forward``, by
        name. Raises :class:`UnsupportedError` for batches, padding and custom positions."""
        asked = {
            name for name, value in arguments.items() if value is not None and value is not False
        }
        input_ids = arguments.get("input_ids")
        if other := sorted(asked - _UNDERSTOOD):
            return f"the pass has {', '.join(other)}, and the tiers support token ids only"
        if not isinstance(input_ids, torch.Tensor):
            return "the pass has no input_ids"
        if arguments.get("use_cache") is False:
            return "use_cache is False"
        if input_ids.dim() != 2 or input_ids.shape[0] != 1:
            raise several_sequences()
        number = input_ids.shape[1]
        _check_mask(arguments.get("attention_mask"), num_cached + number)
        places = torch.arange(num_cached, num_cached + number, device=input_ids.device)
        for name in ("position_ids", "cache_position"):
            given = arguments.get(name)
            if given is not None and not torch.equal(given.reshape(-1).to(places), places):
                raise UnsupportedError(
                    f"This TieredCache holds {num_cached} tokens, and the pass does not continue "
                    "there: take a new cache (new_cache()) for another prompt. Positions of your "
                    f"own ({name}) are not supported."
                )
        kept = arguments.get("logits_to_keep")
        num_read = kept if isinstance(kept, int) and 0 < kept <= number else number
        return cls(tuple(input_ids[0].tolist()), num_read)


def without_first(arguments: Mapping[str, Any], number: int) -> dict[str, Any]:
    """The arguments of a pass without its first ``number`` tokens. Masks keep their length: they
    cover cached tokens too."""
    shorter = dict(arguments)
    for name in ("input_ids", "position_ids", "cache_position"):
        if shorter.get(name) is not None:
            shorter[name] = shorter[name][..., number:]
    return shorter


def _check_mask(mask: Any, num_tokens: int) -> None:
    if mask is None:
        return
    if not isinstance(mask, torch.Tensor) or tuple(mask.shape) != (1, num_tokens):
        raise UnsupportedError(
            "A TieredCache needs a plain attention_mask, of one sequence and all its tokens."
        )
    if not bool(mask.all()):
        raise UnsupportedError(
            "A TieredCache holds no padding: pass every sequence by itself, without any."
        )


def by_name(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments by name. ``names``: the function's parameters in order."""
    return {**dict(zip(names, args, strict=False)), **kwargs}
