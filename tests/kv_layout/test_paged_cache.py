"""A layout is checked before a byte is copied."""

from __future__ import annotations

import pytest
import torch

from lmcache_connector.kv_layout.chunk_buffers import ChunkBuffers, layer_table
from lmcache_connector.kv_layout.paged_cache import LayerSpec, LayoutError, PagedLayout, Plane
from lmcache_connector.storage.geometry import ChunkGeometry

SPEC = LayerSpec(num_kv_heads=2, block_size=16, content_bytes=24)
GEOMETRY = ChunkGeometry(
    num_tokens=32,
    layer_start=3,
    layer_widths=(24, 8),
    shards=(0, 1),
    num_shards_total=2,
    dtype="uint8",
)


def layer(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.zeros(shape or (5, 2, 16, 24), dtype=dtype)


@pytest.mark.parametrize(
    ("tensor", "spec", "message"),
    [
        (layer(5, 3, 16, 24), SPEC, "3 KV heads, the spec has 2"),
        (layer(5, 2, 32, 24), SPEC, "blocks of 32 tokens, the spec has 16"),
        (layer(5, 2, 12, 24), SPEC, "blocks of 12 tokens"),
        (layer(5, 2, 0, 24), SPEC, "blocks of 0 tokens"),
        (layer(5, 2, 8, 24), SPEC, "5 kernel blocks are no multiple of 2"),
        (layer(5, 2, 16, 23), SPEC, "content has 23 bytes, the spec has 24"),
        (layer(5, 2, 16, 24, dtype=torch.bfloat16), SPEC, "content has 48 bytes"),
        (layer(2, 5, 2, 16, 24), SPEC, "expected a"),
        (layer(5, 2, 24, 16).transpose(2, 3), SPEC, "not contiguous"),
        (layer(5, 2, 16, 24), LayerSpec(2, 16, 0), "not positive"),
        ([layer(), layer()], SPEC, "expected a"),
        (layer(), LayerSpec(2, 16, 24, (Plane(2, 8),)), "are not the 24 bytes of a token"),
    ],
)
def test_a_tensor_that_does_not_fit_its_spec_is_refused(
    tensor: torch.Tensor, spec: LayerSpec, message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        PagedLayout.from_kv_caches({"a": tensor}, {"a": spec})


@pytest.mark.parametrize(
    ("tensors", "specs", "message"),
    [
        ({}, {}, "differ"),
        ({"a": layer()}, {"b": SPEC}, "'a', 'b'"),
        ({"a": layer(), "b": layer(6, 2, 16, 24)}, {"a": SPEC, "b": SPEC}, "number of blocks"),
        (
            {"a": layer(), "b": layer(5, 2, 32, 24)},
            {"a": SPEC, "b": LayerSpec(2, 32, 24)},
            "block size",
        ),
        (
            {"a": layer(), "b": torch.empty(5, 2, 16, 24, dtype=torch.uint8, device="meta")},
            {"a": SPEC, "b": SPEC},
            "device",
        ),
    ],
)
def test_layers_that_do_not_fit_together_are_refused(
    tensors: dict[str, torch.Tensor], specs: dict[str, LayerSpec], message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        PagedLayout.from_kv_caches(tensors, specs)


def test_layers_of_different_width_may_share_blocks() -> None:
    """Packed blocks: each holds a wide layer, then a narrow one, then padding."""
    memory = torch.zeros(5, 2 * 16 * (24 + 8) + 100, dtype=torch.uint8)
    stride = memory.stride(0)
    wide = memory.as_strided((5, 2, 16, 24), (stride, 384, 24, 1))
    narrow = memory.as_strided((5, 2, 16, 8), (stride, 128, 8, 1), storage_offset=2 * 16 * 24)
    view = PagedLayout.from_kv_caches(
        {"wide": wide, "narrow": narrow}, {"wide": SPEC, "narrow": LayerSpec(2, 16, 8)}
    )
    assert view.layers.content_bytes.tolist() == [24, 8]
    assert view.spans.tolist() == [[wide.data_ptr(), narrow[4].data_ptr() + 2 * 16 * 8]]


@pytest.mark.parametrize(
    ("block_size", "addresses", "layers", "message"),
    [
        (24, [4096], None, "chunks of 32 tokens, blocks of 24"),
        (16, [4096, 0], None, "no memory"),
        (16, [4096], (1, 0, 1), "once each"),
        (16, [4096], (-1, 0), "no layers"),
    ],
)
def test_impossible_chunk_buffers_are_refused(
    block_size: int, addresses: list[int], layers: tuple[int, ...] | None, message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        ChunkBuffers(GEOMETRY, block_size, addresses, None, layers)


def test_planes_that_do_not_cover_a_token_have_no_place_in_a_chunk() -> None:
    chunk = ChunkBuffers(GEOMETRY, 16, [4096], None, (0,), (Plane(2, 8),))
    with pytest.raises(LayoutError, match="are not the 24 bytes of a token"):
        layer_table(chunk.layers, 16)
