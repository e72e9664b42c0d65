"""What vLLM's CPU attention leaves to its surroundings: how it packs a block, and leave to use AMX.

Its cache claims to be (blocks, KV heads, tokens, K and V), but inside one head's part of a block
the backend puts all K before all V, and each in an order that suits the CPU's instructions: on
AVX-512 K with tokens innermost, on AMX both in tiles. Bytes moved as if they lay token after token
come back right only into blocks of the same size on the same kind of CPU.

So :func:`find_packing` has the backend pack a pattern twice: into blocks as vLLM made them, and
into one block as large as a chunk. If K and V each turn out to be a number of runs along the tokens
(:class:`Plane`), chunks can have the second form whatever the block size. That form goes into the
model's fingerprint, so CPUs that pack in another way never read such chunks. If no runs fit, blocks
are moved as they are, and the fingerprint holds their size too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from blake3 import blake3

from lmcache_connector.kv_layout.paged_cache import Plane

_CONTEXT = "lmcache-connector 2026-11 packing pattern v1"


def ask_for_amx() -> None:
    """Ask the kernel for permission to use AMX, the CPU's tile registers, where there are any.

    A process has to ask once. oneDNN does with its first large matrix product, vLLM's CPU attention
    never: an instance whose first forward pass is a decode step, because the KV of its prompt came
    from elsewhere, would die of an illegal instruction.
    """
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


@dataclass(frozen=True, slots=True)
class CpuAttention:
    """What the order inside a block depends on.

    ``head_size`` is in elements. ``dtype`` is that of K and V before they are stored;
    ``cache_dtype`` and ``storage_dtype`` are the cache's, as vLLM names it and as torch does.
    """

    head_size: int
    dtype: torch.dtype
    cache_dtype: str
    storage_dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Packing:
    """How blocks lie in memory, beyond what the strides of the KV cache say.

    ``name`` tells apart forms of a chunk; ``None``: strides say it all. Without ``planes`` blocks
    are moved as they are. The bytes of ``mixed_tokens`` may lie among one another.
    """

    name: str | None
    planes: tuple[Plane, ...]
    mixed_tokens: int = 1


def find_packing(attention: CpuAttention, block_size: int, chunk_size: int) -> Packing:
    """Sizes in tokens; ``block_size`` divides ``chunk_size``. Takes about a millisecond.

    Raises what vLLM's kernel raises for a cache it does not support.
    """
    blocks = _packed_pattern(attention, block_size, chunk_size)
    whole = _packed_pattern(attention, chunk_size, chunk_size)
    runs = _find_runs(blocks, whole, attention.head_size)
    if not runs:
        return Packing(f"blocks of {block_size}: {_digest(blocks)}", (), block_size)
    token_bytes = attention.head_size * attention.storage_dtype.itemsize
    planes = tuple(Plane(n, token_bytes // n) for n in runs)
    cut = chunk_size - 1  # odd: no tile ends there
    part = _packed_pattern(attention, chunk_size, chunk_size, num_tokens=cut)
    in_order = all(
        not half.reshape(n, chunk_size, -1)[:, cut:].any()
        for half, n in zip(part, runs, strict=True)
    )
    return Packing(_digest(whole), planes, 1 if in_order else block_size)


def _packed_pattern(
    attention: CpuAttention, block_size: int, chunk_size: int, num_tokens: int | None = None
) -> torch.Tensor:
    """K and V of one chunk as vLLM lays them out in blocks of ``block_size`` tokens. Zero after
    ``num_tokens``, if there are fewer.

    Returns uint8 ``[2, blocks, elements of a block, bytes of an element]``.
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
    """Float32 ``[2, num_elements]`` in no order; any float of eight bits of precision is exact."""
    raw = blake3(derive_key_context=_CONTEXT).digest(length=2 * num_elements)
    numbers = (torch.frombuffer(bytearray(raw), dtype=torch.uint8).float() - 128) / 16
    return numbers.view(2, -1)


def _find_runs(blocks: torch.Tensor, whole: torch.Tensor, head_size: int) -> tuple[int, ...]:
    """The least number of runs of K and of V that make ``whole`` of ``blocks``.

    Both as :func:`_packed_pattern` returns them. Empty if one of the two has no such number.
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
