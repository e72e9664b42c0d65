"""Digests of the KV of models whose layers follow several rules: by layer, block and KV head.

A windowed layer has let go of blocks that no later token reads, and a state has a block here and
there, so digests are found by the place of a block in its request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from tests.support.engines.kv_digests import logical

NULL_BLOCK = 0


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """``first_token`` of a block in its request. The heads of a state are its ranks."""

    layer: str
    first_token: int
    head: int


Digests = dict[Place, str]


def digest_layers_on_rank(
    worker: Any, block_ids: tuple[list[int], ...], num_tokens: int, is_whole: bool = True
) -> Digests:
    """Runs in a worker process of vLLM: all blocks of a request that hold ``num_tokens`` tokens
    and nothing else, or, unless ``is_whole``, the beginning of the last one too. Of a state, the
    last one is that after the last token."""
    runner = worker.model_runner
    caches = runner.compilation_config.static_forward_context
    found: Digests = {}
    for group, ids in zip(runner.kv_cache_config.kv_cache_groups, block_ids, strict=True):
        size = group.kv_cache_spec.block_size
        for name in group.layer_names:
            cache = caches[name].kv_cache
            is_state = not hasattr(cache, "shape")
            last = -(-num_tokens // size) if is_state or not is_whole else num_tokens // size
            for index, block in enumerate(ids[:last]):
                if block == NULL_BLOCK:
                    continue
                heads = _state(cache, block) if is_state else logical(cache, [block])
                shift, left = worker.rank * len(heads), num_tokens - index * size
                for head, data in enumerate(heads):
                    place = Place(name, index * size, shift + head)
                    own = data if is_state else data[: min(size, left)]
                    found[place] = blake3(own.tobytes()).hexdigest()
    return found


def merged(ranks: Iterable[Digests]) -> Digests:
    """Of all ranks. Heads that several ranks hold are not looked at twice."""
    together: Digests = {}
    for digests in ranks:
        together |= digests
    return together


def differences(one: Mapping[Place, str], other: Mapping[Place, str]) -> list[Place]:
    """Where both hold a block, and not the same bytes."""
    return sorted(place for place in one.keys() & other.keys() if one[place] != other[place])


def _state(cache: Iterable[Any], block: int) -> list[Any]:
    """All pieces of one rank's state, one after the other, as one "head"."""
    import numpy as np
    import torch

    pieces = [piece[block].contiguous().cpu().flatten().view(torch.uint8) for piece in cache]
    return [np.concatenate([piece.numpy() for piece in pieces])]
