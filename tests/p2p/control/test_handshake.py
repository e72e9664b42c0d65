"""A session key accepts the packets of its own session, in order, once."""

from __future__ import annotations

from lmcache_connector.p2p.control import messages
from lmcache_connector.p2p.control.handshake import SessionKey, Transcript
from tests.p2p.control.conftest import SECRET


def _unpacked(data: bytes) -> messages.Packet:
    head = messages.unpack_head(data[: messages.HEAD_BYTES])
    return head.with_body(data[messages.HEAD_BYTES :])


def test_a_session_takes_no_foreign_or_repeated_packet() -> None:
    transcript = Transcript.of(b"hello", b"nonce", b"card")
    ours = SessionKey(transcript.session_key(SECRET), is_server=False)
    theirs = SessionKey(transcript.session_key(SECRET), is_server=True)
    first = _unpacked(ours.seal(1, b"body"))
    assert theirs.accepts(first)
    assert not theirs.accepts(first)  # once more
    assert not ours.accepts(_unpacked(ours.seal(2, b"body")))  # reflected
    changed = bytearray(ours.seal(3, b"body"))
    changed[-1] ^= 1
    assert not theirs.accepts(_unpacked(bytes(changed)))
    other = SessionKey(Transcript.of(b"x", b"y", b"z").session_key(SECRET), is_server=False)
    assert not theirs.accepts(_unpacked(other.seal(4, b"body")))
