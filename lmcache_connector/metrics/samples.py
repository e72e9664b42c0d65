"""Figures on their way from workers and scheduler to ``/metrics``: plain data that adds up.

Both sides collect into :class:`Samples` and hand over what is new since they last did. vLLM adds up
those of all ranks and of the scheduler, ships the sum to the front end with each step's output, and
there it goes to Prometheus and into the log.

Counters are increments, gauges the latest value, observations single values of histograms. A key is
the metric's name and its label values, joined by newlines; so a ``Samples`` is three flat
dictionaries that any serialisation carries.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

_SEPARATOR = "\n"


@dataclass(slots=True)
class Samples:
    """What happened in some interval, on one rank or many."""

    counters: dict[str, float] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)
    observations: dict[str, list[float]] = field(default_factory=dict)

    def count(self, name: str, *labels: str, amount: float = 1) -> None:
        """Nothing is recorded for an amount of 0. Negative ones are a caller's bug."""
        if amount < 0:
            raise ValueError(f"{name} must not shrink, not even by {-amount}")
        if amount:
            key = sample_key(name, *labels)
            self.counters[key] = self.counters.get(key, 0) + amount

    def set(self, name: str, *labels: str, value: float) -> None:
        self.gauges[sample_key(name, *labels)] = value

    def observe(self, name: str, *labels: str, value: float) -> None:
        self.observations.setdefault(sample_key(name, *labels), []).append(value)

    def merge(self, later: Samples) -> None:
        """Take in another rank's, or a later interval's."""
        for key, amount in later.counters.items():
            self.counters[key] = self.counters.get(key, 0) + amount
        self.gauges.update(later.gauges)
        for key, values in later.observations.items():
            self.observations.setdefault(key, []).extend(values)

    @property
    def is_empty(self) -> bool:
        return not (self.counters or self.gauges or self.observations)

    def total(self, name: str, label: str | None = None) -> float:
        """Sum of a counter over all label values, or those whose first one is ``label``."""
        return sum(v for _, labels, v in _select(self.counters, name) if _fits(labels, label))

    def by_label(self, name: str) -> dict[str, float]:
        """A counter by its first label; empty without one."""
        return {labels[0]: v for _, labels, v in _select(self.counters, name) if labels}

    def gauge_total(self, name: str) -> float:
        return sum(value for _, _, value in _select(self.gauges, name))

    def observed(self, name: str, label: str) -> list[float]:
        return self.observations.get(sample_key(name, label), [])

    def to_data(self) -> dict[str, Any]:
        """Plain dictionaries, strings, numbers and lists."""
        return {
            "counters": self.counters,
            "gauges": self.gauges,
            "observations": self.observations,
        }

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Samples:
        """A copy: what is merged into it leaves ``data`` alone."""
        return cls(
            dict(data.get("counters", {})),
            dict(data.get("gauges", {})),
            {key: list(values) for key, values in data.get("observations", {}).items()},
        )


def sample_key(name: str, *labels: str) -> str:
    return _SEPARATOR.join((name, *labels))


def split_key(key: str) -> tuple[str, tuple[str, ...]]:
    """Name and label values."""
    name, *labels = key.split(_SEPARATOR)
    return name, tuple(labels)


def _select(
    samples: Mapping[str, float], wanted: str
) -> Iterator[tuple[str, tuple[str, ...], float]]:
    for key, value in samples.items():
        name, labels = split_key(key)
        if name == wanted:
            yield name, labels, value


def _fits(labels: tuple[str, ...], wanted: str | None) -> bool:
    return wanted is None or labels[:1] == (wanted,)


def log_fields(samples: Samples) -> dict[str, str]:
    """The periodic log line: what the cache did in this interval, for a person to read."""
    fields: dict[str, str] = {}
    queried = samples.total("queried_tokens")
    hit = samples.total("hit_tokens")
    if queried:
        fields["hit tokens"] = (
            f"{hit:.0f} of {queried:.0f} (CPU {samples.total('hit_tokens', 'cpu'):.0f}, "
            f"Redis {samples.total('hit_tokens', 'redis'):.0f})"
        )
    for verb, tier, title in _TRAFFIC:
        num_bytes = samples.total(_BYTES[verb], tier)
        if num_bytes:
            fields[title] = traffic(num_bytes, sum(samples.observed(f"{verb}_seconds", tier)))
    for title, name in _TROUBLES:
        if amount := samples.total(name):
            fields[title] = f"{amount:.0f}"
    if capacity := samples.gauge_total("cpu_capacity_bytes"):
        used = samples.gauge_total("cpu_used_bytes")
        fields["CPU tier"] = f"{used / capacity:.0%} of {capacity / 2**30:.3g} GiB"
    if any(value == 2 for _, _, value in _select(samples.gauges, "circuit_state")):
        fields["Redis"] = "DOWN"
    if saved := samples.total("prefill_saved_seconds"):
        fields["prefill saved"] = f"{saved:.3g} s"
    return fields


_TRAFFIC = (
    ("load", "cpu", "loaded from CPU"),
    ("load", "redis", "fetched from Redis"),
    ("store", "cpu", "stored to CPU"),
    ("store", "redis", "written to Redis"),
)
_BYTES = {"load": "loaded_bytes", "store": "stored_bytes"}
_TROUBLES = (
    ("tokens left to compute", "declined_tokens"),
    ("failed loads", "failed_loads"),
    ("tokens recomputed", "recomputed_tokens"),
    ("dropped writes", "dropped_writes"),
    ("evicted chunks", "evicted_chunks"),
)


def traffic(num_bytes: float, seconds: float) -> str:
    """``32 MiB at 1.7 GB/s``."""
    text = f"{num_bytes / 2**20:.3g} MiB"
    return f"{text} at {num_bytes / seconds / 1e9:.2g} GB/s" if seconds > 0 else text
