"""What the scheduler side tells, and when it looks."""

from __future__ import annotations

from lmcache_connector.metrics.samples import Tally
from lmcache_connector.plans import Tier
from lmcache_connector.scheduler.metrics import SchedulerMetrics
from lmcache_connector.storage.redis.client.circuit_breaker import CircuitState


def test_the_scheduler_side_tells_what_changed() -> None:
    tally, seconds = Tally(), [(Tier.REDIS, 0.25), (Tier.PEER, 0.01)]
    metrics = SchedulerMetrics(
        tally,
        lambda: 0.0,
        lambda: [seconds.pop(0) for _ in list(seconds)],
        lambda: (("h:1", CircuitState.TRIAL),),
    )
    tally.count("lookups", "redis", amount=2)
    tally.count("hit_tokens", "cpu", amount=512)
    tally.count("decisions", "load_faster", amount=3)
    taken = metrics.take(is_idle=True)
    assert taken is not None
    assert taken.total("lookups", "redis") == 2
    assert taken.total("hit_tokens", "cpu") == 512
    assert taken.counters["decisions\nload_faster"] == 3
    assert taken.observed("lookup_seconds", "redis") == [0.25]
    assert taken.observed("lookup_seconds", "peer") == [0.01]
    assert taken.gauges["circuit_state\nscheduler\nh:1"] == 1
    assert metrics.take(is_idle=True) is None
    tally.count("decisions", "load_faster")
    again = metrics.take(is_idle=True)
    assert again is not None
    assert again.counters == {"decisions\nload_faster": 1}
    assert again.gauges == {}, "the circuits are as they were"
    assert tally.total("decisions") == 4


def test_the_circuit_of_a_server_that_has_gone_is_told_no_more() -> None:
    tally, servers = Tally(), [("h:1", CircuitState.OPEN), ("h:2", CircuitState.OPEN)]
    metrics = SchedulerMetrics(tally, lambda: 0.0, tuple, lambda: tuple(servers))
    told = []
    for _ in range(3):
        tally.count("store_jobs")
        taken = metrics.take(is_idle=True)
        assert taken is not None
        told.append({key.split("\n")[-1]: value for key, value in taken.gauges.items()})
        servers[:] = [("h:2", CircuitState.OPEN)]
    assert told == [{"h:1": 2, "h:2": 2}, {"h:1": 0, "h:2": 2}, {}]


def test_while_requests_run_the_scheduler_side_is_looked_at_now_and_then() -> None:
    tally, now = Tally(), 100.0
    metrics = SchedulerMetrics(tally, lambda: now)
    assert metrics.take(is_idle=False) is None
    tally.count("store_jobs")
    assert metrics.take(is_idle=False) is None, "a step ago"
    now += 1.0
    assert taken_jobs(metrics, is_idle=False) == 1
    tally.count("store_jobs", amount=2)
    assert metrics.take(is_idle=False) is None
    assert taken_jobs(metrics, is_idle=True) == 2  # there may be no next step


def taken_jobs(metrics: SchedulerMetrics, is_idle: bool) -> float:
    taken = metrics.take(is_idle=is_idle)
    assert taken is not None
    return taken.total("store_jobs")
