"""Statistics of repeated timings: medians, quartiles, ratios pair by pair."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


class Stopwatch:
    """Durations in seconds by name, in their order."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def time(self, name: str, work: Callable[[], object]) -> None:
        started = time.perf_counter()
        work()
        self.seconds[name].append(time.perf_counter() - started)

    def rounds(self, number: int) -> Iterator[int]:
        """Numbers of rounds, from 0. The first one warms up, unmeasured; ``number`` follow."""
        for i in range(number + 1):
            if i == 1:
                self.seconds.clear()
            yield i

    def medians(self) -> dict[str, float]:
        return {name: statistics.median(taken) for name, taken in self.seconds.items()}


def median_seconds(work: Callable[[], object], repeats: int) -> float:
    """Median duration of ``repeats`` calls, after an unmeasured one."""
    watch = Stopwatch()
    for _ in watch.rounds(repeats):
        watch.time("work", work)
    return watch.medians()["work"]


def median(values: Sequence[float], digits: int = 4) -> float:
    return round(statistics.median(values), digits)


def spread(values: Sequence[float], digits: int = 4) -> dict[str, float]:
    """``median``, and the quartiles ``q1`` and ``q3`` of three values or more."""
    fields = {"median": median(values, digits)}
    if len(values) >= 3:
        q1, _, q3 = statistics.quantiles(values, n=4, method="inclusive")
        fields |= {"q1": round(q1, digits), "q3": round(q3, digits)}
    return fields


def pairwise(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Ratios of measurements of the same rounds: a common drift cancels out.

    Rounds that only one side has do not count.
    """
    return [a / b for a, b in zip(ours, theirs, strict=False)]


def median_ratio(ours: Sequence[float], theirs: Sequence[float], digits: int = 4) -> float:
    """Median of the ratios pair by pair."""
    return median(pairwise(ours, theirs), digits)


def in_turn(contestants: Iterable[T], number: int) -> list[T]:
    """All items, in the order of round ``number``: a different one comes first each time."""
    order = list(contestants)
    first = number % len(order)
    return order[first:] + order[:first]
