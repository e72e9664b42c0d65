"""What a forward pass was asked for, read from the arguments of the model's ``forward``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lmcache_connector.errors import UnsupportedError
from lmcache_connector.transformers.cache import several_sequences

# These say nothing of what KV is, or are checked below. Whatever else is asked for, as images,
# embeddings or the attention of all tokens, has nothing to do with the tiers.
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


@dataclass(frozen=True, slots=True)
class ForwardCall:
    """``token_ids`` are to be computed after those that the cache holds. ``num_read``: of how many
    of the last ones the caller reads logits. ``is_checked``: whether the model was looked at right
    before the pass."""

    token_ids: tuple[int, ...]
    num_read: int
    is_checked: bool = False

    @classmethod
    def of(cls, arguments: Mapping[str, Any], num_cached: int) -> ForwardCall | None:
        """``None``: it asks for what the tiers know nothing of. ``arguments``: of ``forward``, by
        name. Raises :class:`UnsupportedError` for batches, padding and positions of one's own."""
        asked = {
            name for name, value in arguments.items() if value is not None and value is not False
        }
        input_ids = arguments.get("input_ids")
        if not isinstance(input_ids, torch.Tensor) or not asked <= _UNDERSTOOD:
            return None
        if arguments.get("use_cache") is False:
            return None
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
    """The arguments of a pass that need not compute its first ``number`` tokens: masks are as long
    as all tokens, those in the cache included."""
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
    """All arguments by name. ``names``: of the function's parameters, in order."""
    return {**dict(zip(names, args, strict=False)), **kwargs}
