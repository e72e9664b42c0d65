"""What the tiers were asked about one request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lmcache_connector.keys.request_keys import RequestKeys
from lmcache_connector.lookup.background_lookup import PendingLookup


@dataclass(slots=True)
class RequestLookup:
    """A vLLM request under the ``keys`` it is looked up by, and the answers. Written by its
    :class:`HitFinder`. ``offered_keys``: what the instance that the request names has of it.

    Times are readings of the hit finder's clock.
    """

    request: Any
    keys: RequestKeys
    pending: PendingLookup | None = None
    asked_at: float = 0.0
    wait_until: float | None = None  # set when the request begins to wait for an answer
    wait_seconds: float | None = None  # left after the last one, for all further ones
    asked_keys: tuple[bytes, ...] = ()
    redis_keys: frozenset[bytes] = frozenset()
    offered_keys: frozenset[bytes] = frozenset()
    is_counted: bool = False

    def cancel(self) -> None:
        """Nobody waits for the answer any more."""
        if self.pending is not None:
            self.pending.cancel()
            self.pending = None

    def lose(self, key: bytes) -> None:
        """It turned out not to be there."""
        self.redis_keys -= {key}
        self.offered_keys -= {key}

    def end_wait(self, now: float) -> None:
        """It has waited for the answer long enough, or has it."""
        if self.wait_until is not None:
            self.wait_seconds = max(0.0, self.wait_until - now)
        self.pending = self.wait_until = None

    def reset(self, keys: RequestKeys) -> None:
        """Answers about the keys from before are worth nothing."""
        self.cancel()
        self.keys, self.asked_keys = keys, ()
        self.redis_keys = self.offered_keys = frozenset()
        self.wait_until = None
