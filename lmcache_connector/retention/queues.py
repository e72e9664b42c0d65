"""Parts of the ledger: limits, chunks by age, and uses noted by the engine's step."""

from __future__ import annotations

import heapq
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

from lmcache_connector.bounded import Latest
from lmcache_connector.plans import PrefixUse

MAX_USES = 1 << 14
"""Limit of notes; the oldest are dropped."""


class EvictionReason(Enum):
    """Why a chunk was evicted. The values are labels of a metric."""

    EXPIRED = "expired"
    OVER_SHARE = "over_share"
    OLDEST = "oldest"


@dataclass(frozen=True, slots=True)
class Limits:
    """In bytes. ``tenant_bytes``: guaranteed to each tenant. ``pin_bytes``: pinned chunks of all
    tenants, ``tenant_pin_bytes`` of each."""

    tenant_bytes: float = math.inf
    pin_bytes: float = 0.0
    tenant_pin_bytes: float = 0.0

    @classmethod
    def of(cls, capacity_bytes: float, tenant_share: float, pin_share: float) -> Limits:
        pin_bytes = capacity_bytes * pin_share
        return cls(capacity_bytes * tenant_share, pin_bytes, pin_bytes * tenant_share)


@dataclass(frozen=True, slots=True)
class Holdings:
    """Contents of the tier, and evictions since the start. ``tenant_bytes``: by label, at most 257.
    ``refused_pins``: how often a prompt was not pinned completely because of the limits.
    """

    tenant_bytes: tuple[tuple[str, int], ...] = ()
    pinned_bytes: int = 0
    refused_pins: int = 0
    evicted: tuple[tuple[str, int], ...] = ()


class AgeQueues:
    """Keys, least recently used first. A chunk of priority p ages ``2**p`` times slower.

    Operations are O(1); :meth:`oldest_first` does one comparison per used priority for each key.
    Not thread-safe.
    """

    def __init__(self) -> None:
        self._queues: dict[int, OrderedDict[bytes, float]] = {}  # key -> last use

    def put(self, key: bytes, priority: int, now: float) -> None:
        """Add the key as the newest of its priority. It must not be in a queue."""
        self._queues.setdefault(priority, OrderedDict())[key] = now

    def discard(self, key: bytes, priority: int) -> None:
        """Does nothing if the key is missing."""
        queue = self._queues.get(priority)
        if queue is not None and queue.pop(key, None) is not None and not queue:
            del self._queues[priority]

    def oldest_first(self, now: float) -> Iterator[bytes]:
        """Among equal ages, low priority first. The queues must not change meanwhile."""
        if len(self._queues) == 1:
            return iter(*self._queues.values())

        def weighed(priority: int) -> Iterator[tuple[float, bytes]]:
            slowness = 2.0**-priority
            return (((used - now) * slowness, key) for key, used in self._queues[priority].items())

        queues = map(weighed, sorted(self._queues))
        return (key for _, key in heapq.merge(*queues, key=lambda item: item[0]))


class Notes:
    """Uses that the engine's step notes; the ledger's next call applies them.

    The step thus never waits while the ledger walks a prompt, and a prompt used repeatedly between
    two evictions is walked once. ``clock``: the ledger's. Thread-safe.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._uses: Latest[PrefixUse, float] = Latest(MAX_USES)  # time of the latest note

    def use(self, use: PrefixUse) -> None:
        """O(1)."""
        now = self._clock()
        with self._lock:
            self._uses[use] = now

    def take_use(self) -> tuple[PrefixUse, float] | None:
        """The oldest use, and its time."""
        with self._lock:
            return self._uses.popitem(last=False) if self._uses else None
