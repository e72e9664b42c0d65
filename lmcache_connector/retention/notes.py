"""What the engine's step has to tell the ledger, kept until somebody asks the ledger something.

The step waits for no lock, and a prompt that is used a hundred times before anything has to go is
walked through once. What is told of a chunk that is still being stored is kept until it comes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator

from lmcache_connector.plans import Claim, PrefixUse

_MAX_USES = 1024
_MAX_AWAITED, _MAX_CLAIMS = 1024, 16
"""Chunks that are being stored, and claims to each of them."""
_STORE_SECONDS = 60.0
"""A chunk that has not come by then is not the one that was on its way."""


class Notes:
    """``clock``: the ledger's. Thread-safe; nothing is done under the lock but to keep and take."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._uses: dict[PrefixUse, float] = {}  # the last one of each, and when it was
        self._given_up: dict[bytes, None] = {}

    def use(self, use: PrefixUse) -> bool:
        """O(1). False if there is no room: the ledger must be told of the others first."""
        now = self._clock()
        with self._lock:
            if self._uses.pop(use, None) is None and len(self._uses) >= _MAX_USES:
                return False
            self._uses[use] = now
            return True

    def give_up(self, keys: Iterable[bytes]) -> None:
        with self._lock:
            self._given_up |= dict.fromkeys(keys)

    def take(self, limit: int | None = None) -> tuple[list[tuple[PrefixUse, float]], list[bytes]]:
        """All uses or the oldest ``limit``, each with its time, and all that was given up."""
        if not (self._uses or self._given_up):
            return [], []
        with self._lock:
            uses = list(self._uses.items())[:limit]
            for use, _ in uses:
                del self._uses[use]
            given_up, self._given_up = list(self._given_up), {}
            return uses, given_up


class Awaited:
    """Claims to chunks on their way to the tier: of the newest chunks the first of each. Not
    thread-safe."""

    def __init__(self) -> None:
        self._claims: dict[bytes, dict[Claim, float]] = {}  # and when they were made

    def __bool__(self) -> bool:
        return bool(self._claims)

    def add(self, use: PrefixUse, missing: Iterable[bytes], now: float) -> None:
        """``missing``: of its keys, those that are not in the tier."""
        for key in missing:
            claims = self._claims.pop(key, {})
            if len(claims) < _MAX_CLAIMS:
                claims[use.claim] = now
            self._claims[key] = claims
            if len(self._claims) > _MAX_AWAITED:
                del self._claims[next(iter(self._claims))]

    def take(self, keys: Iterable[bytes], now: float) -> Iterator[tuple[bytes, Claim]]:
        """The claims to chunks that have come."""
        for key in keys:
            for claim, at in self._claims.pop(key, {}).items():
                if now - at <= _STORE_SECONDS:
                    yield key, claim
