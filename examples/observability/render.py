"""Draws the dashboard from a running Prometheus, without Grafana: for reports and documentation.

    python examples/observability/render.py http://localhost:9090 dashboard.png --minutes 30

Every panel sends its own queries, as in Grafana. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

DASHBOARD = Path(__file__).with_name("dashboard.json")
_GRID_COLUMNS = 24
_ROW_INCHES, _COLUMN_INCHES = 0.32, 0.58
_POINTS = 120


@dataclass(frozen=True)
class Window:
    """The window in seconds since the epoch, and the interval of rates."""

    start: float
    end: float
    rate_seconds: int

    @property
    def step(self) -> float:
        return max(1.0, (self.end - self.start) / _POINTS)


@dataclass(frozen=True)
class Series:
    legend: str
    times: list[float]
    values: list[float]


def main() -> None:
    args = parse_args()
    now = time.time()
    window = Window(now - 60 * args.minutes, now, args.rate_seconds)
    panels = json.loads(DASHBOARD.read_text())["panels"]
    try:
        series = [ask_panel(args.prometheus, panel, window) for panel in panels]
    except (OSError, HTTPException, ValueError, LookupError) as error:
        sys.exit(f"{args.prometheus}: {error}\nIs this the address of a running Prometheus?")
    draw(panels, series, window)
    plt.savefig(args.image, dpi=110)
    print(f"{args.image}: {len(panels)} panels")


def ask_panel(prometheus: str, panel: dict[str, Any], window: Window) -> list[Series]:
    return [s for target in panel["targets"] for s in ask(prometheus, target, window)]


def ask(prometheus: str, target: dict[str, str], window: Window) -> list[Series]:
    """The answer to one query over the window. Raises ``urllib.error.HTTPError`` for a bad one."""
    query = target["expr"].replace("$__rate_interval", f"{window.rate_seconds}s")
    query = re.sub(r"\$(model|instance)", ".*", query)
    options = {"query": query, "start": window.start, "end": window.end, "step": window.step}
    url = f"{prometheus.rstrip('/')}/api/v1/query_range?{urllib.parse.urlencode(options)}"
    with urllib.request.urlopen(url, timeout=30) as response:
        results = json.load(response)["data"]["result"]
    return [
        Series(
            legend=legend(target.get("legendFormat", ""), result["metric"]),
            times=[float(moment) - window.end for moment, _ in result["values"]],
            values=[float(value) for _, value in result["values"]],
        )
        for result in results
    ]


def legend(template: str, labels: dict[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), template)


def draw(panels: Sequence[dict[str, Any]], answers: Sequence[list[Series]], window: Window) -> None:
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    mpl.rcParams.update({"font.size": 7, "axes.titlesize": 8, "axes.titleweight": "bold"})
    size = (_GRID_COLUMNS * _COLUMN_INCHES, rows * _ROW_INCHES)
    figure = plt.figure(figsize=size)
    for panel, series in zip(panels, answers, strict=True):
        axes = figure.add_axes(place(panel["gridPos"], rows))
        axes.set_title(panel["title"], loc="left")
        if panel["type"] == "timeseries":
            draw_lines(axes, panel, series, window)
        else:
            draw_figure(axes, panel, series)


def place(at: dict[str, int], rows: int) -> tuple[float, float, float, float]:
    """Left, bottom, width and height in the figure, with room for titles and tick labels."""
    left, right, top, bottom = 1.3, 0.3, 1.0, 1.0
    return (
        (at["x"] + left) / _GRID_COLUMNS,
        1 - (at["y"] + at["h"] - bottom) / rows,
        (at["w"] - left - right) / _GRID_COLUMNS,
        (at["h"] - top - bottom) / rows,
    )


def draw_lines(axes: Axes, panel: dict[str, Any], series: Sequence[Series], window: Window) -> None:
    for one in series:
        axes.plot(one.times, one.values, linewidth=1, label=one.legend)
    unit = panel["fieldConfig"]["defaults"]["unit"]
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: in_unit(value, unit)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f} s"))
    axes.set_xlim(window.start - window.end, 0)
    finite = [value for one in series for value in one.values if math.isfinite(value)]
    axes.set_ylim(0, max(finite, default=0) * 1.15 or 1)
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 3, 5, 6, 10]))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if any(one.legend for one in series):
        axes.legend(fontsize=6, frameon=False, loc="upper left")


def draw_figure(axes: Axes, panel: dict[str, Any], series: Sequence[Series]) -> None:
    """The latest value, in large print."""
    defaults = panel["fieldConfig"]["defaults"]
    latest = [one.values[-1] for one in series if one.values]
    text = ", ".join(mapped(value, defaults) for value in latest) or "no data"
    axes.text(0.5, 0.5, text, ha="center", va="center", fontsize=18)
    axes.set_axis_off()


def mapped(value: float, defaults: dict[str, Any]) -> str:
    for mapping in defaults.get("mappings", []):
        option = mapping["options"].get(f"{value:g}")
        if option is not None:
            return str(option["text"])
    return in_unit(value, defaults["unit"])


def in_unit(value: float, unit: str) -> str:
    if math.isnan(value):
        return "-"
    if unit == "percentunit":
        return f"{value:.0%}"
    if unit == "s":
        return f"{value * 1000:.3g} ms" if 0 < abs(value) < 1 else f"{value:.3g} s"
    suffix = {"bytes": "B", "Bps": "B/s", "ops": "/s"}.get(unit, "")
    for factor, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {prefix}{suffix}"
    return f"{value:.3g} {suffix}".rstrip()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prometheus", help="address of a Prometheus that scrapes engines")
    parser.add_argument("image", type=Path, help="where the picture goes (.png, .svg)")
    parser.add_argument("--minutes", type=float, default=30, help="minutes to show (30)")
    parser.add_argument(
        "--rate-seconds", type=int, default=30, help="seconds over which rates are taken (30)"
    )
    args = parser.parse_args()
    if "@" in args.prometheus:
        parser.error("leave user and password out of the address")
    return args


if __name__ == "__main__":
    main()
