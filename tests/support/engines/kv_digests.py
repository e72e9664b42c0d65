"""Digests of KV bytes that compare across block sizes, memory layouts and splits over ranks.

Every rank digests what it holds, in the order tokens and elements have by their meaning: per run of
tokens, KV head and layer, or, of models whose layers follow several rules, per layer, block and KV
head. A windowed layer has let go of blocks that no later token reads, and a state has a block here
and there, so these are found by the place of a block in its request. Nothing here relies on the
connector's own idea of a layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from blake3 import blake3

Layers = tuple[bytes, ...]


@dataclass(frozen=True)
class RankDigests:
    """``runs[tokens][run][head]`` digests every layer of this rank, for runs of ``tokens`` tokens.

    ``pipeline_rank`` orders ranks by their layers.
    """

    pipeline_rank: int
    runs: dict[int, list[dict[int, Layers]]]


def digest_on_rank(
    worker: Any, block_ids: Sequence[int], num_tokens: int, run_tokens: Sequence[int]
) -> RankDigests:
    """Runs in a worker process of vLLM: the KV of the first ``num_tokens`` tokens in blocks."""
    layers = [logical(cache, block_ids) for cache in worker.model_runner.kv_caches]
    parallel = worker.vllm_config.parallel_config
    tp_size = parallel.tensor_parallel_size
    num_heads = _num_kv_heads(worker.vllm_config)
    first_head = worker.rank % tp_size * num_heads // tp_size
    runs = {}
    for tokens in run_tokens:
        borders = range(0, num_tokens // tokens * tokens, tokens)
        runs[tokens] = [
            {
                first_head + head: tuple(
                    blake3(layer[head, start : start + tokens].tobytes()).digest()
                    for layer in layers
                )
                for head in range(layers[0].shape[0])
            }
            for start in borders
        ]
    return RankDigests(worker.rank // tp_size, runs)


def shard_digests(ranks: Iterable[RankDigests], tokens: int) -> tuple[tuple[str, ...], ...]:
    """Per run of ``tokens`` tokens and KV head of the model, one digest over all layers.

    Raises ``ValueError`` if ranks that hold the same head hold other bytes.
    """
    ordered = sorted(ranks, key=lambda rank: rank.pipeline_rank)
    digests = []
    for run in range(len(ordered[0].runs[tokens])):
        heads: dict[int, dict[int, Layers]] = {}
        for rank in ordered:
            for head, layers in rank.runs[tokens][run].items():
                known = heads.setdefault(head, {}).setdefault(rank.pipeline_rank, layers)
                if known != layers:
                    raise ValueError(f"ranks hold different bytes of KV head {head}")
        digests.append(
            tuple(
                blake3(b"".join(b"".join(part) for part in heads[head].values())).hexdigest()
                for head in sorted(heads)
            )
        )
    return tuple(digests)


def block_digests(ranks: Iterable[RankDigests], tokens: int) -> tuple[str, ...]:
    """One digest per block of ``tokens`` tokens, over all heads and layers."""
    return tuple(
        blake3("".join(heads).encode()).hexdigest() for heads in shard_digests(ranks, tokens)
    )


def _num_kv_heads(vllm_config: Any) -> int:
    model = vllm_config.model_config
    return 1 if model.use_mla else int(model.get_total_num_kv_heads())


def logical(cache: Any, block_ids: Sequence[int]) -> Any:
    """One layer's blocks as a uint8 array [KV heads, tokens, K and V of a token]."""
    import torch
    from vllm.platforms import current_platform

    blocks = cache[list(block_ids)].contiguous().cpu()
    if blocks.ndim == 3:  # latents: of one head, token by token
        return blocks.view(torch.uint8).reshape(1, -1, blocks.shape[2] * blocks.itemsize).numpy()
    num_blocks, heads, tokens, content = blocks.shape
    if current_platform.is_cpu():
        order = _cpu_order(blocks.dtype, tokens, content // 2)
        blocks = blocks.view(num_blocks, heads, tokens * content)[:, :, order]
        blocks = blocks.view(num_blocks, heads, tokens, content)
    flat = blocks.transpose(0, 1).reshape(heads, num_blocks * tokens, content)
    return flat.contiguous().view(torch.uint8).numpy()


@lru_cache(maxsize=8)
def _cpu_order(dtype: Any, tokens: int, head_size: int) -> Any:
    """Where in a block vLLM's CPU attention puts each element of [tokens][K, then V].

    Found by storing the numbers 0, 1, 2, ... the way the attention does, one hexadecimal digit at
    a time: each type of a cache holds the numbers below sixteen exactly.
    """
    import torch

    numbers = torch.arange(2 * tokens * head_size)
    found = torch.zeros_like(numbers)
    for shift in range(0, int(numbers[-1]).bit_length(), 4):
        found += _as_stored(numbers >> shift & 15, dtype, tokens, head_size) << shift
    return found.argsort()


def _as_stored(numbers: Any, dtype: Any, tokens: int, head_size: int) -> Any:
    """Numbers below sixteen, [tokens][K, then V], in the order of a block in memory."""
    import torch
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    eight_bits = dtype.itemsize == 1
    model_dtype = torch.bfloat16 if eight_bits else dtype
    cache_dtype = "fp8_e4m3" if eight_bits else "auto"
    key, value = numbers.view(tokens, 1, 2 * head_size).to(model_dtype).chunk(2, dim=2)
    block = torch.zeros(1, 1, 2 * tokens, head_size, dtype=dtype)
    ops.cpu_attn_reshape_and_cache(
        key.contiguous(),
        value.contiguous(),
        *block.chunk(2, dim=2),
        torch.arange(tokens),
        _get_attn_isa(model_dtype, tokens, head_size, cache_dtype),
        k_scale=1.0,
        v_scale=1.0,
        kv_cache_dtype=cache_dtype,
    )
    stored = block.flatten()
    if eight_bits:
        stored = stored.view(torch.float8_e4m3fn)
    return stored.float().round().long()


NULL_BLOCK = 0


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """``first_token`` of a block in its request. Of a state, ``head`` is the number of its rank."""

    layer: str
    first_token: int
    head: int


Digests = dict[Place, str]


def digest_layers_on_rank(
    worker: Any, block_ids: tuple[list[int], ...], num_tokens: int, is_whole: bool = True
) -> Digests:
    """Runs in a worker process of vLLM: a request's blocks that its first ``num_tokens`` tokens
    fill, and, unless ``is_whole``, the part of the last block that they fill. Of a state, the last
    block, which is the state after the last token, always counts."""
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
    """Of all ranks. A head that several ranks hold has a place for each of them."""
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
