"""Counts on their way from workers and scheduler to ``/metrics``: plain data that adds up.

Each worker and the scheduler side own a :class:`Tally` and count under the metrics' names. The new
counts go to vLLM as :class:`Samples`. vLLM adds up the samples of all ranks and the scheduler side,
and ships the sum to the front end with each step's output, for Prometheus and the log.

Counters are increments, gauges the latest value, observations single values of histograms. A key is
the metric's name and its label values, joined by newlines, so ``Samples`` consists of three flat
dictionaries, which any serialisation carries.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_SEPARATOR = "\n"


@dataclass(slots=True)
class Samples:
    """Counts of an interval, on one rank or many."""

    counters: dict[str, float] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)
    observations: dict[str, list[float]] = field(default_factory=dict)

    def count(self, name: str, *labels: str, amount: float = 1) -> None:
        """Add to a counter. Raises ``ValueError`` for a negative amount; 0 records nothing."""
        if amount < 0:
            raise ValueError(f"counter {name} cannot decrease by {-amount}")
        if amount:
            key = sample_key(name, *labels)
            self.counters[key] = self.counters.get(key, 0) + amount

    def set(self, name: str, *labels: str, value: float) -> None:
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
        """A gauge's values, one per combination of labels."""
        return [value for key, value in self.gauges.items() if split_key(key)[0] == name]

    def observed(self, name: str, label: str) -> list[float]:
        """A histogram's values with this single label."""
        return self.observations.get(sample_key(name, label), [])

    def to_data(self) -> dict[str, Any]:
        """The samples as dictionaries of numbers and lists: keyword arguments for another
        ``Samples``, which then shares these dictionaries."""
        return {name: getattr(self, name) for name in ("counters", "gauges", "observations")}


def sample_key(name: str, *labels: str) -> str:
    return _SEPARATOR.join((name, *labels))


def split_key(key: str) -> tuple[str, tuple[str, ...]]:
    name, *labels = key.split(_SEPARATOR)
    return name, tuple(labels)


class Tally(Samples):
    """Samples since they were last taken. Not thread-safe: one thread counts and takes."""

    def __init__(self) -> None:
        super().__init__()
        self._taken: dict[str, float] = {}  # all counters taken so far

    @property
    def totals(self) -> Samples:
        """The counters since the start."""
        totals = Samples(dict(self._taken))
        totals.merge(Samples(self.counters))
        return totals

    def count_up_to(self, name: str, *labels: str, total: float) -> None:
        """Raise a counter to ``total``, which is counted elsewhere since the start."""
        key = sample_key(name, *labels)
        known = self._taken.get(key, 0) + self.counters.get(key, 0)
        self.count(name, *labels, amount=total - known)

    def take(self) -> Samples | None:
        """New samples since the last call; ``None`` if there are none."""
        if not (self.counters or self.gauges or self.observations):
            return None
        for key, amount in self.counters.items():
            self._taken[key] = self._taken.get(key, 0) + amount
        taken = Samples(**self.to_data())
        self.counters, self.gauges, self.observations = {}, {}, {}
        return taken
