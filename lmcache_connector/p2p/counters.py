"""Totals of a hand-over's scheduler side."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from lmcache_connector.p2p.plans import LoadResult
from lmcache_connector.p2p.reasons import reason_word


@dataclass(slots=True)
class P2PCounters:
    """Totals since the start. ``wire_*``: of hand-overs received, over all ranks. ``failed_loads``
    and ``unsent`` by :func:`reason_word`."""

    remote_hit_tokens: int = 0
    local_hit_tokens: int = 0
    recomputed_tokens: int = 0
    handovers: int = 0
    loads: int = 0
    malformed: int = 0
    declined: int = 0
    failed_loads: dict[str, int] = field(default_factory=dict)
    unsent: dict[str, int] = field(default_factory=dict)
    load_seconds: float = 0.0
    wire_bytes: int = 0
    wire_seconds: float = 0.0

    def count_load(self, result: LoadResult) -> None:
        """One rank's part of a load."""
        self.wire_bytes += result.wire_bytes
        self.wire_seconds += result.wire_seconds
        self.load_seconds += result.seconds
        if result.reason:
            _count(self.failed_loads, [result.reason])

    def count_unsent(self, reasons: Iterable[str]) -> None:
        """Transfers that did not reach their consumer."""
        _count(self.unsent, reasons)


def _count(totals: dict[str, int], reasons: Iterable[str]) -> None:
    for reason in reasons:
        word = reason_word(reason)
        totals[word] = totals.get(word, 0) + 1
