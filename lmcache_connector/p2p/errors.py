"""What can go wrong between two peers. Each costs a recompute, never a request."""

from __future__ import annotations


class PeerError(Exception):
    """A peer that cannot be used now: gone, silent, refusing, or speaking something else.

    The message is one clause for a log line and holds no secret.
    """


class RefusedError(PeerError):
    """The peer answered, in words, that it will not."""


class AddressError(ValueError):
    """A request says where its KV is or goes, but not in a form that can be used."""
