"""The figures of all runs side by side, and as ratios to vLLM without a connector."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.field.matrix import Run

NONE, OURS, MP = "vllm", "ours", "lmcache_mp"
MEASURES = {
    "ttft_mean_ms": "less",
    "ttft_p50_ms": "less",
    "ttft_p99_ms": "less",
    "hit_ttft_mean_ms": "less",
    "requests_per_s": "more",
    "retained": "more",
}
"""Measures, and which direction is better. ``retained``: contexts that are still hits."""
TIE = 1.05
_PAIRS = ((OURS, NONE), (MP, NONE), (OURS, MP))


def comparison(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """A row for each tool, model and measure: medians of the rounds, and cost ratios.

    A ratio below 1 means less time, or more requests or contexts, for every measure.
    """
    rows = []
    for tool, model, measure in _compared(runs):
        found = {
            connector: median
            for connector in (NONE, OURS, MP)
            if (median := _median(runs, tool, model, connector, measure)) is not None
        }
        ratios = {
            f"{one}_vs_{other}": _cost(measure, found.get(one), found.get(other))
            for one, other in _PAIRS
        }
        medians = {name: round(value, 3) for name, value in found.items()}
        rows.append({"tool": tool, "model": model, "measure": measure, **medians, **ratios})
    return rows


def headline(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The worst and best ratios of this connector, and every ratio worse than a tie."""
    fields: dict[str, Any] = {}
    for other in (NONE, MP):
        name = f"{OURS}_vs_{other}"
        known = [(row, row[name]) for row in rows if row[name] is not None]
        if not known:
            continue
        ratios = [ratio for _, ratio in known]
        fields[f"{name}_best"] = min(ratios)
        fields[f"{name}_median"] = round(statistics.median(ratios), 3)
        fields[f"{name}_worst"] = max(ratios)
        fields[f"not_won_vs_{other}"] = [
            f"{row['tool']}, {row['model']}: {row['measure']} {ratio:.2f}"
            for row, ratio in known
            if ratio > TIE
        ]
    return fields


def run_rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """All runs with the tools' own figures, and failed runs with their reason."""
    return [
        {
            "tool": run.tool,
            "model": run.cell.model.name,
            "connector": run.cell.connector,
            "round": run.cell.round,
            "seconds": round(run.seconds, 1),
            "from_gpu": round(run.from_gpu, 3),
            "from_connector": round(run.from_connector, 3),
            **{name: round(value, 3) for name, value in run.figures.items()},
            **({"failure": run.failure} if run.failure else {}),
        }
        for run in runs
    ]


def _compared(runs: Sequence[Run]) -> list[tuple[str, str, str]]:
    return list(
        dict.fromkeys(
            (run.tool, run.cell.model.name, measure)
            for run in runs
            for measure in MEASURES
            if measure in run.figures
        )
    )


def _median(
    runs: Sequence[Run], tool: str, model: str, connector: str, measure: str
) -> float | None:
    values = [
        run.figures[measure]
        for run in runs
        if (run.tool, run.cell.model.name, run.cell.connector) == (tool, model, connector)
        and measure in run.figures
    ]
    return statistics.median(values) if values else None


def _cost(measure: str, mine: float | None, theirs: float | None) -> float | None:
    """``None`` if a figure is missing or zero."""
    if mine is None or theirs is None:
        return None
    over, under = (mine, theirs) if MEASURES[measure] == "less" else (theirs, mine)
    return round(over / under, 3) if under else None
