"""How two peers prove to each other that they know the shared secret, without telling it.

Both sides send a nonce, and answer with an HMAC-SHA256 over both nonces and both introductions, one
per direction. The key of the session comes from the same four things: a packet of another session,
a repeated or a changed one has the wrong tag. Without a secret the same is done with an empty one,
which then guards against mix-ups only.

This authenticates; it does not encrypt.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass

from blake3 import blake3

from lmcache_connector.p2p.control.messages import Packet, pack

_CLIENT, _SERVER, _SESSION = b"client", b"server", b"session"


@dataclass(frozen=True, slots=True)
class Transcript:
    """What both sides have seen: the client's and the server's introduction with their nonces."""

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
    """Tags packets of one session and checks them. Directions have keys of their own."""

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


def proves(given: bytes, expected: bytes) -> bool:
    return hmac.compare_digest(given, expected)


def answer(key: bytes, challenge: bytes) -> bytes:
    """What the holder of a session's data key says to a challenge."""
    return _mac(key, challenge)


def _mac(key: bytes, data: bytes) -> bytes:
    return hmac.digest(key, data, "sha256")
