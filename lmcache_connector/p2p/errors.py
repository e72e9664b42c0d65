"""What can go wrong between two peers. Each costs a recompute, never a request."""

from __future__ import annotations

from lmcache_connector.p2p.reasons import Cause, Reason


class PeerError(Exception):
    """A peer that cannot be used now: gone, silent, refusing, or speaking something else.

    The message is one clause for a log line and holds no secret.
    """

    def __init__(self, text: str, reason: Reason = Reason.OTHER) -> None:
        super().__init__(text)
        self.cause = Cause(reason, text)


class RefusedError(PeerError):
    """The peer answered, in words, that it will not."""

    def __init__(self, text: str, reason: Reason = Reason.REFUSED) -> None:
        super().__init__(text, reason)


class ReadError(PeerError):
    """NIXL did not read; the peer itself may be well."""


class AddressError(PeerError):
    """An address of a peer or a name of a hand-over that cannot be used."""
