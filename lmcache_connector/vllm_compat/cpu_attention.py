"""How vLLM's CPU attention packs a block, found out by letting it pack known numbers.

Its cache claims to be (blocks, KV heads, tokens, K and V), but inside one head's part of a block
the backend puts all K before all V, and each in an order that suits the CPU's instructions: on
AVX-512 K with tokens innermost, on AMX both in tiles. Bytes moved as if they lay token after token
come back right only into blocks of the same size on the same kind of CPU.

So the backend packs a pattern twice here: into blocks as vLLM made them, and into one block as
large as a chunk. If K and V each turn out to be a number of runs along the tokens
(:class:`Plane`), chunks can have the second form whatever the block size. What that form is goes
into the model's fingerprint: CPUs that pack in another way never read it.

vLLM chooses the instructions by the block size too: with AMX, blocks of 16 tokens are packed by
others. Then no run fits. Numbering all elements shows in which order those of a block have to be
taken for the runs to fit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from blake3 import blake3

from lmcache_connector.kv_layout.paged_cache import Plane

_CONTEXT = "lmcache-connector 2026-11 packing pattern v1"
_DIGITS = 256
"""Integers below this are exact in every dtype that K and V are computed in."""


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
    """Takes about a millisecond, and some ten where elements have to be numbered.

    Sizes in tokens; ``block_size`` divides ``chunk_size``.
    """
    blocks = _Form(attention, block_size, block_size, chunk_size)
    for kernel_block_size in (chunk_size, block_size):
        whole = _Form(attention, kernel_block_size, chunk_size, chunk_size)
        if (packing := _make_whole(blocks, whole)) is not None:
            return packing
    return Packing(f"blocks of {block_size}: {_digest(blocks.pattern())}", ())


@dataclass(frozen=True, slots=True)
class _Form:
    """One chunk in blocks of ``block_size``, packed as vLLM does for ``kernel_block_size``."""

    attention: CpuAttention
    kernel_block_size: int
    block_size: int
    chunk_size: int

    @property
    def num_elements(self) -> int:
        """Of K, and as many of V."""
        return self.chunk_size * self.attention.head_size

    def packed(self, numbers: torch.Tensor) -> torch.Tensor:
        """Numbers [2, ``num_elements``], K and V token after token, as they lie in memory: uint8
        [2, blocks, elements of a block, bytes of an element]."""
        from vllm import _custom_ops as ops
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        attention, size = self.attention, self.attention.head_size
        num_blocks = self.chunk_size // self.block_size
        shape = (num_blocks, 1, 2 * self.block_size, size)
        cache = torch.zeros(shape, dtype=attention.storage_dtype)
        halves = cache.chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(
            *numbers.to(attention.dtype).view(2, self.chunk_size, 1, size),
            *halves,
            torch.arange(self.chunk_size),
            _get_attn_isa(attention.dtype, self.kernel_block_size, size, attention.cache_dtype),
            k_scale=1.0,
            v_scale=1.0,
            kv_cache_dtype=attention.cache_dtype,
        )
        elements = torch.stack(halves).view(2, num_blocks, self.block_size * size, 1)
        return elements.view(torch.uint8)

    def pattern(self) -> torch.Tensor:
        """Numbers that any float of eight bits of precision holds exactly, in no order; packed."""
        raw = blake3(derive_key_context=_CONTEXT).digest(length=2 * self.num_elements)
        numbers = (torch.frombuffer(bytearray(raw), dtype=torch.uint8).float() - 128) / 16
        return self.packed(numbers.view(2, -1))

    def origins(self) -> torch.Tensor:
        """Which element lies where, by its place in K or V token after token: int64 [2, blocks,
        elements of a block]."""
        numbers = torch.arange(self.num_elements).expand(2, -1)
        found, weight = torch.zeros(1, dtype=torch.int64), 1
        while weight < self.num_elements:
            digits = self.packed(numbers // weight % _DIGITS).view(self.attention.dtype)
            found = found + weight * digits.squeeze(3).long()
            weight *= _DIGITS
        return found


def _make_whole(blocks: _Form, whole: _Form) -> Packing | None:
    """The packing whose planes make ``whole`` of ``blocks``, if there is one."""
    attention, parts, one = blocks.attention, blocks.pattern(), whole.pattern()
    orders: list[tuple[int, ...]] = [(), ()]
    runs = _find_runs(parts, one, attention)
    # Where storing changes numbers, elements cannot be numbered.
    if not runs and attention.storage_dtype == attention.dtype:
        origins, one_origins = blocks.origins(), whole.origins()
        if (found := _find_orders(origins, one_origins)) is None:
            return None
        # That all origins fit is the proof, for no two are equal; the pattern is a second opinion.
        runs = _find_runs(_take(origins, found), one_origins, attention)
        if runs != _find_runs(_take(parts, found), one, attention):
            return None
        orders = [tuple(order) for order in found.tolist()]
    if not runs:
        return None
    token_bytes = attention.head_size * attention.storage_dtype.itemsize
    return Packing(
        _digest(one),
        tuple(Plane(n, token_bytes // n, order) for n, order in zip(runs, orders, strict=True)),
    )


def _find_runs(
    blocks: torch.Tensor, whole: torch.Tensor, attention: CpuAttention
) -> tuple[int, ...]:
    """The least number of runs of K and of V that make ``whole`` of ``blocks``; none if one of
    the two has no such number. Both tensors [2, blocks, elements of a block, ...]."""
    counts = [n for n in range(1, attention.head_size + 1) if attention.head_size % n == 0]
    found = []
    for parts, one in zip(blocks, whole.flatten(1), strict=True):
        for num_runs in counts:
            runs = parts.reshape(len(parts), num_runs, -1).transpose(0, 1)
            if torch.equal(runs.flatten(), one):
                found.append(num_runs)
                break
    return tuple(found) if len(found) == len(blocks) else ()


def _find_orders(blocks: torch.Tensor, whole: torch.Tensor) -> torch.Tensor | None:
    """In which order the elements of a block come in the whole: int64 [2, elements of a block].

    Both as :meth:`_Form.origins` has them. None if one of them is no permutation.
    """
    everything = torch.arange(whole[0].numel())
    for side in (*blocks, *whole):
        if not torch.equal(side.flatten().sort().values, everything):
            return None
    places = whole.flatten(1).argsort(dim=1)
    return places.gather(1, blocks[:, 0]).argsort(dim=1)


def _take(blocks: torch.Tensor, orders: torch.Tensor) -> torch.Tensor:
    """K and V of all blocks with their elements in other orders."""
    return torch.stack([parts[:, order] for parts, order in zip(blocks, orders, strict=True)])


def _digest(pattern: torch.Tensor) -> str:
    return blake3(pattern.numpy().tobytes()).hexdigest()


def ask_for_amx() -> bool:
    """Whether the process may use it; ``False`` where there is none."""
    granted: bool = torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()
    return granted
