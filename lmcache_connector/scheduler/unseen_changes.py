"""Detects changes at a rank that its last report does not include."""

from __future__ import annotations

from lmcache_connector.change_count import ReadCount
from lmcache_connector.plans import RankReport


class UnseenChanges:
    """For all ranks of an engine. See :mod:`lmcache_connector.change_count`."""

    def __init__(self, world_size: int) -> None:
        self._counts = [ReadCount("")] * world_size
        self._heard = [0] * world_size

    def learn(self, report: RankReport) -> None:
        """The changes counted in the report are known."""
        if report.start is not None:
            self._counts[report.rank] = ReadCount(report.start.changes_at)
        self._heard[report.rank] = report.num_changes

    def are_excluded(self) -> bool:
        """Whether the ranks' reports hold until the plan being made reaches the ranks. False if
        unknown."""
        return all(
            count.is_there and count.number == heard
            for count, heard in zip(self._counts, self._heard, strict=True)
        )
