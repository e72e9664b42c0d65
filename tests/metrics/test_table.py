"""Names, labels and units of the metrics."""

from __future__ import annotations

import re

from lmcache_connector.metrics.table import METRICS, Kind


def test_names_follow_the_conventions() -> None:
    """https://prometheus.io/docs/practices/naming: base units last, counters without the suffix
    that the client library adds."""
    units = ("bytes", "seconds", "tokens", "bytes_per_second", "jobs", "chunks")
    for metric in METRICS.values():
        assert re.fullmatch(r"vllm:lmcache_[a-z_]+", metric.full_name)
        assert not metric.name.endswith("_total")
        assert metric.documentation.endswith(".")
        if metric.kind is Kind.HISTOGRAM:
            assert metric.name.endswith(units)
            assert list(metric.buckets) == sorted(metric.buckets)
    assert all(name == metric.name for name, metric in METRICS.items())
