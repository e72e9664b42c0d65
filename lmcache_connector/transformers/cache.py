"""The cache object of one sequence, and what is known of the tokens in it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache, PreTrainedConfig

from lmcache_connector.errors import UnsupportedError
from lmcache_connector.keys.request_keys import RequestKeys
from lmcache_connector.stepwise.unwritten_gate import writes_of

if TYPE_CHECKING:
    from lmcache_connector.transformers.forward_call import ForwardCall


class TieredCache(DynamicCache):
    """A ``DynamicCache`` whose KV may come from the tiers, and goes to them.

    Made by ``KVTiers.new_cache()``, for one sequence: several calls of ``generate`` may continue
    it. What it holds was computed from ``token_ids``, as the model was seen to be given them; once
    that is not known of all of it, it is a ``DynamicCache`` like any other.
    """

    def __init__(
        self, config: PreTrainedConfig, owner: object, cache_salt: str | None = None
    ) -> None:
        """``owner``: the tiers it belongs to."""
        super().__init__(config=config.get_text_config(decoder=True))
        self.owner = owner
        self.cache_salt = cache_salt
        self.running: ForwardCall | None = None
        """The forward pass that is under way with it."""
        self.version = 0
        """Of the model that its keys name."""
        self.keys: RequestKeys | None = None
        """From its first pass on; see :meth:`begin`."""
        self._passes_by = False
        self._token_ids: list[int] = []
        self._num_prompt_tokens = 0
        self._num_kept = 0
        self._left: list[torch.Tensor] = []
        self._writes: list[int] = []
        self._leave()

    @property
    def passes_by(self) -> bool:
        """Whether it has nothing to do with the tiers any more."""
        return self._passes_by

    @property
    def token_ids(self) -> Sequence[int]:
        """Of the tokens whose KV is known to be here."""
        return self._token_ids

    @property
    def num_kept(self) -> int:
        """Leading chunks that came from the tiers, or were given to them."""
        return self._num_kept

    @property
    def num_prompt_tokens(self) -> int:
        """Where tokens that came one by one begin: those are taken for generated."""
        return self._num_prompt_tokens

    @property
    def is_as_left(self) -> bool:
        """Whether nobody else has written to the KV, or exchanged it."""
        now = self.tensors()
        return (
            len(now) == len(self._left)
            and all(new is old for new, old in zip(now, self._left, strict=True))
            and writes_of(now) == self._writes
        )

    def tensors(self) -> list[torch.Tensor]:
        """K and V of each layer in turn, ``[1, heads, tokens, content]``."""
        return [half for layer in self.layers for half in (layer.keys, layer.values)]

    def pass_by(self) -> None:
        """What is computed from here on has nothing to do with the tiers."""
        self._passes_by = True

    def begin(self, keys: RequestKeys, version: int) -> None:
        """``keys``: of the sequence, empty still. ``version``: of the model that they name."""
        self.keys, self.version = keys, version

    def put(self, tensors: Sequence[torch.Tensor], token_ids: Sequence[int]) -> None:
        """``tensors``, as :meth:`tensors` gives them, take the place of what is here: the KV of the
        tokens known so far, and of ``token_ids`` after them."""
        for layer, keys, values in zip(self.layers, tensors[::2], tensors[1::2], strict=True):
            if not layer.is_initialized:
                layer.update(keys[..., :0, :], values[..., :0, :])
            layer.keys, layer.values = keys, values
        self._token_ids += token_ids
        self._num_prompt_tokens = len(self._token_ids)
        self._leave()

    def computed(self, token_ids: Sequence[int]) -> None:
        """A forward pass has computed the KV of these, after what was there."""
        self._token_ids += token_ids
        if len(token_ids) > 1:
            self._num_prompt_tokens = len(self._token_ids)
        self._leave()

    def kept(self, num_chunks: int) -> None:
        """So many leading chunks need not be stored again."""
        self._num_kept = num_chunks

    # -- what generate does to caches ----------------------------------------------------------

    def crop(self, tokens_to_remove: int) -> None:
        """As assisted decoding does with tokens that were not accepted."""
        if not self.is_as_left:
            self.pass_by()
        super().crop(tokens_to_remove)
        left = self.get_seq_length()
        del self._token_ids[left:]
        self._num_prompt_tokens = min(self._num_prompt_tokens, left)
        if self.keys is not None:
            self.keys.shorten(left)
            self._num_kept = min(self._num_kept, len(self.keys.keys))
        self._leave()

    def __deepcopy__(self, memo: dict[int, Any]) -> TieredCache:
        """For another continuation, of the same tiers."""
        is_as_left = self.is_as_left
        new = memo[id(self)] = copy.copy(self)
        for name, value in vars(self).items():
            setattr(new, name, value if name == "owner" else copy.deepcopy(value, memo))
        new._leave()
        if not is_as_left:
            new.pass_by()
        return new

    def reset(self) -> None:
        super().reset()
        self.pass_by()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        raise several_sequences()

    def batch_repeat_interleave(self, repeats: int) -> None:
        if repeats != 1:
            raise several_sequences()

    def batch_select_indices(self, indices: Any) -> None:
        raise several_sequences()

    def _leave(self) -> None:
        """As it is now, KV is what the tokens say."""
        self._left = self.tensors()
        self._writes = writes_of(self._left)


def several_sequences() -> UnsupportedError:
    return UnsupportedError(
        "A TieredCache holds one sequence: batches, beams and several returned sequences are not "
        "supported, so generate them one by one, each with a cache of its own."
    )
