"""A storm of requests on an engine whose caches are all too small: nothing may go wrong."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.engines.calls import check_integrity
from tests.support.engines.instance import StartInstance
from tests.support.engines.settings import kv_transfer
from tests.support.engines.storm import StormReport, run_storm
from tests.support.redis.servers import CACHE, Server, running_valkey

MIB = 1 << 20
_FLAT_BYTES = 100 * MIB


@pytest.fixture
def small_valkey() -> Iterator[Server]:
    """Room for some 40 chunks."""
    with running_valkey(CACHE | {"maxmemory": "48mb"}) as server:
        yield server


def storm(start: StartInstance, server: Server, num_requests: int, seconds: float) -> StormReport:
    """A storm with room for 16 chunks in memory and 28 blocks in vLLM's cache."""
    transfer = kv_transfer(redis_url=server.unix_url, cpu_gib=16 * MIB / 2**30)
    sizes = {"kv_cache_memory_bytes": 14 * MIB, "max_model_len": 2048, "max_num_seqs": 8}
    with start(transfer, **sizes, max_num_batched_tokens=512) as instance:
        report: StormReport = instance.call(run_storm, num_requests, seconds, seed=1)
        instance.call(check_integrity)
    print(f"\n{report}")
    return report


def assert_flawless(report: StormReport) -> None:
    assert report.mismatches == 0
    assert report.far_blocks == 0
    assert report.failed_requests == 0
    assert report.checked_blocks > 0
    assert report.preemptions > 0
    assert report.evictions > 0
    assert report.counts.total("hit_tokens", "cpu") > 0
    assert report.counts.total("hit_tokens", "redis") > 0
    assert report.rss_bytes[-1] < report.rss_bytes[0] + _FLAT_BYTES


@pytest.mark.timeout(900)
def test_a_short_storm(start: StartInstance, small_valkey: Server) -> None:
    assert_flawless(storm(start, small_valkey, num_requests=80, seconds=0))


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_long_storm(start: StartInstance, small_valkey: Server) -> None:
    report = storm(start, small_valkey, num_requests=200, seconds=450)
    assert_flawless(report)
    assert report.requests >= 200
