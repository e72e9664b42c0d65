from __future__ import annotations

import pytest

from lmcache_connector.storage.redis.client.circuit_breaker import CircuitBreaker, CircuitState
from tests.support.clock import Clock


def make(clock: Clock, jitter: float = 1.0) -> CircuitBreaker:
    return CircuitBreaker(1.0, 8.0, lambda: jitter, clock, threshold=3)


def test_failures_in_a_row_open_it() -> None:
    breaker = make(Clock())
    assert not breaker.failed()
    assert not breaker.failed()
    breaker.succeeded()
    assert not breaker.failed()
    assert not breaker.failed()
    assert breaker.state.name == "CLOSED"
    assert breaker.failed(), "says so once"
    assert not breaker.failed()
    assert breaker.state is CircuitState.OPEN


@pytest.mark.parametrize("jitter", [0.0, 1.0])
def test_one_attempt_per_back_off_which_doubles(jitter: float) -> None:
    clock = Clock()
    breaker = make(clock, jitter)
    breaker.failed(at_once=True)
    waits = []
    for _ in range(6):
        wait = breaker.seconds_until_retry()
        assert wait is not None
        waits.append(wait)
        assert not breaker.may_connect()
        clock.now += wait
        assert breaker.may_connect()
        assert not breaker.may_connect(), "the second asker waits for the next turn"
    assert waits == [(0.5 + 0.5 * jitter) * s for s in (1.0, 2.0, 4.0, 8.0, 8.0, 8.0)]


def test_a_success_after_a_connection_closes_it() -> None:
    clock = Clock()
    breaker = make(clock)
    breaker.failed(at_once=True)
    clock.now += 1.0
    assert breaker.may_connect()
    assert breaker.connected(), "had been open"
    assert breaker.state.name == "HALF_OPEN"
    assert breaker.failed(), "one failure is enough then"
    assert breaker.seconds_until_retry() == 4.0, "and it does not start from the beginning"
    clock.now += 4.0
    breaker.may_connect()
    breaker.connected()
    breaker.succeeded()
    assert breaker.state is CircuitState.CLOSED
    breaker.failed(at_once=True)
    assert breaker.seconds_until_retry() == 1.0


def test_an_attempt_that_shows_nothing_costs_no_back_off() -> None:
    clock = Clock()
    breaker = make(clock)
    breaker.failed(at_once=True)
    clock.now += 1.0
    for _ in range(3):
        assert breaker.may_connect()
        breaker.undecided()
    assert breaker.state is CircuitState.OPEN
    assert breaker.may_connect()
    assert breaker.seconds_until_retry() == 2.0, "as after one attempt"
    breaker.succeeded()
    breaker.undecided()
    assert breaker.state.name == "CLOSED"
