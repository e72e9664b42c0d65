"""How two peers prove to each other that they know the shared secret, without telling it.

Both sides send a nonce and a card, and the client also whom it dialled. They prove themselves by an
HMAC-SHA256 over all of it, one per direction. The session's key is derived from the same values, so
a packet that is changed or comes from another session has the wrong tag, and a repeated one an old
sequence number. A data connection of the session has a key of its own, derived from the session's
and from a challenge that was never used before. Without a secret the first key is empty, which
guards against mix-ups only.

This authenticates; it does not encrypt.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass

from blake3 import blake3

from lmcache_connector.p2p.control.messages import Packet, pack

WELCOME_BYTES = 32
_CLIENT, _SERVER, _SESSION = b"client", b"server", b"session"


@dataclass(frozen=True, slots=True)
class Transcript:
    """A digest of what both sides have seen: the nonces and cards of client and server."""

    digest: bytes

    @classmethod
    def of(cls, hello: bytes, server_nonce: bytes, server_card: bytes) -> Transcript:
        parts = (hello, server_nonce, server_card)
        return cls(
            blake3(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).digest()
        )

    def server_proof(self, secret: bytes) -> bytes:
        return _mac(secret, _SERVER + self.digest)

    def client_proof(self, secret: bytes) -> bytes:
        return _mac(secret, _CLIENT + self.digest)

    def session_key(self, secret: bytes) -> bytes:
        return _mac(secret, _SESSION + self.digest)


class SessionKey:
    """Tags the packets of one session and checks them. Each direction has a key of its own."""

    def __init__(self, key: bytes, *, is_server: bool) -> None:
        ours, theirs = (_SERVER, _CLIENT) if is_server else (_CLIENT, _SERVER)
        self._ours, self._theirs = _mac(key, ours), _mac(key, theirs)
        self._last_seen = 0
        self.data_key = _mac(key, b"data")

    def seal(self, sequence: int, body: bytes) -> bytes:
        packet = Packet(sequence, b"", body)
        return pack(sequence, body, _mac(self._ours, packet.signed))

    def accepts(self, packet: Packet) -> bool:
        """Whether the packet is the peer's own and newer than all before."""
        genuine = proves(packet.tag, _mac(self._theirs, packet.signed))
        if not genuine or packet.sequence <= self._last_seen:
            return False
        self._last_seen = packet.sequence
        return True


def proves(given: bytes | bytearray, expected: bytes) -> bool:
    return hmac.compare_digest(given, expected)


def answer(key: bytes, challenge: bytes) -> bytes:
    """What the holder of a session's data key says to a challenge."""
    return _mac(key, b"answer" + challenge)


def frame_key(key: bytes, challenge: bytes) -> bytes:
    """What tags the frames of one data connection, from the client to the server."""
    return _mac(key, b"frames from the client" + challenge)


def welcome(key: bytes) -> bytes:
    """What whoever listens for frames with this key says first."""
    return _mac(key, b"welcome")


def _mac(key: bytes, data: bytes) -> bytes:
    return hmac.digest(key, data, "sha256")
