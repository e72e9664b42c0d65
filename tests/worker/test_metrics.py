"""What a rank's metrics say of its jobs and tiers, and when they are taken."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from lmcache_connector.plans import AuditJob, Fetched, JobResult, Outcome, Tier
from lmcache_connector.retention.ledger import Holdings
from lmcache_connector.storage.redis.client.circuit_breaker import CircuitState
from lmcache_connector.storage.redis.counters import TierCounts, WriteEnd
from lmcache_connector.storage.redis.tier import RedisTierStats
from lmcache_connector.worker.metrics import WorkerMetrics
from tests.support.jobs import load_job, store_job

LOAD = load_job(1, "r", (b"k",), ((0,),), may_fetch=True)
STORE = store_job(2, "r", (b"k",), ((0,),))
AUDIT = store_job(3, "r", (b"k",), ((0,),), job_type=AuditJob, may_fetch=True)
TIER = RedisTierStats(
    counts=TierCounts(
        chunks_hit=3,
        misses=Counter(missing=1),
        writes=Counter({WriteEnd.WRITTEN: 4, WriteEnd.QUEUE_FULL: 5, WriteEnd.FAILED: 1}),
        bytes_written=400,
    ),
    queued_bytes=7,
    servers=(("host:6379", CircuitState.OPEN),),
    writes_paused=True,
)


class Rank:
    """A rank whose counts the test sets."""

    def __init__(self) -> None:
        self.now = 0.0
        times = [(100, 0.5)]
        self.tier = TIER
        redis: Any = SimpleNamespace(
            stats=lambda: self.tier, take_write_times=lambda: [times.pop()] if times else []
        )
        jobs: Any = SimpleNamespace(num_open=2)
        ledger = SimpleNamespace(holdings=Holdings)
        cpu = SimpleNamespace(used_bytes=10, capacity_bytes=100.0, ledger=ledger)
        engine = SimpleNamespace(cpu=cpu)
        tiers: Any = SimpleNamespace(jobs=jobs, engine=engine, redis=redis, peers=None)
        transfers: Any = SimpleNamespace(num_refused=0)
        self.metrics = WorkerMetrics(0, tiers, transfers, lambda: self.now)


def test_a_load_counts_for_all_tiers_it_passed() -> None:
    rank = Rank()
    fetched = (Fetched(Tier.PEER, 150, 0.25), Fetched(Tier.REDIS, 450, 0.25))
    done = JobResult(1, Outcome.DONE, 1, 800, 0.6, fetched, copy_seconds=0.3)
    rank.metrics.job_ended(LOAD, done)
    rank.metrics.job_ended(STORE, JobResult(2, Outcome.MISSING, 1, 100, 0.5))
    taken = rank.metrics.take()
    assert taken is not None
    assert taken.total("loaded_bytes", "cpu") == 800
    assert taken.total("loaded_bytes", "peer") == 150
    assert taken.total("loaded_bytes", "redis") == 450
    assert taken.observed("load_seconds", "peer") == [0.25]
    assert taken.observed("load_seconds", "redis") == [0.25]
    assert taken.observed("load_bytes_per_second", "redis") == [1800]
    assert taken.observed("load_seconds", "cpu") == [pytest.approx(0.3)], "its copies"
    assert taken.observed("store_bytes_per_second", "cpu") == [200]
    assert taken.observed("store_bytes_per_second", "redis") == [200]
    assert taken.counters["failed_stores\nmissing"] == 1
    assert taken.total("failed_loads") == 0


def test_what_an_audit_fetched_counts_as_its_chunks_do() -> None:
    rank = Rank()
    fetched = (Fetched(Tier.REDIS, 450, 0.25),)
    rank.metrics.job_ended(AUDIT, JobResult(3, Outcome.MISSING, 1, 0, 0.6, fetched))
    taken = rank.metrics.take()
    assert taken is not None
    assert (taken.total("loaded_bytes"), taken.total("loaded_bytes", "redis")) == (450, 450)
    assert taken.observed("load_seconds", "redis") == [0.25]
    assert not taken.total("failed_loads") + taken.total("failed_stores")


def test_the_redis_tiers_counts_come_as_increments() -> None:
    rank = Rank()
    first = rank.metrics.take()
    assert first is not None
    assert first.counters == {
        "redis_chunks\nhit": 3,
        "redis_chunks\nmissing": 1,
        "written_chunks\nwritten": 4,
        "dropped_writes\nqueue_full": 5,
        "dropped_writes\nfailed": 1,
        "stored_bytes\nredis": 400,
    }
    assert first.gauges["circuit_state\n0\nhost:6379"] == 2
    assert first.gauges["writes_paused\n0"] == 1
    rank.now = 10.0
    second = rank.metrics.take()
    assert second is not None
    assert second.counters == {}
    assert sum(second.gauge_values("write_queue_bytes")) == 7


def test_the_circuit_of_a_server_that_has_gone_is_closed() -> None:
    rank = Rank()
    assert rank.metrics.take() is not None
    rank.now, rank.tier = 10.0, replace(TIER, servers=(("other:6379", CircuitState.HALF_OPEN),))
    told = rank.metrics.take()
    assert told is not None
    states = {key: value for key, value in told.gauges.items() if key.startswith("circuit_state")}
    assert states == {"circuit_state\n0\nhost:6379": 0, "circuit_state\n0\nother:6379": 1}
