"""The one way to count: totals since the start, and what of them is new since they were last taken.

Workers, the scheduler side and hand-overs each own a :class:`Tally`. Its owner counts where things
happen, under the names of the metrics; whoever reports to vLLM takes what is new.
"""

from __future__ import annotations

from lmcache_connector.metrics.samples import Samples


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
