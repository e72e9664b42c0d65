"""What one line of the log says of a start."""

from __future__ import annotations

from lmcache_connector.config.tiered import parse_config
from lmcache_connector.storage.geometry import ChunkGeometry, PartGeometries
from lmcache_connector.worker.build import banner
from lmcache_connector.worker.self_test import SelfTestResult


def test_a_self_test_quicker_than_the_clock_ends_no_start() -> None:
    config = parse_config({"cpu_gib": 1})
    result = SelfTestResult(num_bytes=1 << 20, store_seconds=0.0, load_seconds=0.5)
    chunk = ChunkGeometry(256, 0, (64, 64), (0,), 1, "bfloat16")
    line = banner(config, "0" * 64, PartGeometries((chunk,)), result)
    assert "self-test passed" in line
    assert "load 0.0 GB/s" in line
