"""What the engine's step has to tell the ledger, kept until somebody asks the ledger something.

The step waits for no walk, and a prompt that is used a hundred times before anything has to go is
walked through once. What is told of a chunk that is still being stored is kept until it comes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator

from lmcache_connector.plans import Claim, PrefixUse

MAX_USES = 1 << 14
"""Kept at once; the oldest are forgotten."""
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

    def use(self, use: PrefixUse) -> None:
        """O(1)."""
        now = self._clock()
        with self._lock:
            self._uses.pop(use, None)
            self._uses[use] = now
            if len(self._uses) > MAX_USES:
                del self._uses[next(iter(self._uses))]

    def give_up(self, keys: Iterable[bytes]) -> None:
        with self._lock:
            self._given_up |= dict.fromkeys(keys)

    def take_use(self) -> tuple[PrefixUse, float] | None:
        """The oldest one, and its time."""
        with self._lock:
            if not self._uses:
                return None
            use = next(iter(self._uses))
            return use, self._uses.pop(use)

    def take_given_up(self, limit: int) -> list[bytes]:
        """So many of what was given up, the first ones last."""
        with self._lock:
            return [self._given_up.popitem()[0] for _ in range(min(limit, len(self._given_up)))]


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
