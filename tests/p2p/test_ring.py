"""A prompt passes through a buffer of any size, in segments that cover it once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lmcache_connector.p2p.ring import Ring


@given(st.integers(1, 5000), st.integers(1, 1 << 20), st.integers(1, 1 << 30))
def test_segments_cover_the_prompt_and_fit_the_buffer(
    num_blocks: int, block_bytes: int, buffer_bytes: int
) -> None:
    ring = Ring.of(num_blocks, block_bytes, buffer_bytes)
    parts = ring.split(0, num_blocks)
    assert [block for first, last in parts for block in range(first, last)] == [*range(num_blocks)]
    assert len(parts) == ring.num_segments
    assert ring.is_whole == (ring.num_segments <= ring.num_slots)
    fits = num_blocks * block_bytes <= buffer_bytes
    assert fits == (ring.memory_blocks == num_blocks) or ring.memory_blocks == 1
    if not fits and ring.memory_blocks > 1:
        assert ring.memory_blocks * block_bytes <= buffer_bytes // 2


def test_a_prompt_that_fits_is_whole() -> None:
    assert Ring.of(10, 4, 40) == Ring(10, 10, 1)
    assert Ring.of(11, 4, 40) == Ring(11, 1, 5)
    assert Ring.of(1000, 4, 640) == Ring(1000, 20, 4)
