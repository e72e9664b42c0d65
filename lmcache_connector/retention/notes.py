"""What the engine's step has to tell the ledger, kept until somebody asks the ledger something.

The step waits for no lock, and a prompt that is used a hundred times before anything has to go is
walked through once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from lmcache_connector.plans import PrefixUse

_MAX_USES = 1024


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
