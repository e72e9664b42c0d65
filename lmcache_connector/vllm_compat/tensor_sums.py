"""The digest of a tensor on a GPU: two 64-bit sums over its mixed 4-byte words, and the last bytes.

::

    sum_k = sum over i of mix(word_i + (i + 1) * STEP_k)  mod 2^64,   k = 0, 1

``mix`` is a bijection of 64 bits (the finalizer of SplitMix64, Steele et al. 2014): one changed
word changes both sums, and each sum depends on the positions of words. The digest detects
accidents and updates, not deliberate collisions. It takes one launch and one pass over the memory;
its speed on a GPU has not been measured. Its test computes the same sums in numpy.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

STEPS = (0x9E3779B97F4A7C15, 0xD1342543DE82EF95)
"""Odd, so that no two positions within 2^64 words add the same."""
_WORDS_PER_PROGRAM = 8192


@triton.jit
def _mix(z):  # type: ignore[no-untyped-def]
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _sum_words(words, num_words, sums, STEP_0: tl.constexpr, STEP_1: tl.constexpr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    is_there = place < num_words
    word = tl.load(words + place, mask=is_there, other=0).to(tl.uint32, bitcast=True).to(tl.uint64)
    at = (place + 1).to(tl.uint64)
    for k in tl.static_range(2):
        mixed = _mix(word + at * (STEP_0 if k == 0 else STEP_1))
        total = tl.sum(tl.where(is_there, mixed, 0).to(tl.int64, bitcast=True), axis=0)
        tl.atomic_add(sums + k, total)


def sums_digest(tensor: torch.Tensor) -> bytes:
    """16 to 19 bytes for a contiguous tensor, after all work on its device's current stream."""
    sums = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    words, rest = split_words(tensor)
    if words.numel():
        grid = (triton.cdiv(words.numel(), _WORDS_PER_PROGRAM),)
        _sum_words[grid](words, words.numel(), sums, *STEPS, _WORDS_PER_PROGRAM)
    return bytes(sums.cpu().numpy().astype("<i8").tobytes()) + bytes(rest.cpu().numpy())


def split_words(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes of a contiguous tensor with any storage offset: 4-byte words, and up to 3 bytes at
    the end."""
    data = tensor.reshape(-1).view(torch.uint8)
    if data.storage_offset() % 4:
        data = data.clone()
    num_whole = data.numel() // 4 * 4
    return data[:num_whole].view(torch.int32), data[num_whole:]
