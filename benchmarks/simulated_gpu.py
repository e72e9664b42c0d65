"""Hits from CPU memory on a simulated GPU: time to first token, compared with recompute and an
oracle.

No GPU was measured. The device is simulated: a forward pass takes a step's time, and for each token
of a prompt 30 us and 1 ns per token before it; copies take the bus' time, and the host runs ahead
as vLLM's engine core does with asynchronous scheduling. vLLM's scheduler and both sides of the
connector are real, and time is virtual, so the result is the same on any machine.

``step_ms``: the length of steps in which ``neighbours`` requests decode all the time; with none the
engine is idle until a request comes. The same requests come in the same phase of a step to an
engine that decides for itself, one that loads nothing, and one that loads everything; the oracle
takes the better of the last two for each. ``steps_lost``: the delay in steps of a loading request's
first token, compared with a hit in vLLM's own prefix cache. Rows are medians over the rounds.
``crowd`` requests with one prompt come together, and count by their mean.

``--device cuda`` is a stage of ``make gpu``, in which only the model is simulated. A kernel takes
as long as its forward pass would, in real time on a real stream; the KV, the copies and LMCache's
engine are real, and every pass compares the KV before its tokens, byte for byte.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.progress import Progress

from benchmarks.gpu_storms.passes import MODEL
from tests.support import ROOT

STEPS_MS = (10.0, 50.0, 250.0)
BUSES_GB_PER_S = (25.0, 50.0)
SLOW_BUS_GB_PER_S = 3.0
DEVICES = ("simulated", "cuda", "rehearsed")
HITS = (128, 512, 1024, 2048, 4096, 8192, 16384)
_SETTING = ("step_ms", "bus_gb_per_s", "neighbours", "crowd", "hit_tokens")
_MAX_SECONDS = 1200
_MAX_STEP_MS = 50.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=5, help="per setting, for the median")
    parser.add_argument("--step-ms", type=float, nargs="+", default=STEPS_MS)
    parser.add_argument("--bus-gb-per-s", type=float, nargs="+", default=BUSES_GB_PER_S)
    parser.add_argument("--hits", type=int, nargs="+", default=HITS, help="in tokens")
    parser.add_argument("--no-storms", action="store_true", help="no crowd, no slow bus")
    parser.add_argument(
        "--device",
        choices=DEVICES,
        default="simulated",
        help="rehearsed: the code of cuda without a GPU",
    )


def run(args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    worlds = [("requests", args.bus_gb_per_s, 1)]
    if not args.no_storms:
        worlds += [("eight together", args.bus_gb_per_s[:1], 8)]
        if args.device == "simulated":
            worlds += [("a slow bus", [SLOW_BUS_GB_PER_S], 1)]
    samples: list[dict[str, Any]] = []
    for name, buses, crowd in progress.track(worlds, description="worlds"):
        progress.console.log(name)
        options = {
            "--rounds": [args.rounds],
            "--step-ms": args.step_ms,
            "--bus-gb-per-s": buses,
            "--hits": args.hits,
            "--crowd": [crowd],
            "--device": [args.device],
        }
        samples += simulate(options)
    rows = compare(samples)
    is_simulated = args.device == "simulated"
    found = {"simulated": is_simulated, "rounds": args.rounds, **headline(rows), "settings": rows}
    return found if is_simulated else {"device": args.device, **found}


def simulate(options: Mapping[str, Iterable[Any]]) -> list[dict[str, Any]]:
    """The measured requests. Runs in its own process: the product is loaded with simulated threads,
    or measured alone. Raises ``RuntimeError`` if an invariant fails."""
    command = [sys.executable, "-m", "benchmarks.gpu_storms"]
    for name, values in options.items():
        command += [name, *map(str, values)]
    environment = os.environ | {"PYTHONHASHSEED": "0"}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=_MAX_SECONDS,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-4000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def compare(samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row per setting and hit. ``loaded``: the share of requests that loaded."""
    by_setting: dict[tuple[Any, ...], dict[str, dict[int, Mapping[str, Any]]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for sample in samples:
        setting = tuple(sample[name] for name in _SETTING)
        by_setting[setting][sample["rule"]][sample["round"]] = sample
    return [
        dict(zip(_SETTING, setting, strict=True)) | _row(**rules)
        for setting, rules in sorted(by_setting.items())
    ]


def _row(
    auto: Mapping[int, Mapping[str, Any]],
    never: Mapping[int, Mapping[str, Any]],
    always: Mapping[int, Mapping[str, Any]],
    own: Mapping[int, Mapping[str, Any]],
) -> dict[str, Any]:
    rounds = sorted(auto)
    lost = [
        (auto[i]["ttft"] - own[i]["ttft"]) / (auto[i]["step_ms"] / 1000)
        for i in rounds
        if auto[i]["loaded"] and auto[i]["neighbours"]
    ]
    ours = [auto[i]["ttft"] for i in rounds]
    recompute = [never[i]["ttft"] for i in rounds]
    oracle = [min(never[i]["ttft"], always[i]["ttft"]) for i in rounds]
    return {
        "ttft_ms": round(1000 * statistics.median(ours), 2),
        "recompute_ms": round(1000 * statistics.median(recompute), 2),
        "oracle_ms": round(1000 * statistics.median(oracle), 2),
        "vs_recompute": _median_ratio(ours, recompute),
        "vs_oracle": _median_ratio(ours, oracle),
        "loaded": round(statistics.mean(auto[i]["loaded"] for i in rounds), 2),
        "steps_lost": round(statistics.median(lost), 2) if lost else None,
    }


def headline(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """``steps_lost_p50``: of single hits whose copy takes less than a fifth of a step of up to 50
    ms; left out if no row has such hits, as on a GPU."""
    against_oracle = [row["vs_oracle"] for row in rows]
    lost = [row["steps_lost"] for row in rows if row["steps_lost"] is not None and _is_quick(row)]
    figures = {
        "worst_ttft_vs_recompute": max(row["vs_recompute"] for row in rows),
        "best_ttft_vs_recompute": min(row["vs_recompute"] for row in rows),
        "ttft_vs_oracle_p50": round(statistics.median(against_oracle), 4),
        "worst_ttft_vs_oracle": max(against_oracle),
    }
    return figures | ({"steps_lost_p50": round(statistics.median(lost), 2)} if lost else {})


def _is_quick(row: Mapping[str, Any]) -> bool:
    if row["crowd"] > 1 or row["step_ms"] > _MAX_STEP_MS or not row["bus_gb_per_s"]:
        return False
    copy_ms = row["hit_tokens"] * MODEL.kv_bytes_per_token / row["bus_gb_per_s"] / 1e6
    return bool(copy_ms < row["step_ms"] / 5)


def _median_ratio(these: Sequence[float], those: Sequence[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(these, those, strict=True)), 4)
