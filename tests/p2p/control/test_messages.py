"""Whatever bytes come, they are a message within its bounds or a ``PeerError``."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmcache_connector.p2p.control import messages
from lmcache_connector.p2p.errors import PeerError
from tests.p2p.control.conftest import CARD


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=300), st.sampled_from(["raw", "head", "hello"]))
def test_no_garbage_breaks_the_decoder(data: bytes, kind: str) -> None:
    packet = data
    if kind == "head":
        packet = messages.pack(1, data)
    if kind == "hello":
        packet = messages.pack(
            1, messages.encode(messages.Hello(bytes(32), CARD, "h", 1))[: len(data)]
        )
    with contextlib.suppress(PeerError):
        head = messages.unpack_head(packet[: messages.HEAD_BYTES].ljust(messages.HEAD_BYTES))
        assert head.num_bytes <= messages.MAX_BODY_BYTES
        messages.decode(packet[messages.HEAD_BYTES :])


def test_messages_keep_their_bounds() -> None:
    for message in (
        messages.Offer("x" * 513, bytes(32), 1),
        messages.Offer("", bytes(32), 1),
        messages.Offer("x", b"short", 1),
        messages.Offer("x", bytes(32), -1),
        messages.Accepted(0, 1, 1),
        messages.Accepted(1, 1, 0),
        messages.Keep(tuple("x" for _ in range(257))),
    ):
        with pytest.raises(PeerError):
            messages.decode(messages.encode(message))
