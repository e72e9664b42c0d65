"""For any requests: pins stay within bounds, bytes count once, prefixes are evicted from the
end."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lmcache_connector.plans import Claim, PrefixUse
from lmcache_connector.retention.ledger import Ledger, Limits, _oldest_first

TENANTS = (b"", b"a", b"b", b"c")
SIZE = 10
CAPACITY = 24
# Prompts of a tenant share beginnings: paths through a tree with three branches.
PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=6)
CLAIMS = st.builds(
    Claim,
    pin=st.booleans(),
    ttl_seconds=st.none() | st.floats(0.1, 50),
    priority=st.integers(-4, 4),
)


class LedgerMachine(RuleBasedStateMachine):
    @initialize(tenant_share=st.floats(0.01, 1), pin_share=st.floats(0, 0.5))
    def start(self, tenant_share: float, pin_share: float) -> None:
        self.now = 0.0
        self.limits = Limits.of(CAPACITY * SIZE, tenant_share, pin_share)
        self.ledger = Ledger(self.limits, lambda: self.now)
        self.parents: dict[bytes, bytes] = {}
        self.held: set[bytes] = set()
        self.orphans: set[bytes] = set()  # the chunk before was missing

    @rule(seconds=st.sampled_from([0.0, 0.5, 10.0, 700.0, 4000.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(tenant=st.integers(0, 3), path=PATHS, claim=CLAIMS, stored_from=st.integers(0, 5))
    def store(self, tenant: int, path: list[int], claim: Claim, stored_from: int) -> None:
        """Chunks before ``stored_from`` are in vLLM's own cache."""
        keys = [bytes([tenant, *path[: i + 1]]) for i in range(len(path))]
        parents = [b"", *keys[:-1]]
        self.parents.update(zip(keys, parents, strict=True))
        for key in keys[stored_from:]:
            if key not in self.held:
                while len(self.held) >= CAPACITY:
                    self.make_room()
                self.held.add(key)
                self.ledger.admit(key, SIZE)
        own = Claim(TENANTS[tenant], claim.pin, claim.ttl_seconds, claim.priority)
        self.ledger.use(keys[stored_from:], own, parents[stored_from:])
        self.note_orphans(keys)

    def note_orphans(self, keys: list[bytes]) -> None:
        self.orphans |= {
            key
            for key in self.held.intersection(keys)
            if self.parents[key] and self.parents[key] not in self.held
        }

    @rule(tenant=st.integers(0, 3), path=PATHS, claim=CLAIMS)
    def use_by_the_step(self, tenant: int, path: list[int], claim: Claim) -> None:
        """A request whose prompt ends with a chunk of the tier."""
        own = Claim(TENANTS[tenant], claim.pin, claim.ttl_seconds, claim.priority)
        key = bytes([tenant, *path])
        if key in self.held:
            self.ledger.note(PrefixUse(own, (key,)))

    @rule(count=st.integers(1, 4), num_busy=st.sampled_from([0, 0, 3, 12]), chance=st.randoms())
    def evict(self, count: int, num_busy: int, chance: Random) -> None:
        """Some chunks are in use; while they are, a chunk may be evicted after the one that it
        continues."""
        busy = frozenset(chance.sample(sorted(self.held), min(num_busy, len(self.held))))
        victims = self.ledger.evict(count, lambda key: key not in busy)
        chunks = self.ledger._chunks.items()
        num_free = sum(key not in busy and c.pinned_until is None for key, c in chunks)
        assert len(victims) == (count if num_free >= count else 0)
        assert busy.isdisjoint(victims)
        for number, victim in enumerate(victims):
            assert victim in self.held
            left = self.held.difference(victims[: number + 1]) - self.orphans
            # Fetched chunks have no priority before their use, and expired ones go next; of chunks
            # that expire together any may be first.
            claimed = {key: self.ledger._chunks[key] for key in left}
            left = {k for k, c in claimed.items() if c.is_claimed and k not in self.ledger._expired}
            holes = {key for key in left if self.parents[key] == victim}
            assert busy or not holes, "a hole"
            over = self.over_share(busy)
            if (
                over
                and len(self.users()) > 1
                and count == 1
                and not self.is_expired_or_idle(victim)
            ):
                assert victim[0] in over
        for victim in victims:
            self.drop(victim)
        self.note_orphans(list(self.held))

    def make_room(self) -> None:
        (victim,) = self.ledger.evict(1, lambda key: True)
        self.drop(victim)

    def drop(self, key: bytes) -> None:
        self.held.discard(key)
        self.orphans.discard(key)
        self.ledger.drop(key)

    def users(self) -> set[int]:
        return {key[0] for key in self.held}

    def over_share(self, busy: frozenset[bytes]) -> set[int]:
        """Tenants above their share with a chunk that may be evicted."""
        counts = {t: sum(key[0] == t for key in self.held) for t in self.users()}
        return {
            t
            for t, n in counts.items()
            if n * SIZE > self.limits.tenant_bytes
            and any(
                self.ledger._chunks[k].pinned_until is None for k in self.held - busy if k[0] == t
            )
        }

    def is_expired_or_idle(self, key: bytes) -> bool:
        used_at = self.ledger._chunks[key].tenant.used_at
        return key in self.ledger._expired or self.now - used_at > 600

    @invariant()
    def counts_are_right(self) -> None:
        if not hasattr(self, "ledger"):
            return
        holdings = self.ledger.holdings()
        assert len(self.ledger._chunks) == len(self.held)
        assert sum(n for _, n in holdings.tenant_bytes) == len(self.held) * SIZE
        pinned = {k: c for k, c in self.ledger._chunks.items() if c.pinned_until is not None}
        assert holdings.pinned_bytes == len(pinned) * SIZE
        assert holdings.pinned_bytes <= self.limits.pin_bytes
        for tenant in self.ledger._tenants.values():
            own = [c for c in pinned.values() if c.tenant is tenant]
            assert tenant.pinned_bytes == len(own) * SIZE <= self.limits.tenant_pin_bytes
        waiting = list(_oldest_first(self.ledger._queues, self.now))
        assert len(waiting) == len(set(waiting))
        elsewhere = len(pinned) + len(self.ledger._expired) + len(self.ledger._passed_over)
        assert len(waiting) + elsewhere == len(self.held)
        for queue in self.ledger._queues.values():
            assert sorted(queue.values()) == list(queue.values()), "the oldest is not the first"
        watched = {entry[:3] for entry in self.ledger._changes}
        for key, chunk in self.ledger._chunks.items():
            ends_at = chunk.expires_at if chunk.pinned_until is None else chunk.pinned_until
            ends = key not in self.ledger._expired and ends_at < float("inf")
            assert not ends or (ends_at, chunk.change, key) in watched


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=100, stateful_step_count=40)


@pytest.mark.parametrize("before", [Claim(ttl_seconds=1.0), Claim(pin=True)])
@pytest.mark.parametrize("used", [[b"1"], [b"1", b"2"]])
def test_prefixes_with_expired_pins_go_tail_first(before: Claim, used: list[bytes]) -> None:
    """Whatever lifetimes they had before."""
    now = 0.0
    ledger = Ledger(Limits.of(10 * SIZE, 1.0, 0.5), lambda: now)
    for key in (b"1", b"2"):
        ledger.admit(key, SIZE)
    ledger.use(used, before, [b"", b"1"])
    ledger.use([b"1", b"2"], Claim(pin=True), [b"", b"1"])
    now = 4000.0
    assert ledger.evict(1, lambda key: True) == [b"2"]
