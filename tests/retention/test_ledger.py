"""The order in which the full CPU tier evicts chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from lmcache_connector.plans import Claim, PrefixUse
from lmcache_connector.retention import ledger
from lmcache_connector.retention.ledger import MAX_TOUCHED, PIN_SECONDS, Ledger, Limits
from tests.support.clock import Clock
from tests.support.costs import lines_run

SIZE = 10
A, B = b"tenant a", b"tenant b"


def prompt(name: str, num_chunks: int, first: int = 0) -> list[bytes]:
    return [f"{name}{i}".encode() for i in range(first, first + num_chunks)]


class Tier:
    """A tier of ``capacity`` chunks that evicts one by one, as LMCache does."""

    def __init__(self, capacity: int = 100, tenant_share: float = 1.0, pin_share: float = 0.0):
        self.clock = Clock(1000.0)
        self.capacity = capacity
        self.ledger = Ledger(Limits.of(capacity * SIZE, tenant_share, pin_share), self.clock)
        self.held: set[bytes] = set()
        self.busy: set[bytes] = set()

    def store(self, keys: Sequence[bytes], claim: Claim = Claim(), before: bytes = b"") -> None:  # noqa: B008
        """Chunks of one prompt that continue the chunk ``before``."""
        self.clock.now += 1
        num_bytes = SIZE * len(set(keys) - self.held)
        self.ledger.expect(claim.tenant, num_bytes)
        for key in keys:
            if key in self.held:
                continue
            while len(self.held) >= self.capacity and self.evict():
                pass
            if len(self.held) < self.capacity:
                self.held.add(key)
                self.ledger.admit(key, SIZE)
        self.ledger.expect(claim.tenant, -num_bytes)
        self.ledger.use(keys, claim, [before, *keys[:-1]])

    def evict(self) -> list[bytes]:
        victims = self.ledger.evict(1, lambda key: key not in self.busy)
        for key in victims:
            self.held.discard(key)
            self.ledger.drop(key)
        return victims

    def has(self, keys: Sequence[bytes]) -> int:
        """The number of ``keys`` in the tier."""
        return len(self.held.intersection(keys))

    def going(self) -> Iterator[str]:
        """The chunks in the order of their eviction, until none may go."""
        while victims := self.evict():
            yield victims[0].decode()


def test_a_use_of_a_chunk_counts_for_its_whole_prefix() -> None:
    tier = Tier()
    tier.store(prompt("x", 3))
    tier.store(prompt("y", 1))
    tier.ledger.use([b"x2"], Claim())
    assert list(tier.going()) == ["y0", "x2", "x1", "x0"]


def test_noted_uses_name_the_chunks_that_redis_may_lack() -> None:
    tier, named = Tier(), list[bytes]()
    tier.ledger.on_noted_use = named.extend
    tier.store(prompt("x", 3))
    tier.store(prompt("y", 2))
    tier.ledger.note(PrefixUse(Claim(), (b"x1",), may_write=True))
    tier.ledger.note(PrefixUse(Claim(), (b"y1",)))
    tier.ledger.settle()
    assert named == [b"x1", b"x0"]


# -- lifetimes -------------------------------------------------------------------------------------


def test_a_lifetime_spares_shared_chunks() -> None:
    tier = Tier()
    tier.store(prompt("x", 2))
    tier.store(prompt("x", 4), Claim(ttl_seconds=1))
    tier.store(prompt("y", 1))
    tier.clock.now += 10
    assert list(tier.going()) == ["x3", "x2", "x1", "x0", "y0"]
    assert dict(tier.ledger.holdings().evicted) == {"expired": 2, "oldest": 3}


@pytest.mark.parametrize("after", [5, 20])
def test_a_use_without_ttl_lifts_it(after: float) -> None:
    tier = Tier()
    tier.store(prompt("x", 1), Claim(ttl_seconds=10))
    tier.clock.now += after
    tier.ledger.use([b"x0"], Claim())
    tier.clock.now += 1
    tier.store(prompt("y", 1))
    tier.clock.now += 100
    assert list(tier.going()) == ["x0", "y0"]
    assert dict(tier.ledger.holdings().evicted) == {"oldest": 2}


# -- priority --------------------------------------------------------------------------------------


def test_each_priority_step_doubles_the_time() -> None:
    tier = Tier()
    tier.store(prompt("x", 1), Claim(priority=2))  # at 1001
    tier.clock.now = 1030.0
    tier.store(prompt("y", 1))
    tier.clock.now = 1035.0  # x: 34 s / 4, y: 4 s
    assert tier.ledger.evict(2, lambda key: True) == [b"x0", b"y0"]
    tier.clock.now = 1050.0  # x: 49 s / 4, y: 19 s
    assert tier.ledger.evict(2, lambda key: True) == [b"y0", b"x0"]


# -- pins ------------------------------------------------------------------------------------------


def test_pins_stay_within_bounds_and_leave_no_hole() -> None:
    tier = Tier(capacity=20, pin_share=0.5, tenant_share=0.5)
    for i in range(9):
        tier.store(prompt(f"a{i}-", 4), Claim(A, pin=True))
    assert tier.ledger.holdings().pinned_bytes == 5 * SIZE  # half of half of the tier
    for i in range(9):
        tier.store(prompt(f"b{i}-", 4), Claim(b"b%d" % i, pin=True))
    assert tier.ledger.holdings().pinned_bytes == 10 * SIZE
    assert tier.ledger.holdings().refused_pins > 0
    pinned = tier.held - {key.encode() for key in tier.going()}
    assert pinned == {*prompt("a0-", 4), b"a1-0", *prompt("b0-", 4), b"b1-0"}


def test_a_pin_ends() -> None:
    """Without a TTL after an hour, when the chunk becomes an ordinary one; with a TTL the chunk
    expires."""
    tier = Tier(capacity=10, pin_share=0.5)
    tier.store(prompt("x", 2), Claim(pin=True))
    tier.store(prompt("t", 2), Claim(pin=True, ttl_seconds=60))
    tier.store(prompt("y", 2))
    tier.clock.now += 58
    assert tier.ledger.evict(3, lambda key: True) == []
    tier.clock.now += 2
    assert tier.ledger.evict(4, lambda key: True) == [b"t1", b"t0", b"y1", b"y0"]
    tier.clock.now += PIN_SECONDS
    assert list(tier.going()) == ["t1", "t0", "y1", "y0", "x1", "x0"]
    assert tier.ledger.holdings().pinned_bytes == 0


def test_a_pin_waits_for_chunks_being_stored() -> None:
    """vLLM's own cache serves the second request during the first one's store."""
    tier = Tier(capacity=20, pin_share=0.5)
    tier.ledger.note(PrefixUse(Claim(pin=True), (b"x2",)))
    tier.store(prompt("x", 3))
    assert tier.ledger.holdings().pinned_bytes == 3 * SIZE
    for i in range(10):
        tier.store(prompt(f"flood{i}-", 5), Claim(B))
    assert tier.has(prompt("x", 3)) == 3


def test_pins_of_absent_chunks_expire() -> None:
    tier = Tier(capacity=20, pin_share=0.5)
    for i in range(5000):
        tier.ledger.note(PrefixUse(Claim(pin=True, ttl_seconds=1.0 + i), (b"x2",)))
        tier.ledger.note(PrefixUse(Claim(pin=True), (b"%d" % i,)))
        tier.ledger.settle()
    claims = tier.ledger._awaited.values()
    assert sum(map(len, claims)) <= 1024 + 15
    tier.clock.now += 61
    tier.store(prompt("x", 3))
    assert tier.ledger.holdings().pinned_bytes == 0


# -- tenants ---------------------------------------------------------------------------------------


def test_a_flood_evicts_no_tenant_within_its_share() -> None:
    tier = Tier(capacity=20, tenant_share=0.5)
    tier.store(prompt("a", 10), Claim(A))
    for i in range(20):
        tier.store(prompt(f"b{i}-", 5), Claim(B))
    assert tier.has(prompt("a", 10)) == 10
    assert dict(tier.ledger.holdings().evicted).keys() == {"over_share"}


def test_chunks_without_tenant_go_first() -> None:
    tier = Tier(capacity=20, tenant_share=0.5)
    tier.held.add(b"nobody's")
    tier.ledger.admit(b"nobody's", SIZE)
    tier.store(prompt("a", 8), Claim(A))
    tier.store(prompt("b", 11), Claim(B))
    tier.busy = set(prompt("b", 11))
    tier.store([b"more"], Claim(B))
    assert b"nobody's" not in tier.held
    assert tier.has([b"more"]) == 1
    assert tier.has(prompt("a", 8)) == 8


def test_the_cost_of_a_refusal_ignores_chunks_of_others() -> None:
    def cost(num_others: int) -> int:
        tier = Tier(capacity=10**6, tenant_share=1e-5)  # ten chunks
        for i in range(num_others):
            tier.store(prompt(f"{i}-", 1), Claim(b"%d" % (i % 1000)))
            tier.clock.now = 1000.0  # no tenant is idle
        tier.store(prompt("b", 20), Claim(B))
        tier.ledger.expect(B, SIZE)
        keys, found = set(prompt("b", 20)), list[bytes]()
        lines = lines_run(
            lambda: found.extend(tier.ledger.evict(1, lambda key: key not in keys)), ledger
        )
        assert found == []
        return lines

    assert cost(5000) == cost(50)


def test_the_tenant_most_above_share_goes_first() -> None:
    tier = Tier(capacity=20, tenant_share=0.1)
    tier.store(prompt("a", 6), Claim(A))
    tier.store(prompt("b", 13), Claim(B))
    tier.store([b"c"], Claim(b"c"))
    order = list(tier.going())
    assert order[:7] == [f"b{i}" for i in range(12, 5, -1)]
    assert order[-1] == "c"  # within its share


def test_bytes_being_stored_count_towards_the_share() -> None:
    tier = Tier(capacity=20, tenant_share=0.1)
    tier.store(prompt("a", 6), Claim(A))
    tier.store(prompt("b", 13), Claim(B))
    tier.ledger.expect(A, 8 * SIZE)
    assert tier.evict() == [b"a5"]


def test_an_idle_tenant_loses_its_share() -> None:
    tier = Tier(capacity=20, tenant_share=0.5)
    tier.store(prompt("gone", 10), Claim(A))
    tier.clock.now += 601
    for i in range(8):
        tier.store(prompt(f"b{i}-", 5), Claim(B))
    assert tier.has(prompt("gone", 10)) == 0


def test_a_pin_of_an_idle_tenant_does_not_end_others_shares() -> None:
    tier = Tier(capacity=40, tenant_share=0.5, pin_share=0.5)
    tier.store(prompt("gone", 1), Claim(b"gone", pin=True))
    tier.clock.now += 601
    tier.store(prompt("a", 10), Claim(A))
    for i in range(20):
        tier.store(prompt(f"b{i}-", 5), Claim(B))
    assert tier.has(prompt("a", 10)) == 10


def test_the_work_of_one_call_on_noted_uses_is_bounded() -> None:
    """Many uses of long prompts; later calls do the rest."""

    def cost(num_uses: int, length: int) -> int:
        tier = Tier(capacity=10**6)
        for i in range(0, num_uses, 100):
            tier.store(prompt(f"x{i}-", length))
        for i in range(num_uses):
            last = prompt(f"x{i - i % 100}-", length)[-1:]
            tier.ledger.note(PrefixUse(Claim(b"", ttl_seconds=1000.0 + i), tuple(last)))
        cost = lines_run(tier.ledger.settle, ledger)
        while tier.ledger._noted:
            tier.ledger.settle()
        return cost

    few, many = cost(100, 100), cost(800, 400)
    assert many < 1.3 * few, "8,192 chunks, and what is left of the last prompt"


def test_lifetimes_that_end_together_end_in_parts() -> None:
    def cost(num_chunks: int) -> int:
        tier = Tier(capacity=10**6)
        tier.store(prompt("x", num_chunks), Claim(ttl_seconds=10))
        tier.store([b"y"])
        tier.clock.now += 20
        found: list[bytes] = []
        cost = lines_run(lambda: found.extend(tier.ledger.evict(1, lambda key: True)), ledger)
        assert found == [prompt("x", num_chunks)[-1]]
        return cost

    assert cost(4 * MAX_TOUCHED) < 1.1 * cost(MAX_TOUCHED + 10)


def test_chunks_being_written_are_not_checked_at_each_eviction() -> None:
    """Beside 1,000 of them an eviction took 2.5 ms, under the tier's lock."""
    tier = Tier(capacity=2000)
    slow = prompt("slow", 1000)
    tier.store(slow)
    tier.store(prompt("x", 1000))
    tier.busy = set(slow)
    asked: list[bytes] = []

    def may_go(key: bytes) -> bool:
        asked.append(key)
        return key not in tier.busy

    for _ in range(20):
        (victim,) = tier.ledger.evict(1, may_go)
        assert victim.startswith(b"x")
        tier.ledger.drop(victim)
    assert len(asked) <= 1000 + 20 * 66
    tier.busy.clear()
    assert tier.ledger.evict(1, may_go) == [b"slow999"], "it was its turn"
    tier.busy = set(slow[1:]) | set(prompt("x", 1000))
    assert tier.ledger.evict(1, may_go) == [b"slow0"], "and no other may go"


def test_many_salts_leave_no_state() -> None:
    tier = Tier(capacity=10, tenant_share=0.1)
    for i in range(2000):
        tier.store([b"%d" % i], Claim(b"%d" % i, ttl_seconds=60 + i % 7, priority=i % 5))
    list(tier.going())
    holdings = tier.ledger.holdings()
    assert len(holdings.tenant_bytes) <= 257
    assert all(num_bytes == 0 for _, num_bytes in holdings.tenant_bytes)
    assert not tier.ledger._tenants
    assert not tier.ledger._over
    assert not any(tier.ledger._queues.values())
    assert len(tier.ledger._changes) < 100


def test_a_prompt_goes_tail_first_after_an_eviction_without_room() -> None:
    tier = Tier()
    keys = prompt("a", 4)
    tier.store(keys)
    tier.busy = set(keys[:3])
    assert tier.ledger.evict(2, lambda key: key not in tier.busy) == []
    assert tier.ledger.evict(4, lambda key: True) == keys[::-1]
