"""A frame survives packing, and no bytes make the parser claim memory."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lmcache_connector.p2p.data.frame import HEAD_BYTES, Frame, FrameError, unpack_head
from tests.p2p.data.conftest import frame_of


@given(st.binary(min_size=HEAD_BYTES, max_size=HEAD_BYTES), st.booleans())
def test_no_head_breaks_the_parser(data: bytes, is_plausible: bool) -> None:
    if is_plausible:
        data = frame_of([b"x"]).pack()[:6] + data[6:]
    try:
        head = unpack_head(data)
    except FrameError:
        return
    assert 0 < head.frame.num_bytes <= 1 << 36
    assert head.tail_bytes <= 8 * 4096


@given(st.integers(1, 2**62), st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=9))
def test_frames_survive_packing(ticket: int, checksums: list[int]) -> None:
    frame = Frame(ticket, 1, 2, len(checksums), 3, 4, 5, tuple(checksums))
    packed = frame.pack()
    assert unpack_head(packed[:HEAD_BYTES]).with_tail(packed[HEAD_BYTES:]) == frame
