"""The queries of the Grafana dashboard and of the alerts."""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

from tests.support import ROOT

_FOLDER = ROOT / "examples" / "observability"


def dashboard() -> dict[str, Any]:
    document: dict[str, Any] = json.loads((_FOLDER / "dashboard.json").read_text())
    return document


def queries() -> list[str]:
    panels = [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]
    alerts = yaml.safe_load((_FOLDER / "alerts.yml").read_text())
    rules = [rule["expr"] for group in alerts["groups"] for rule in group["rules"]]
    variables = [
        variable["query"]["query"]
        for variable in dashboard()["templating"]["list"]
        if variable["type"] == "query"
    ]
    return [*panels, *rules, *variables]


def used_metrics() -> set[str]:
    """Names of all samples that these queries read."""
    return {name for query in queries() for name in re.findall(r"vllm:\w+", query)}
