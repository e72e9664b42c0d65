"""What one engine step tells vLLM, by whichever connector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

ReportT_co = TypeVar("ReportT_co", covariant=True)


@dataclass(frozen=True, slots=True)
class StepOutput(Generic[ReportT_co]):
    """``finished_*``: request ids. ``report``: for the scheduler side, if there is any news."""

    finished_sending: frozenset[str] = frozenset()
    finished_recving: frozenset[str] = frozenset()
    invalid_block_ids: frozenset[int] = frozenset()
    report: ReportT_co | None = None
