"""A frame survives packing, and no bytes make the parser claim memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_connector.p2p.data.frame import HEAD_BYTES, Frame, FrameError, FrameKey, unpack_head
from tests.p2p.data.conftest import frame_of

KEY = bytes(range(32))


@given(st.binary(min_size=HEAD_BYTES, max_size=HEAD_BYTES), st.booleans())
def test_no_head_breaks_the_parser(data: bytes, is_plausible: bool) -> None:
    if is_plausible:
        data = frame_of([b"x"]).pack(1)[:6] + data[6:]
    try:
        head = unpack_head(data)
    except FrameError:
        return
    assert 0 < head.frame.num_bytes <= 1 << 36
    assert head.tail_bytes <= 32 * 4096 + 32


def opened(key: FrameKey, sealed: bytes) -> Frame:
    return key.open(unpack_head(sealed[:HEAD_BYTES]), sealed[HEAD_BYTES:])


@given(
    st.integers(1, 2**62),
    st.sampled_from([8, 32]),
    st.lists(st.binary(min_size=32, max_size=32), min_size=1, max_size=9),
)
def test_frames_survive_packing(ticket: int, size: int, digests: list[bytes]) -> None:
    frame = Frame(ticket, 1, 2, len(digests), 3, 4, 5, tuple(d[:size] for d in digests))
    assert opened(FrameKey(KEY), FrameKey(KEY).seal(frame)) == frame


def test_no_frame_is_changed_repeated_left_out_or_moved() -> None:
    sender = FrameKey(KEY)
    first, second, third = (sender.seal(frame_of([b"x"], ticket)) for ticket in (1, 2, 3))
    refused = [
        [b"\1" + first[1:]],  # not even a frame
        [first[:30] + bytes([first[30] ^ 1]) + first[31:]],  # another place in the prompt
        [first[:-1] + bytes([first[-1] ^ 1])],
        [first, first],  # once more
        [second],  # one is missing
        [first, third],
    ]
    for frames in refused:
        receiver = FrameKey(KEY)
        for sealed in frames[:-1]:
            opened(receiver, sealed)
        with pytest.raises(FrameError):
            opened(receiver, frames[-1])
    with pytest.raises(FrameError):  # of another session, or another connection of this one
        opened(FrameKey(bytes(32)), first)
    receiver = FrameKey(KEY)
    assert [opened(receiver, sealed).ticket for sealed in (first, second, third)] == [1, 2, 3]
