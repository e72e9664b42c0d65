"""Differences of chunks, against plain arithmetic on tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmcache_connector.audit.compare import DTYPES, OPAQUE, compare_chunks
from lmcache_connector.audit.verdicts import combine
from lmcache_connector.plans import LayerDifference
from lmcache_connector.storage.geometry import ChunkGeometry

TOKENS, HEADS, LAYERS, WIDTH = 4, 3, 2, 8  # elements of K and V of one token and head


def geometry(item_bytes: int, heads: tuple[int, ...] = tuple(range(HEADS))) -> ChunkGeometry:
    return ChunkGeometry(TOKENS, 5, (WIDTH * item_bytes,) * LAYERS, heads, HEADS, "x")


def chunk(seed: int, name: str) -> torch.Tensor:
    """[heads][layers][tokens][width]."""
    numbers = torch.randn(
        HEADS, LAYERS, TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed)
    )
    return (numbers * 20).to(DTYPES[name])


def as_bytes(values: torch.Tensor) -> memoryview:
    return memoryview(values.contiguous().view(torch.uint8).numpy().tobytes())


def compare(name: str, one: torch.Tensor, other: torch.Tensor) -> tuple[LayerDifference, ...]:
    shape = geometry(one.element_size(), tuple(range(len(one))))
    return compare_chunks(as_bytes(one), as_bytes(other), shape, (name,) * LAYERS)


@pytest.mark.parametrize("name", DTYPES)
def test_every_format_is_read_as_its_numbers(name: str) -> None:
    one, other = chunk(1, name), chunk(2, name)
    for found in compare(name, one, other):
        half = slice(found.half * WIDTH // 2, (found.half + 1) * WIDTH // 2)
        ours, theirs = (side.double()[:, found.layer - 5, :, half] for side in (one, other))
        assert found.difference == pytest.approx(float((ours - theirs).square().sum()))
        assert found.computed == pytest.approx(float(ours.square().sum()))
        assert found.stored == pytest.approx(float(theirs.square().sum()))


def test_planes_keep_k_and_v_apart() -> None:
    one = chunk(1, "float32")
    other = one.clone()
    flat = other.view(HEADS, LAYERS, -1)
    flat[:, :, flat.shape[2] // 2 :] += 1  # V
    shape = geometry(4)
    found = compare_chunks(
        as_bytes(one), as_bytes(other), shape, ("float32",) * LAYERS, planar=True
    )
    assert [difference.difference > 0 for difference in found] == [False, True] * LAYERS


def test_opaque_bytes_count_by_whether_they_differ() -> None:
    one = torch.zeros(HEADS, LAYERS, TOKENS, WIDTH, dtype=torch.uint8)
    other = one.clone()
    other[:, 1, :, : WIDTH // 4] = 7
    error = combine(compare(OPAQUE, one, other))
    assert [layer for layer, _ in error.layers] == [5, 6]
    assert [error for _, error in error.layers] == [0.0, pytest.approx(0.5**0.5)]


@pytest.mark.parametrize("strange", [float("nan"), float("inf")])
def test_the_same_strange_number_is_no_difference_and_one_alone_an_infinite_one(
    strange: float,
) -> None:
    one = chunk(1, "bfloat16")
    one[0, 0, 0, 0] = strange
    assert combine(compare("bfloat16", one, one)).largest == 0
    assert combine(compare("bfloat16", one, chunk(1, "bfloat16"))).largest == float("inf")


@given(st.integers(0, 99), st.sampled_from(sorted(DTYPES)))
def test_ranks_add_up(seed: int, name: str) -> None:
    one, other = chunk(seed, name), chunk(seed + 100, name)
    whole = combine(compare(name, one, other))
    parts = [compare(name, one[i : i + 1], other[i : i + 1]) for i in range(HEADS)]
    summed = combine(found for part in parts for found in part)
    assert [layer for layer, _ in summed.layers] == [layer for layer, _ in whole.layers]
    for (_, error), (_, expected) in zip(summed.layers, whole.layers, strict=True):
        assert error == pytest.approx(expected)


def test_a_buffer_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="a chunk has 768 bytes"):
        compare_chunks(memoryview(b"x"), memoryview(b"x"), geometry(4), ("float32",) * LAYERS)
