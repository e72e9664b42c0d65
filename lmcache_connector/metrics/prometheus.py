"""The connector's samples in vLLM's interfaces: stats container, Prometheus metrics, log line.

`TablePromMetrics` runs in vLLM's front end, which may serve several data-parallel engines, told
apart by labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from lmcache_connector.metrics.samples import Samples, sample_key, split_key
from lmcache_connector.metrics.table import Kind, Metric
from lmcache_connector.vllm_compat.api.names import KVConnectorPromMetrics, KVConnectorStats

if TYPE_CHECKING:
    from lmcache_connector.vllm_compat.api.names import VllmConfig

_TRAFFIC = (
    ("load", "cpu", "into KV caches"),
    ("load", "peer", "fetched from peers"),
    ("load", "redis", "fetched from Redis"),
    ("store", "cpu", "stored to CPU"),
    ("store", "redis", "written to Redis"),
)
_BYTES = {"load": "loaded_bytes", "store": "stored_bytes"}
_TROUBLES = (
    ("requests not cached", "bypassed_requests"),
    ("tokens left to compute", "declined_tokens"),
    ("failed loads", "failed_loads"),
    ("failed writes to Redis", "dropped_writes"),
    ("evicted chunks", "cpu_evictions"),
)
_CIRCUIT_OPEN = 2  # see the metric's documentation


def log_fields(samples: Samples) -> dict[str, str]:
    """The cache's activity in an interval: titles and texts for the log line."""
    fields: dict[str, str] = {}
    queried, saved = samples.total("queried_tokens"), samples.total("prefill_saved_tokens")
    if queried or saved:
        fields["hit tokens"] = (
            f"{saved:.0f} of {queried:.0f} (planned: "
            f"CPU {samples.total('hit_tokens', 'cpu'):.0f}, "
            f"peers {samples.total('hit_tokens', 'peer'):.0f}, "
            f"Redis {samples.total('hit_tokens', 'redis'):.0f}; "
            f"lost {samples.total('recomputed_tokens'):.0f})"
        )
    for verb, tier, title in _TRAFFIC:
        num_bytes = samples.total(_BYTES[verb], tier)
        if num_bytes:
            fields[title] = traffic(num_bytes, sum(samples.observed(f"{verb}_seconds", tier)))
    for title, name in _TROUBLES:
        if amount := samples.total(name):
            fields[title] = f"{amount:.0f}"
    if capacity := sum(samples.gauge_values("cpu_capacity_bytes")):
        used = sum(samples.gauge_values("cpu_used_bytes"))
        fields["CPU tier"] = f"{used / capacity:.0%} of {capacity / 2**30:.3g} GiB"
    if wrong := samples.total("audits", "mismatch"):
        fields["audits that found wrong KV"] = f"{wrong:.0f}"
    if _CIRCUIT_OPEN in samples.gauge_values("circuit_state"):
        fields["Redis or a peer"] = "DOWN"
    if saved := samples.total("prefill_saved_seconds"):
        fields["prefill saved"] = f"{saved:.3g} s"
    return fields


def traffic(num_bytes: float, seconds: float) -> str:
    """``32 MiB at 1.7 GB/s``, or ``32 MiB`` if ``seconds`` is 0."""
    text = f"{num_bytes / 2**20:.3g} MiB"
    return f"{text} at {num_bytes / seconds / 1e9:.2g} GB/s" if seconds > 0 else text


@dataclass
class TieredStats(KVConnectorStats):
    """Counts of an interval. ``data`` is a :class:`Samples` as plain data."""

    def reset(self) -> None:
        self.data = Samples().to_data()

    def aggregate(self, other: KVConnectorStats) -> Self:
        """Add another rank's or interval's samples. Returns ``self`` with a new ``data``, because
        others may hold the old one, and add to it on their own."""
        total = Samples()
        for data in (self.data, other.data):
            total.merge(Samples(**data))
        self.data = total.to_data()
        return self

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def reduce(self) -> dict[str, Any]:
        """Fields of the periodic log line."""
        return dict(log_fields(Samples(**self.data)))


class TablePromMetrics(KVConnectorPromMetrics):
    """Registers a table of metrics once per process; known label values start at zero."""

    def __init__(
        self,
        table: Mapping[str, Metric],
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics = {name: self._register(metric) for name, metric in table.items()}
        self._children: dict[tuple[int, str], Any] = {}
        for engine_index in per_engine_labelvalues:
            for metric in table.values():
                for labels in metric.known:
                    self._child(engine_index, sample_key(metric.name, *labels))

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for key, amount in transfer_stats_data["counters"].items():
            self._child(engine_idx, key).inc(amount)
        for key, value in transfer_stats_data["gauges"].items():
            self._child(engine_idx, key).set(value)
        for key, values in transfer_stats_data["observations"].items():
            child = self._child(engine_idx, key)
            for value in values:
                child.observe(value)

    def _register(self, metric: Metric) -> Any:
        options: dict[str, Any] = {
            "name": metric.full_name,
            "documentation": metric.documentation,
            "labelnames": [*self._labelnames, *metric.labels],
        }
        if metric.kind is Kind.COUNTER:
            return self._counter_cls(**options)
        if metric.kind is Kind.GAUGE:
            return self._gauge_cls(**options, multiprocess_mode="mostrecent")
        return self._histogram_cls(**options, buckets=list(metric.buckets))

    def _child(self, engine_index: int, key: str) -> Any:
        child = self._children.get((engine_index, key))
        if child is None:
            name, labels = split_key(key)
            values: Sequence[object] = (*self.per_engine_labelvalues[engine_index], *labels)
            child = self._metrics[name].labels(*values)
            self._children[engine_index, key] = child
        return child
