"""The connector's metrics in a registry, without vLLM's engine."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from lmcache_connector.metrics.prometheus import TablePromMetrics
from lmcache_connector.metrics.table import METRICS


def prom_metrics(registry: CollectorRegistry, engines: int) -> TablePromMetrics:
    """As vLLM's front end registers them: engines 0, 1 and so on, of one model ``m``."""
    types = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    config: Any = SimpleNamespace(kv_transfer_config=None)
    values: dict[int, list[object]] = {i: ["m", str(i)] for i in range(engines)}
    return TablePromMetrics(METRICS, config, types, ["model_name", "engine"], values)
