"""No lookup delays a step longer than asked, or outlasts its deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from math import inf

import pytest

from lmcache_connector.lookup.any_lookup import AnyLookup
from lmcache_connector.lookup.background_lookup import MISS, BackgroundLookup, PendingLookup, Places
from lmcache_connector.metrics.samples import Tally
from lmcache_connector.plans import Tier
from lmcache_connector.storage.redis.client.circuit_breaker import CircuitState
from tests.support.clock import Clock, within

KEYS = [bytes([i]) * 32 for i in range(4)]


class GatedLookup(AnyLookup):
    """Answers when the gate opens."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.asked: list[tuple[Sequence[bytes], float]] = []
        self.tried: list[Sequence[bytes]] = []
        self.started = threading.Event()
        self.closed = False
        self.error: Exception | None = None
        self.last_seconds = {Tier.REDIS: 0.5}
        self.answered = [Tier.REDIS]
        self.absent: bytes | None = None
        self.circuits: dict[str, CircuitState] = {}

    def servers(self) -> tuple[tuple[str, CircuitState], ...]:
        return tuple(self.circuits.items())

    @property
    def has_servers(self) -> bool:
        return True

    def find(
        self, keys: Sequence[bytes], deadline: float, gives_way: Callable[[], bool] | None = None
    ) -> dict[bytes, Tier]:
        if gives_way is not None:
            self.tried.append(keys)
            return {}
        self.asked.append((keys, deadline))
        self.started.set()
        assert self.gate.wait(30)
        if self.error is not None:
            raise self.error
        return dict.fromkeys(keys[:-1], Tier.REDIS)

    def maintain(self) -> None:
        """Nothing to connect."""

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def tier() -> GatedLookup:
    return GatedLookup()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def remote(tier: GatedLookup, clock: Clock) -> Iterator[BackgroundLookup]:
    remote = BackgroundLookup(tier, 5.0, clock)
    yield remote
    tier.gate.set()
    remote.close()
    assert tier.closed


def answer(pending: PendingLookup) -> Places | None:
    """Wait for an answer, in real seconds."""
    return pending.answer(4.0)


def test_a_pending_look_up_is_polled(remote: BackgroundLookup, tier: GatedLookup) -> None:
    pending = remote.submit(KEYS)
    assert pending.answer(0.0) is None
    assert pending.answer(0.001) is None
    tier.gate.set()
    assert answer(pending) == dict.fromkeys(KEYS[:3], Tier.REDIS)
    assert tier.asked == [(tuple(KEYS), 105.0)]


def test_a_late_answer_is_a_miss(remote: BackgroundLookup, tier: GatedLookup, clock: Clock) -> None:
    pending = remote.submit(KEYS)
    assert tier.started.wait(30)
    clock.now += 5.0
    assert pending.answer(10.0) == MISS, "and it does not wait for it either"


def test_ended_look_ups_are_not_sent(
    remote: BackgroundLookup, tier: GatedLookup, clock: Clock
) -> None:
    remote.submit(KEYS)
    assert tier.started.wait(30)
    late = remote.submit(KEYS[:1])
    clock.now += 6.0
    remote.submit(KEYS[:3]).cancel()
    last = remote.submit(KEYS[:2])
    tier.gate.set()
    assert answer(last) == dict.fromkeys(KEYS[:1], Tier.REDIS)
    assert late.answer(0.0) == MISS
    assert [len(keys) for keys, _ in tier.asked] == [4, 2]


def test_a_tier_that_raises_is_a_miss(
    remote: BackgroundLookup, tier: GatedLookup, caplog: pytest.LogCaptureFixture
) -> None:
    tier.error = ValueError("boom")
    tier.gate.set()
    assert answer(remote.submit(KEYS)) == MISS
    assert "boom" in caplog.text


def test_what_lookups_took_is_told_once(remote: BackgroundLookup, tier: GatedLookup) -> None:
    tally = Tally()
    tier.gate.set()
    assert answer(remote.submit(KEYS)) != MISS
    tier.last_seconds, tier.answered = {Tier.REDIS: 0.25}, []
    assert answer(remote.submit(KEYS)) != MISS
    remote.report(tally)
    remote.report(tally)
    taken = tally.take()
    assert taken is not None
    assert taken.observed("lookup_seconds", "redis") == [0.5, 0.25]


