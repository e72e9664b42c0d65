"""Order of bytes in vLLM's CPU attention blocks, and permission to use AMX.

The CPU cache has the shape (blocks, KV heads, tokens, K and V), but within one head's part of a
block the backend puts all K before all V, each in an order that suits the CPU's instructions: on
AVX-512 K has tokens innermost, on AMX both are in tiles. So a copy token by token is right only
between blocks of one size on one kind of CPU.

:func:`find_packing` lets the backend pack a pattern twice: into blocks as vLLM made them, and
into one block as large as a chunk. If K and V each consist of runs along the tokens
(:class:`Plane`), chunks are stored as that one block, whatever vLLM's block size. The order is part
of the model's fingerprint, so CPUs that pack differently share no chunks. If no runs fit,
blocks are copied as they are, and the fingerprint includes their size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from blake3 import blake3

from lmcache_connector.kv_layout.paged_cache import Plane

_CONTEXT = "lmcache-connector 2026-11 packing pattern v1"


def ask_for_amx() -> None:
    """Ask the kernel for permission to use AMX, the CPU's tile registers, if it has any.

    A process must ask once. oneDNN does so at its first large matrix product; vLLM's CPU attention
    never does: an instance whose first forward pass is a decode step, its prompt's KV having been
    loaded, would be killed by an illegal instruction.
    """
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


@dataclass(frozen=True, slots=True)
class CpuAttention:
    """What determines the order inside a block. ``head_size`` is in elements. ``dtype``: of K and V
    before they are stored. ``cache_dtype`` and ``storage_dtype``: of the cache, to vLLM and to
    torch.
    """

    head_size: int
    dtype: torch.dtype
    cache_dtype: str
    storage_dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Packing:
    """A block's layout in memory beyond the strides of the KV cache.

    ``name`` identifies the layout; ``None``: strides suffice. Without ``planes`` blocks are copied
    as they are. Bytes may be interleaved within each group of ``mixed_tokens`` tokens.
    """

    name: str | None
    planes: tuple[Plane, ...]
    mixed_tokens: int = 1


def find_packing(attention: CpuAttention, block_size: int, chunk_size: int) -> Packing:
    """Sizes in tokens; ``block_size`` divides ``chunk_size``. Takes about a millisecond. Raises the
    errors of vLLM's kernel for an unsupported cache.
    """
    blocks = _packed_pattern(attention, block_size, chunk_size)
    whole = _packed_pattern(attention, chunk_size, chunk_size)
    runs = _find_runs(blocks, whole, attention.head_size)
    if not runs:
        return Packing(f"blocks of {block_size}: {_digest(blocks)}", (), block_size)
    token_bytes = attention.head_size * attention.storage_dtype.itemsize
    planes = tuple(Plane(n, token_bytes // n) for n in runs)
    cut = chunk_size - 1  # no tile ends there, as tiles hold an even number of tokens
    part = _packed_pattern(attention, chunk_size, chunk_size, num_tokens=cut)
    in_order = all(
        not half.reshape(n, chunk_size, -1)[:, cut:].any()
        for half, n in zip(part, runs, strict=True)
    )
    return Packing(_digest(whole), planes, 1 if in_order else block_size)


def _packed_pattern(
    attention: CpuAttention, block_size: int, chunk_size: int, num_tokens: int | None = None
) -> torch.Tensor:
    """K and V of one chunk as vLLM lays them out in blocks of ``block_size`` tokens; zero after
    ``num_tokens``. Returns uint8 ``[2, blocks, elements of a block, bytes of an element]``.
    """
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    size = attention.head_size
    num_blocks = chunk_size // block_size
    cache = torch.zeros((num_blocks, 1, 2 * block_size, size), dtype=attention.storage_dtype)
    halves = cache.chunk(2, dim=2)
    pattern = _pattern(chunk_size * size).to(attention.dtype).view(2, chunk_size, 1, size)
    pattern[:, num_tokens or chunk_size :] = 0
    ops.cpu_attn_reshape_and_cache(
        *pattern,
        *halves,
        torch.arange(chunk_size),
        _get_attn_isa(attention.dtype, block_size, size, attention.cache_dtype),
        k_scale=1.0,
        v_scale=1.0,
        kv_cache_dtype=attention.cache_dtype,
    )
    elements = torch.stack(halves).view(2, num_blocks, block_size * size, 1)
    return elements.view(torch.uint8)


def _pattern(num_elements: int) -> torch.Tensor:
    """Float32 ``[2, num_elements]``, pseudo-random, exact in bfloat16."""
    raw = blake3(derive_key_context=_CONTEXT).digest(length=2 * num_elements)
    numbers = (torch.frombuffer(bytearray(raw), dtype=torch.uint8).float() - 128) / 16
    return numbers.view(2, -1)


def _find_runs(blocks: torch.Tensor, whole: torch.Tensor, head_size: int) -> tuple[int, ...]:
    """The smallest numbers of runs of K and of V that turn ``blocks`` into ``whole``, both as
    returned by :func:`_packed_pattern`. Empty if K or V has none.
    """
    counts = [n for n in range(1, head_size + 1) if head_size % n == 0]
    found = []
    for parts, one in zip(blocks, whole.flatten(1), strict=True):
        for num_runs in counts:
            runs = parts.reshape(len(parts), num_runs, -1).transpose(0, 1)
            if torch.equal(runs.flatten(), one):
                found.append(num_runs)
                break
    return tuple(found) if len(found) == len(blocks) else ()


def _digest(pattern: torch.Tensor) -> str:
    return blake3(pattern.numpy().tobytes()).hexdigest()
