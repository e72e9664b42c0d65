from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_connector.kv_parts.part import part_key
from lmcache_connector.storage.geometry import ChunkGeometry, PartGeometries
from lmcache_connector.storage.redis.config import RedisTierConfig
from lmcache_connector.storage.redis.value_names import stripe_suffix


@st.composite
def geometries(draw: st.DrawFn) -> ChunkGeometry:
    num_shards = draw(st.integers(1, 4))
    return ChunkGeometry(
        num_tokens=draw(st.integers(1, 32)),
        layer_start=draw(st.integers(0, 20)),
        layer_widths=tuple(draw(st.lists(st.integers(1, 64), min_size=1, max_size=20))),
        shards=tuple(draw(st.permutations(range(num_shards)))[: draw(st.integers(1, num_shards))]),
        num_shards_total=num_shards,
        dtype="bfloat16",
    )


@given(geometries(), st.integers(1, 1 << 15))
def test_stripes_cover_the_buffer_once_and_in_order(
    geometry: ChunkGeometry, max_bytes: int
) -> None:
    stripes = geometry.stripes(max_bytes)
    assert stripes[0].offset == 0
    for one, other in pairwise(stripes):
        assert one.offset + one.num_bytes == other.offset
    assert stripes[-1].offset + stripes[-1].num_bytes == geometry.chunk_bytes
    assert sum(stripe.layer_end - stripe.layer_start for stripe in stripes) == len(
        geometry.layer_widths
    ) * len(geometry.shards)
    for stripe in stripes:
        assert stripe.num_bytes <= max_bytes or stripe.layer_end - stripe.layer_start == 1


def test_the_cuts_of_a_chunk_into_values_never_change() -> None:
    """Golden cuts at the default size: with others, an instance finds no stored value."""
    config = RedisTierConfig(url="redis://host")
    whole = ChunkGeometry(256, 0, (512,) * 80, (0, 1), 2, "bfloat16")
    names = [stripe_suffix(stripe) for stripe in whole.stripes(config.max_payload_bytes)]
    assert names == [
        *(b":0-31:0", b":31-62:0", b":62-80:0"),
        *(b":0-31:1", b":31-62:1", b":62-80:1"),
    ]
    # A pipeline rank shares every value whose layers it has.
    second = ChunkGeometry(256, 31, (512,) * 49, (1,), 2, "bfloat16")
    names = [stripe_suffix(stripe) for stripe in second.stripes(config.max_payload_bytes)]
    assert names == [b":31-62:1", b":62-80:1"]
    # A rank that begins inside a value shares the values behind it.
    half = ChunkGeometry(256, 40, (512,) * 40, (0,), 2, "bfloat16")
    names = [stripe_suffix(stripe) for stripe in half.stripes(config.max_payload_bytes)]
    assert names == [b":40-62:0", b":62-80:0"]


@pytest.mark.parametrize(
    "changes",
    [
        {"num_tokens": 0},
        {"layer_widths": (64, 0)},
        {"shards": (0, 0)},
        {"shards": (2,)},
    ],
    ids=str,
)
def test_an_impossible_geometry_is_refused(changes: dict[str, object]) -> None:
    fields: dict[str, object] = {
        "num_tokens": 16,
        "layer_start": 0,
        "layer_widths": (64, 64),
        "shards": (0, 1),
        "num_shards_total": 2,
        "dtype": "bfloat16",
    }
    with pytest.raises(ValueError, match=r"chunk|layer_start|shards"):
        ChunkGeometry(**(fields | changes))  # type: ignore[arg-type]


def test_a_key_has_its_part() -> None:
    small, large = (ChunkGeometry(16, 0, (width,), (0,), 1, "uint8") for width in (8, 64))
    parts = PartGeometries((small, large))
    key = bytes(range(32))
    assert [parts.of(part_key(key, i, 2)) for i in range(2)] == [small, large]
    assert parts.largest is large
    with pytest.raises(ValueError, match="names part 2 of 2"):
        parts.of(part_key(key, 2, 3))
    assert PartGeometries((small,)).of(key) is small  # the key's last byte does not matter
    with pytest.raises(ValueError, match="at least one part"):
        PartGeometries(())
