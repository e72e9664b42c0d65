"""Totals of one side as what is new since they were last looked at."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from lmcache_connector.metrics.samples import Samples

Counts = Sequence[tuple[str, str, tuple[str, ...]]]
"""(attribute, metric, labels)"""
CountsByLabel = Sequence[tuple[str, str]]
"""(attribute that is a dictionary from label value to total, metric)"""


class CountIncrements:
    """``counters``: any object whose attributes grow. A comparison tells whether they did."""

    def __init__(
        self, counters: object, counts: Counts, counts_by_label: CountsByLabel = ()
    ) -> None:
        self._counters = counters
        self._counts = counts
        self._read = attrgetter(*(name for name, _, _ in counts))
        self._last: tuple[float, ...] = (0,) * len(counts)
        self._counts_by_label = counts_by_label
        self._last_by_label: dict[str, dict[str, float]] = {n: {} for n, _ in counts_by_label}

    def take_into(self, samples: Samples) -> bool:
        """Whether there was anything new."""
        now = self._read(self._counters)
        changed = bool(now != self._last)
        if changed:
            for (_, metric, labels), value, before in zip(
                self._counts, now, self._last, strict=True
            ):
                samples.count(metric, *labels, amount=value - before)
            self._last = now
        for name, metric in self._counts_by_label:
            totals = getattr(self._counters, name)
            last = self._last_by_label[name]
            if totals != last:
                for label, total in totals.items():
                    samples.count(metric, label, amount=total - last.get(label, 0))
                self._last_by_label[name] = dict(totals)
                changed = True
        return changed
