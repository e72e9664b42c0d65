"""``cache-pressure``: how many contexts are still hits after more were sent than the paged cache
holds."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from benchmarks.field.tool import Target, installed, options, packages_of, program

_NAME = "cache-pressure"
_RESULT = "result.json"


class CachePressure:
    """Sends contexts one by one, then again from the newest on, and stops at the first miss: a
    first token later than half way between a hit's and a miss's, both measured before."""

    name = _NAME

    def version(self) -> str | None:
        return installed(_NAME, packages_of(_NAME))

    def command(self, target: Target) -> list[str]:
        load = target.load
        given = {
            "base-url": f"{target.url}/v1",
            "model": target.model_name,
            "kv-size": load.paged_tokens,
            "context-tokens": load.context_tokens,
            "num-contexts": load.num_contexts,
            "output": target.folder / _RESULT,
        }
        return [program(_NAME, _NAME), *options(given)]

    def figures(self, folder: Path) -> dict[str, float]:
        result = json.loads((folder / _RESULT).read_text(encoding="utf-8"))
        cold, hit = result["cold_ttft"], result["hit_ttft"]
        if cold is None or hit is None or hit >= cold:
            raise ValueError("it could not tell a hit from a miss")  # it would take all for hits
        again = [row for row in result["verify"] if row["hit"]]
        found = {"hit_ttft_mean_ms": _mean_ms(again)} if again else {}
        rows = result["hydrate"] + result["verify"]
        return found | {
            "retained": result["retained"],
            "retained_tokens": result["retained_tokens"],
            "retained_percent": result["retained_pct"],
            "contexts": result["num_contexts"],
            "cold_ttft_mean_ms": _mean_ms(result["hydrate"]),
            "failed": sum(row["error"] is not None for row in rows),
        }


def _mean_ms(rows: list[dict[str, float]]) -> float:
    return 1000 * statistics.fmean(row["ttft"] for row in rows)
