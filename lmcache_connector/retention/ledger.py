"""The eviction order of one rank's CPU tier, and the bytes that each tenant holds there.

A chunk belongs to one tenant: its key includes the salt. A full tier evicts in this order:

1. expired chunks: every request that used them set a lifetime, and the last one has passed,
2. chunks that were in use at their turn before,
3. chunks of tenants above their share, beginning with the tenant furthest above it,
4. the least recently used chunks; each step of priority halves a chunk's age.

Pinned chunks are not evicted; pins are limited. Among several claims on a chunk, the longest
lifetime and the highest priority count. Evictions of chunks that the scheduler side relies on are
announced first: see :mod:`lmcache_connector.retention.leaving`.

Unless they are in use, the chunks that follow a chunk in a prompt are evicted before it: using a
chunk also uses all chunks before it, with the same claim, so no chunk is older, less pinned or
shorter-lived than those that follow it.
"""

from __future__ import annotations

import heapq
import math
import threading
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import chain, islice
from typing import Any

from lmcache_connector.bounded import Latest
from lmcache_connector.plans import Claim, PrefixUse
from lmcache_connector.retention.leaving import LeavingChunks

MAX_USES = 1 << 14
"""Limit of noted uses; the oldest are dropped."""
PIN_SECONDS = 3600.0
"""Longest duration of a pin, from the last request that asked for it."""
MAX_TOUCHED = 8192
"""Chunks that one call may touch by applying noted uses (the last use may exceed this), and chunks
whose pins and lifetimes one call may end."""
_IDLE_SECONDS = 600.0
"""A tenant idle for longer loses its guaranteed share."""
_MAX_AWAITED, _MAX_CLAIMS = 1024, 16
"""Chunks being stored that have claims, and claims per chunk."""
_STORE_SECONDS = 60.0
"""How long a claim waits for its chunk to be stored."""
_LOOKS = 64
"""Passed-over chunks that an eviction considers right after expired ones."""


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


Queue = OrderedDict[bytes, float]
"""Keys with the time of their last use, the least recently used first."""
Queues = defaultdict[int, Queue]
"""By priority."""


@dataclass(slots=True, eq=False)
class _Tenant:
    """``label``: one of 257, however many salts there are. ``expected_bytes``: of stores in
    progress."""

    name: bytes
    label: str
    num_bytes: int = 0
    expected_bytes: int = 0
    pinned_bytes: int = 0
    used_at: float = 0.0
    queues: Queues = field(default_factory=partial(defaultdict, OrderedDict))


@dataclass(slots=True, eq=False)
class _Chunk:
    """``places``: the queues that have it. A chunk is pinned (in none), expired, passed over (in
    use at its turn), or in two queues of its priority: of all tenants, and of its own tenant."""

    num_bytes: int
    tenant: _Tenant
    places: tuple[Queue, ...] = ()
    parent: bytes = b""
    is_claimed: bool = False
    priority: int = 0
    expires_at: float = math.inf
    pinned_until: float | None = None
    change: int = 0  # number of its current entry in `Ledger._changes`; 0: it has left the tier


