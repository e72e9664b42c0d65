"""The periodic log line reads as one line."""

from __future__ import annotations

from lmcache_connector.metrics.prometheus import TieredStats, log_fields
from lmcache_connector.metrics.samples import Samples


def test_the_log_line_reads_as_one_line() -> None:
    interval = Samples()
    interval.count("queried_tokens", amount=10000)
    interval.count("hit_tokens", "cpu", amount=6144)
    interval.count("hit_tokens", "redis", amount=2048)
    interval.count("prefill_saved_tokens", amount=7168)
    interval.count("recomputed_tokens", amount=1024)
    interval.count("bypassed_requests", "no_salt", amount=3)
    interval.count("loaded_bytes", "redis", amount=32 << 20)
    interval.observe("load_seconds", "redis", value=0.02)
    interval.count("failed_loads", "deadline", amount=2)
    interval.set("cpu_capacity_bytes", "0", value=2 << 30)
    interval.set("cpu_used_bytes", "0", value=1 << 30)
    interval.set("circuit_state", "0", "h:1", value=2)
    line = ", ".join(f"{k}={v}" for k, v in TieredStats.of(interval).reduce().items())
    assert line == (
        "hit tokens=7168 of 10000 (planned: CPU 6144, Redis 2048; lost 1024), "
        "fetched from Redis=32 MiB at 1.7 GB/s, requests not cached=3, failed loads=2, "
        "CPU tier=50% of 2 GiB, Redis=DOWN"
    )
    assert log_fields(Samples()) == {}
