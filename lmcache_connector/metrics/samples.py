"""Counts on their way from workers and scheduler to ``/metrics``: plain data that adds up.

Workers, the scheduler side and KV transfers each own a :class:`Tally`. Its owner counts where
things happen, under the names of the metrics, and whoever reports to vLLM takes the new part as
:class:`Samples`. vLLM adds up those of all ranks and of the scheduler, ships the sum to the front
end with each step's output, and there it goes to Prometheus and into the log.

Counters are increments, gauges the latest value, observations single values of histograms. A key is
the metric's name and its label values, joined by newlines; so a ``Samples`` is three flat
dictionaries that any serialisation carries.
"""

from __future__ import annotations

from collections.abc import Mapping
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
        """Add to a counter. Raises ``ValueError`` for a negative amount; 0 records nothing."""
        if amount < 0:
            raise ValueError(f"{name} must not shrink, not even by {-amount}")
        if amount:
            key = sample_key(name, *labels)
            self.counters[key] = self.counters.get(key, 0) + amount

    def set(self, name: str, *labels: str, value: float) -> None:
        """Set a gauge."""
        self.gauges[sample_key(name, *labels)] = value

    def observe(self, name: str, *labels: str, value: float) -> None:
        """Add one value to a histogram."""
        self.observations.setdefault(sample_key(name, *labels), []).append(value)

    def merge(self, later: Samples) -> None:
        """Add another rank's samples, or a later interval's."""
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
        wanted = sample_key(name) if label is None else sample_key(name, label)
        return sum(
            v
            for key, v in self.counters.items()
            if (key + _SEPARATOR).startswith(wanted + _SEPARATOR)
        )

    def by_label(self, name: str) -> dict[str, float]:
        """A counter by its first label; empty without one."""
        split = ((*split_key(key), value) for key, value in self.counters.items())
        return {labels[0]: value for each, labels, value in split if each == name and labels}

    def gauge_values(self, name: str) -> list[float]:
        """A gauge's values, one for each set of label values."""
        return [value for key, value in self.gauges.items() if split_key(key)[0] == name]

    def observed(self, name: str, label: str) -> list[float]:
        """A histogram's values with that one label value."""
        return self.observations.get(sample_key(name, label), [])

    def to_data(self) -> dict[str, Any]:
        """Plain dictionaries, strings, numbers and lists."""
        return {name: getattr(self, name) for name in ("counters", "gauges", "observations")}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Samples:
        """A copy: what is merged into it leaves ``data`` alone."""
        return cls(
            dict(data.get("counters", {})),
            dict(data.get("gauges", {})),
            {key: list(values) for key, values in data.get("observations", {}).items()},
        )


def sample_key(name: str, *labels: str) -> str:
    """The key of a metric's sample with these label values."""
    return _SEPARATOR.join((name, *labels))


def split_key(key: str) -> tuple[str, tuple[str, ...]]:
    """The metric's name and the label values of a key."""
    name, *labels = key.split(_SEPARATOR)
    return name, tuple(labels)


class Tally:
    """Not thread-safe: one thread counts and takes.

    ``totals`` holds the counters since the start; gauges and observations are kept only until they
    are taken.
    """

    def __init__(self) -> None:
        self.totals = Samples()
        self._new = Samples()

    def count(self, name: str, *labels: str, amount: float = 1) -> None:
        """Add to a counter. Raises ``ValueError`` for a negative amount; 0 records nothing."""
        self.totals.count(name, *labels, amount=amount)
        self._new.count(name, *labels, amount=amount)

    def count_up_to(self, name: str, *labels: str, total: float) -> None:
        """Something that is counted elsewhere has come to ``total`` since the start."""
        known = self.totals.counters.get(sample_key(name, *labels), 0)
        self.count(name, *labels, amount=total - known)

    def set(self, name: str, *labels: str, value: float) -> None:
        """Set a gauge."""
        self._new.set(name, *labels, value=value)

    def observe(self, name: str, *labels: str, value: float) -> None:
        """Add one value to a histogram."""
        self._new.observe(name, *labels, value=value)

    def total(self, name: str, label: str | None = None) -> float:
        """A counter since the start: over all label values, or where the first is ``label``."""
        return self.totals.total(name, label)

    def take(self) -> Samples | None:
        """What is new since the last call; ``None`` if nothing is."""
        if self._new.is_empty:
            return None
        taken, self._new = self._new, Samples()
        return taken
