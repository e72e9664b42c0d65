"""Plots of results, drawn to small PNG files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def panels(
    target: Path, rows: int, columns: int, size: tuple[float, float], dpi: int, **options: Any
) -> Iterator[list[Any]]:
    """Matplotlib axes, row by row; saved to ``target`` afterwards. ``size``: in inches."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, **options)
    try:
        yield list(axes.flat)
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target, dpi=dpi, bbox_inches="tight")
    finally:
        pyplot.close(figure)
