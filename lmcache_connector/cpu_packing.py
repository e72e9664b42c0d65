"""How vLLM's CPU attention packs a block, found out by letting it pack known numbers.

Its cache claims to be (blocks, KV heads, tokens, K and V), but inside one head's part of a block
the backend puts all K before all V, and K in an order that suits the CPU's instructions: on
AVX-512 with tokens innermost, on AMX in tiles. Bytes moved as if they lay token after token come
back right only into blocks of the same size on the same kind of CPU.

So the backend packs a pattern twice here: into blocks as vLLM made them, and into one block as
large as a chunk. If K and V each turn out to be a number of runs along the tokens
(:class:`Plane`), chunks can have the second form whatever the block size. What that form is goes
into the model's fingerprint: CPUs that pack in another way never read it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from blake3 import blake3

from lmcache_connector.kv_layout import Plane

_CONTEXT = "lmcache-connector 2026-11 packing pattern v1"


@dataclass(frozen=True, slots=True)
class Packing:
    """``name`` tells apart forms of a chunk. Without ``planes`` blocks are moved as they are."""

    name: str
    planes: tuple[Plane, ...]


@dataclass(frozen=True, slots=True)
class CpuAttention:
    """What the order inside a block may depend on. ``dtype``: of K and V before they are stored;
    ``cache_dtype`` and ``storage_dtype``: the cache's, as vLLM names it and as torch does."""

    head_size: int
    dtype: torch.dtype
    cache_dtype: str
    storage_dtype: torch.dtype


def find_packing(attention: CpuAttention, block_size: int, chunk_size: int) -> Packing:
    """Runs in well under a millisecond. Sizes in tokens; ``block_size`` divides ``chunk_size``."""
    blocks = _packed(attention, block_size, block_size, chunk_size)
    whole = _packed(attention, block_size, chunk_size, chunk_size)
    planes = tuple(
        plane
        for parts, one in zip(blocks, whole, strict=True)
        if (plane := _plane(parts, one, attention)) is not None
    )
    if len(planes) == len(whole):
        return Packing(_digest(whole), planes)
    return Packing(f"blocks of {block_size}: {_digest(blocks)}", ())


def _packed(
    attention: CpuAttention, kernel_block_size: int, block_size: int, num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A pattern of K and of V in blocks of ``block_size``: uint8 [blocks, bytes] each.

    The backend chooses its instructions by the block size vLLM has: ``kernel_block_size``.
    """
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    size = attention.head_size
    num_blocks = num_tokens // block_size
    cache = torch.zeros(num_blocks, 1, 2 * block_size, size, dtype=attention.storage_dtype)
    key_cache, value_cache = cache.chunk(2, dim=2)
    pattern = _pattern(2 * num_tokens * size).to(attention.dtype).view(2, num_tokens, 1, size)
    ops.cpu_attn_reshape_and_cache(
        pattern[0],
        pattern[1],
        key_cache,
        value_cache,
        torch.arange(num_tokens),
        _get_attn_isa(attention.dtype, kernel_block_size, size, attention.cache_dtype),
        k_scale=1.0,
        v_scale=1.0,
        kv_cache_dtype=attention.cache_dtype,
    )
    keys, values = (
        half.reshape(num_blocks, -1).contiguous().view(torch.uint8)
        for half in (key_cache, value_cache)
    )
    return keys, values


def _pattern(count: int) -> torch.Tensor:
    """Numbers that any float of eight bits of precision holds exactly, in no order."""
    raw = blake3(derive_key_context=_CONTEXT).digest(length=count)
    return (torch.frombuffer(bytearray(raw), dtype=torch.uint8).float() - 128) / 16


def _plane(blocks: torch.Tensor, whole: torch.Tensor, attention: CpuAttention) -> Plane | None:
    """The plane that makes ``whole`` of ``blocks``, the one with the fewest runs."""
    size, token_bytes = attention.head_size, attention.head_size * attention.storage_dtype.itemsize
    for num_runs in (n for n in range(1, size + 1) if size % n == 0):
        if torch.equal(blocks.view(len(blocks), num_runs, -1).transpose(0, 1).flatten(), whole[0]):
            return Plane(num_runs, token_bytes // num_runs)
    return None


def _digest(tensors: tuple[torch.Tensor, ...]) -> str:
    hasher = blake3()
    for tensor in tensors:
        hasher.update(tensor.numpy().tobytes())
    return hasher.hexdigest()