class Ledger:
    """``clock`` is monotonic, in seconds. The tier's lock guards everything except `holdings` and
    `note`. ``leaving``: where evictions are announced first; ``None``: evictions are not
    announced."""

    def __init__(
        self, limits: Limits, clock: Callable[[], float], leaving: LeavingChunks | None = None
    ) -> None:
        self.on_noted_use: Callable[[Iterable[bytes]], None] = lambda keys: None
        """Called with the chunks of each noted use whose chunks may be written to Redis."""
        self._leaving = leaving
        self._noting = threading.Lock()
        self._noted: Latest[PrefixUse, float] = Latest(MAX_USES)  # time of the latest note
        # Claims on chunks that are still being stored, with their times: of the newest chunks, the
        # first claims of each.
        self._awaited: Latest[bytes, dict[Claim, float]] = Latest(_MAX_AWAITED)
        self._limits = limits
        self._clock = clock
        self._latest = -math.inf  # time of the latest use
        self._chunks: dict[bytes, _Chunk] = {}
        self._tenants: dict[bytes, _Tenant] = {}
        self._unowned = _Tenant(b"", "none")
        self._over: dict[_Tenant, None] = {}  # in the order in which they came over their share
        self._expecting: set[_Tenant] = set()  # tenants with expected bytes
        self._queues: Queues = defaultdict(OrderedDict)  # of all tenants
        self._expired: Queue = OrderedDict()
        self._passed_over: Queue = OrderedDict()  # in use at their turn, as by a write to Redis
        # A heap of the ends of pins and lifetimes. Entries with another number than their chunk's
        # are stale.
        self._changes: list[tuple[float, int, bytes, _Chunk]] = []
        self._num_changes = 0
        self._pinned_bytes = 0
        self._label_bytes: Counter[str] = Counter()
        self._evicted: Counter[EvictionReason] = Counter()
        self._refused_pins = 0

    def note(self, use: PrefixUse) -> None:
        """Note a use. The engine's step calls this, so that it need not wait while the ledger walks
        a prompt. A later `settle` applies the note; a prompt noted repeatedly until then is walked
        once. Thread-safe, O(1)."""
        now = self._clock()
        with self._noting:
            self._noted[use] = now

    # -- called by the tier --------------------------------------------------------------------

    def admit(self, key: bytes, num_bytes: int) -> None:
        """The tier stored a chunk. It has no tenant until a job or a noted use claims it."""
        if self._leaving is not None:
            self._leaving.keep((key,))
        self.drop(key)
        now = self.settle()
        chunk = self._chunks[key] = _Chunk(num_bytes, self._unowned)
        self._account(chunk.tenant, num_bytes)
        self._enter(key, chunk, now)

    def expect(self, name: bytes, num_bytes: int) -> None:
        """Stores of the tenant will add ``num_bytes`` (negative: no longer expected). While all
        such tenants have their share, stores evict nothing of tenants within theirs."""
        tenant = self._tenant(name)
        tenant.expected_bytes += num_bytes
        (self._expecting.add if tenant.expected_bytes else self._expecting.discard)(tenant)
        self._account(tenant)

    def use(self, keys: Sequence[bytes], claim: Claim, parents: Sequence[bytes] = ()) -> None:
        """A request with ``claim`` used these chunks, in prompt order: they become the newest, the
        first one evicted last. ``parents[i]``: the chunk before ``keys[i]``, empty for the first of
        a prompt; no parents where chunks do not build on others.

        Keys not in the tier are ignored. O(chunks and their predecessors).
        """
        now = self.settle()
        self._use(keys, claim, parents, now)
        for key in keys if self._awaited else ():
            for late, at in self._awaited.pop(key, {}).items():
                if now - at <= _STORE_SECONDS:
                    self._use([key], late, (), now)

    def settle(self) -> float:
        """Apply notes, oldest first, up to `MAX_TOUCHED` chunks; the next call goes on. Returns the
        time."""
        num_left = MAX_TOUCHED
        while num_left > 0 and self._noted:
            with self._noting:
                use, at = self._noted.popitem(last=False)
            self._latest = max(self._latest, at)  # another method may have read the clock later
            used = self._use(use.keys, use.claim, (), self._latest)
            num_left -= 1 + len(used)
            if use.may_write:
                self.on_noted_use(used)
            for key in use.keys:
                if key not in self._chunks:
                    claims = self._awaited[key] = self._awaited.get(key, {})
                    if len(claims) < _MAX_CLAIMS:
                        claims[use.claim] = self._latest
        now = self._latest = max(self._latest, self._clock())
        return now

    def drop(self, key: bytes, memory: Any = None) -> None:
        """The tier has removed the chunk, held in ``memory``; ``None``: it is stored again."""
        if self._leaving is not None and memory is not None:
            self._leaving.remove(key, memory)
        chunk = self._chunks.pop(key, None)
        if chunk is not None:
            self._leave(key, chunk)
            self._unpin(chunk)
            chunk.change = 0
            self._account(chunk.tenant, -chunk.num_bytes)

    def evict(self, count: int, may_go: Callable[[bytes], bool]) -> list[bytes]:
        """The next ``count`` chunks in eviction order among those that ``may_go``; the caller drops
        them. Empty if there are fewer, if some must be announced first, or if all stores under way
        belong to tenants that have their share, and too few chunks of such tenants may go."""
        victims = self._next_to_go(count, may_go)
        if self._leaving is not None and not self._leaving.announce(victims):
            return []
        self._evicted.update(victims.values())
        return list(victims)

    def announce(self, count: int, may_go: Callable[[bytes], bool]) -> None:
        """Announce the chunks that `evict` would return, so that it need not wait for a plan."""
        if self._leaving is not None:
            self._leaving.announce(self._next_to_go(count, may_go))

    def _next_to_go(
        self, count: int, may_go: Callable[[bytes], bool]
    ) -> dict[bytes, EvictionReason]:
        """In eviction order."""
        now = self.settle()
        while True:
            is_done = self._lapse(now)
            seen: dict[bytes, bool] = {}  # whether a chunk may go, in eviction order

            def is_free(key: bytes, seen: dict[bytes, bool] = seen) -> bool:
                if seen.get(key, True):
                    seen[key] = may_go(key)
                return seen[key]

            found = ((key, reason) for reason, key in self._order(now, is_free) if is_free(key))
            victims: dict[bytes, EvictionReason] = {}
            for key, reason in found:
                victims.setdefault(key, reason)
                if len(victims) == count:
                    break
            is_enough = len(victims) == count
            for key, is_victim in seen.items():
                # If none is evicted, free chunks too: they must go before the chunks they build on.
                if not (is_victim and is_enough):
                    self._pass_over(key)
            if is_enough:
                return victims
            if is_done:
                return {}

    def holdings(self) -> Holdings:
        """Thread-safe, O(labels)."""
        return Holdings(
            tuple(self._label_bytes.items()),
            self._pinned_bytes,
            self._refused_pins,
            tuple((reason.value, count) for reason, count in tuple(self._evicted.items())),
        )

    # -- uses ----------------------------------------------------------------------------------

    def _use(
        self, keys: Sequence[bytes], claim: Claim, parents: Sequence[bytes], now: float
    ) -> dict[bytes, _Chunk]:
        """Returns the chunks used, predecessors of ``keys`` included."""
        self._lapse(now)
        for key, parent in zip(keys, parents, strict=False):
            if (known := self._chunks.get(key)) is not None:
                known.parent = parent
        tail_first: dict[bytes, _Chunk] = {}
        for start in reversed(keys):
            key = start
            while key not in tail_first and (chunk := self._chunks.get(key)) is not None:
                tail_first[key] = chunk
                key = chunk.parent
        pins = claim.pin
        for key, chunk in reversed(tail_first.items()):
            self._leave(key, chunk)
            pins = self._claim(chunk, claim, now, pins=pins)
            chunk.tenant.used_at = now
        for key, chunk in tail_first.items():
            self._enter(key, chunk, now)
        if self._leaving is not None:
            self._leaving.keep(tail_first)
        return tail_first

    # -- order ---------------------------------------------------------------------------------

    def _order(
        self, now: float, may_go: Callable[[bytes], bool]
    ) -> Iterator[tuple[EvictionReason, bytes]]:
        for key in self._expired:
            yield EvictionReason.EXPIRED, key
        is_anybodys = len(self._tenants) < 2 or not (self._over or self._only_over_share_expected())
        for key in islice(self._passed_over, _LOOKS):
            tenant = self._chunks[key].tenant
            if is_anybodys or tenant is self._unowned or tenant in self._over:
                yield EvictionReason.OLDEST, key
        is_shared = len(self._tenants) > 1 and not self._is_oldest_idle(now)
        if self._over and is_shared:
            for tenant in sorted(
                self._over, key=lambda each: -each.num_bytes - each.expected_bytes
            ):
                yield from self._excess(tenant, now, may_go)
        if is_shared and self._only_over_share_expected():
            for tenant in (self._unowned, *self._over):
                for key in _oldest_first(tenant.queues, now):
                    yield EvictionReason.OLDEST, key
            return
        for key in chain(_oldest_first(self._queues, now), self._passed_over):
            yield EvictionReason.OLDEST, key

    def _excess(
        self, tenant: _Tenant, now: float, may_go: Callable[[bytes], bool]
    ) -> Iterator[tuple[EvictionReason, bytes]]:
        """The tenant's oldest chunks above its share. Chunks that may not go do not count towards
        it: with a slow Redis, most of the oldest wait to be written."""
        num_bytes = tenant.num_bytes + tenant.expected_bytes - self._limits.tenant_bytes
        for key in _oldest_first(tenant.queues, now):
            if num_bytes <= 0:
                return
            if may_go(key):
                num_bytes -= self._chunks[key].num_bytes
                yield EvictionReason.OVER_SHARE, key

    def _only_over_share_expected(self) -> bool:
        """Whether all expected bytes belong to tenants that have their share, if chunks without a
        tenant count as theirs. Such stores evict nothing of tenants within their share."""
        least = self._limits.tenant_bytes - self._unowned.num_bytes
        return bool(self._expecting) and all(each.num_bytes >= least for each in self._expecting)

    def _is_oldest_idle(self, now: float) -> bool:
        """Whether the least recently used chunk belongs to an idle tenant."""
        oldest = next(_oldest_first(self._queues, now), None)
        if oldest is None or (tenant := self._chunks[oldest].tenant) is self._unowned:
            return False
        return now - tenant.used_at > _IDLE_SECONDS

    # -- claims --------------------------------------------------------------------------------

    def _claim(self, chunk: _Chunk, claim: Claim, now: float, *, pins: bool) -> bool:
        """Returns whether following chunks may be pinned too: a pinned prefix has no gap."""
        expires_at = now + (math.inf if claim.ttl_seconds is None else claim.ttl_seconds)
        if chunk.is_claimed:
            chunk.expires_at = max(chunk.expires_at, expires_at)
            chunk.priority = max(chunk.priority, claim.priority)
        else:
            self._account(chunk.tenant, -chunk.num_bytes)
            chunk.tenant = self._tenant(claim.tenant)
            self._account(chunk.tenant, chunk.num_bytes)
            chunk.expires_at, chunk.priority, chunk.is_claimed = expires_at, claim.priority, True
        if not (pins and self._pin(chunk)):
            return False
        assert chunk.pinned_until is not None
        chunk.pinned_until = max(chunk.pinned_until, min(expires_at, now + PIN_SECONDS))
        return True

    def _pin(self, chunk: _Chunk) -> bool:
        if chunk.pinned_until is not None:
            return True
        size, limits = chunk.num_bytes, self._limits
        if (
            self._pinned_bytes + size > limits.pin_bytes
            or chunk.tenant.pinned_bytes + size > limits.tenant_pin_bytes
        ):
            self._refused_pins += 1
            return False
        chunk.pinned_until = 0.0
        self._pinned_bytes += size
        chunk.tenant.pinned_bytes += size
        return True

    def _unpin(self, chunk: _Chunk) -> None:
        if chunk.pinned_until is not None:
            chunk.pinned_until = None
            self._pinned_bytes -= chunk.num_bytes
            chunk.tenant.pinned_bytes -= chunk.num_bytes

    def _lapse(self, now: float) -> bool:
        """End pins and lifetimes that have passed; a chunk whose pin ends counts as just used.
        Returns False if more are left."""
        for _ in range(MAX_TOUCHED):
            if not (self._changes and self._changes[0][0] <= now):
                return True
            _, number, key, chunk = heapq.heappop(self._changes)
            if chunk.change == number:
                self._leave(key, chunk)
                self._unpin(chunk)
                self._enter(key, chunk, now)
        return False

    # -- queues and accounts -------------------------------------------------------------------

    def _enter(self, key: bytes, chunk: _Chunk, now: float) -> None:
        """Put a chunk that is in no queue where it belongs, as the newest, and schedule the end of
        its pin or lifetime. Among equal times, the chunk scheduled last comes last."""
        if chunk.pinned_until is not None:
            ends_at = chunk.pinned_until
        elif chunk.expires_at <= now:
            ends_at, chunk.places = math.inf, (self._expired,)
        else:
            ends_at = chunk.expires_at
            chunk.places = self._queues[chunk.priority], chunk.tenant.queues[chunk.priority]
        for place in chunk.places:
            place[key] = now
        self._num_changes += 1
        chunk.change = self._num_changes
        if ends_at < math.inf:
            heapq.heappush(self._changes, (ends_at, chunk.change, key, chunk))
        if len(self._changes) > 4 * len(self._chunks):  # most entries are stale
            self._changes = [entry for entry in self._changes if entry[3].change == entry[1]]
            heapq.heapify(self._changes)

    def _pass_over(self, key: bytes) -> None:
        """Remove a chunk in use from its queues; it is evicted once it is free."""
        chunk = self._chunks[key]
        if key not in self._expired and key not in self._passed_over:
            self._leave(key, chunk)
            chunk.places = (self._passed_over,)
            self._passed_over[key] = self._latest

    def _leave(self, key: bytes, chunk: _Chunk) -> None:
        for place in chunk.places:
            del place[key]
        chunk.places = ()

    def _tenant(self, name: bytes) -> _Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            label = name[:1].hex() or "none"
            tenant = self._tenants[name] = _Tenant(name, label, used_at=self._clock())
        return tenant

    def _account(self, tenant: _Tenant, num_bytes: int = 0) -> None:
        """Count bytes that the tenant has gained or lost, and whether it is above its share; forget
        one without chunks and stores."""
        tenant.num_bytes += num_bytes
        self._label_bytes[tenant.label] += num_bytes
        if tenant is self._unowned:
            return
        if tenant.num_bytes + tenant.expected_bytes > self._limits.tenant_bytes:
            self._over[tenant] = None
        else:
            self._over.pop(tenant, None)
        if not (tenant.num_bytes or tenant.expected_bytes):
            del self._tenants[tenant.name]


def _oldest_first(queues: Mapping[int, Queue], now: float) -> Iterator[bytes]:
    """Keys by age, least recently used first. A chunk of priority p ages ``2**p`` times slower;
    among equal ages, low priority comes first. One comparison per used priority for each key. The
    queues must not change meanwhile."""
    used = sorted(priority for priority, queue in queues.items() if queue)
    if len(used) == 1:
        return iter(queues[used[0]])

    def weighed(priority: int) -> Iterator[tuple[float, bytes]]:
        slowness = 2.0**-priority
        return (((at - now) * slowness, key) for key, at in queues[priority].items())

    return (key for _, key in heapq.merge(*map(weighed, used), key=lambda item: item[0]))