def test_a_tier_that_did_not_answer_is_no_quicker_than_before(
    remote: BackgroundLookup, tier: GatedLookup
) -> None:
    tier.gate.set()
    for took, is_answered, seconds in [
        (0.5, True, 0.5),
        (0.1, False, 0.5),  # other lookups left it no more time
        (1.0, False, 1.0),
        (4.5, True, 4.5),
        (0.5, False, 4.5),
        (0.2, True, 0.2),
        (4.9, False, inf),  # nearly all of its 5 s
        (0.0, False, inf),  # a late server is not asked
        (0.3, True, 0.3),
    ]:
        tier.last_seconds = {Tier.REDIS: took}
        tier.answered = [Tier.REDIS] if is_answered else []
        assert answer(remote.submit(KEYS)) != MISS
        assert remote.expected_seconds == {Tier.REDIS: seconds}


def test_slow_tiers_are_tried_while_nothing_is_looked_up(
    remote: BackgroundLookup, tier: GatedLookup, clock: Clock
) -> None:
    """Ever less often; a trial only measures how long a lookup takes."""
    tier.gate.set()
    keys = [bytes([i]) * 32 for i in range(64)]
    assert answer(remote.submit(keys)) != MISS
    share = remote.found_share
    for pause in (0.25, 0.5, 1.0):
        assert within(30.0, lambda: bool(tier.tried))
        assert tier.tried == [tuple(keys[:16])]
        clock.now += pause - 0.01
        assert not within(0.6, lambda: len(tier.tried) > 1)
        tier.tried.clear()
        clock.now += 0.01
    assert within(30.0, lambda: bool(tier.tried))
    tier.tried.clear()
    tally = Tally()
    remote.report(tally)
    taken = tally.take()
    assert taken is not None
    assert taken.observed("lookup_seconds", "redis") == [0.5]
    assert remote.found_share == share

    tier.last_seconds = {Tier.PEER: 0.002, Tier.REDIS: 4.9}
    tier.answered = [Tier.PEER]
    assert answer(remote.submit(keys)) != MISS
    assert remote.expected_seconds == {Tier.PEER: 0.002, Tier.REDIS: inf}
    assert not within(0.6, lambda: bool(tier.tried)), "peers are quick enough for any prompt"


def test_a_request_that_asks_nothing_hastens_the_next_trial(
    remote: BackgroundLookup, tier: GatedLookup, clock: Clock
) -> None:
    """Such requests do not count as idle time, or Redis would count as slow for a minute."""
    tier.gate.set()
    assert answer(remote.submit(KEYS)) != MISS
    for pause in (0.25, 0.5):
        assert within(30.0, lambda: bool(tier.tried))
        tier.tried.clear()
        clock.now += pause
    assert within(30.0, lambda: bool(tier.tried))
    for pause in (0.0, 0.25):
        tier.tried.clear()
        clock.now += pause
        if not pause:
            assert not within(0.6, lambda: bool(tier.tried))
            remote.try_soon()
        assert within(30.0, lambda: bool(tier.tried))


def test_a_trial_without_an_answer_makes_no_tier_slow(
    remote: BackgroundLookup, tier: GatedLookup, clock: Clock
) -> None:
    """The next may be a minute away."""
    tier.gate.set()
    assert answer(remote.submit(KEYS)) != MISS
    tier.last_seconds, tier.answered = {Tier.REDIS: 4.9}, []
    assert within(30.0, lambda: bool(tier.tried))
    tier.tried.clear()
    clock.now += 0.25
    assert within(30.0, lambda: bool(tier.tried))
    assert not within(0.3, lambda: remote.expected_seconds != {Tier.REDIS: 0.5})
    tier.last_seconds, tier.answered = {Tier.REDIS: 0.3}, [Tier.REDIS]
    clock.now += 0.5
    assert within(30.0, lambda: remote.expected_seconds == {Tier.REDIS: 0.3})


def test_a_circuit_is_told_when_it_changes_and_closed_when_its_server_has_gone(
    remote: BackgroundLookup, tier: GatedLookup
) -> None:
    tally, told = Tally(), []
    for circuits in (
        {"h:1": CircuitState.OPEN, "h:2": CircuitState.OPEN},
        *[{"h:2": CircuitState.OPEN}] * 2,
    ):
        tier.circuits = circuits
        remote.report(tally)
        taken = tally.take()
        told.append(taken.gauges if taken is not None else {})
    prefix = "circuit_state\nscheduler\n"
    assert told == [
        {f"{prefix}h:1": 2, f"{prefix}h:2": 2},
        {f"{prefix}h:1": 0, f"{prefix}h:2": 2},
        {},
    ]
