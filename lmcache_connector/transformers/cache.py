"""The cache object of one sequence, and what is known of the tokens in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedConfig

from lmcache_connector.errors import UnsupportedError
from lmcache_connector.keys.request_keys import RequestKeys


class TieredCache(DynamicCache):
    """A ``DynamicCache`` whose KV may come from the tiers, and goes to them.

    Made by ``KVTiers.new_cache()``, for one sequence: several calls of ``generate`` may continue
    it. What it holds was computed from ``token_ids``, as the model was seen to be given them; once
    that is not known of all of it, it is a ``DynamicCache`` like any other.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        keys: RequestKeys | None,
        owner: object = None,
        version: int = 0,
    ) -> None:
        """``keys``: of the sequence, empty still; ``None``: it passes the tiers by. ``owner``: the
        tiers it belongs to. ``version``: of the weights that the keys name."""
        super().__init__(config=config.get_text_config(decoder=True))
        self.owner = owner
        self.version = version
        self._keys = keys
        self._token_ids: list[int] = []
        self._num_prompt_tokens = 0
        self._num_kept = 0

    @property
    def keys(self) -> RequestKeys | None:
        """``None`` if it passes the tiers by."""
        return self._keys

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

    def tensors(self) -> list[torch.Tensor]:
        """K and V of each layer in turn, ``[1, heads, tokens, content]``."""
        return [half for layer in self.layers for half in (layer.keys, layer.values)]

    def pass_by(self) -> None:
        """What is computed from here on has nothing to do with the tiers."""
        self._keys = None

    def put(self, tensors: Sequence[torch.Tensor], token_ids: Sequence[int]) -> None:
        """``tensors``, as :meth:`tensors` gives them, take the place of what is here: the KV of the
        tokens known so far, and of ``token_ids`` after them."""
        for layer, keys, values in zip(self.layers, tensors[::2], tensors[1::2], strict=True):
            if not layer.is_initialized:
                layer.update(keys[..., :0, :], values[..., :0, :])
            layer.keys, layer.values = keys, values
        self._token_ids += token_ids
        self._num_prompt_tokens = len(self._token_ids)

    def computed(self, token_ids: Sequence[int]) -> None:
        """A forward pass has computed the KV of these, after what was there."""
        self._token_ids += token_ids
        if len(token_ids) > 1:
            self._num_prompt_tokens = len(self._token_ids)

    def kept(self, num_chunks: int) -> None:
        """So many leading chunks need not be stored again."""
        self._num_kept = num_chunks

    # -- what generate does to caches ----------------------------------------------------------

    def crop(self, tokens_to_remove: int) -> None:
        """As assisted decoding does with tokens that were not accepted."""
        super().crop(tokens_to_remove)
        left = self.get_seq_length()
        del self._token_ids[left:]
        self._num_prompt_tokens = min(self._num_prompt_tokens, left)
        if self._keys is not None:
            self._keys.shorten(left)
            self._num_kept = min(self._num_kept, len(self._keys.keys))

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


def several_sequences() -> UnsupportedError:
    return UnsupportedError(
        "A TieredCache holds one sequence: batches, beams and several returned sequences are not "
        "supported, so generate them one by one, each with a cache of its own."
    )
