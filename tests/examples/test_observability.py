"""Dashboard, alerts and documentation use only metrics that exist.

``tests/engine/test_serve.py`` compares the names with a real engine.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from lmcache_connector.metrics.table import METRICS, Kind
from lmcache_connector.plans import Tier
from lmcache_connector.storage.chunk_codec import ValueFault
from tests.support import ROOT
from tests.support.dashboard import queries, used_metrics
from tests.test_docs import anchors
from tests.test_readme import table_after

FOLDER = ROOT / "examples" / "observability"
# vLLM's own; test_serve checks them on a real engine.
VLLM = {
    "vllm:prompt_tokens_total",
    "vllm:prompt_tokens_cached_by_source_total",
    "vllm:time_to_first_token_seconds_bucket",
}


NOT_SHOWN = """
lookup_hits load_jobs store_jobs probes written_chunks loads_in_step
retention_hints refused_pins scheduler_failures cpu_pinned_bytes cpu_tenant_bytes
peer_fallbacks peer_mapped_chunks peer_chunks store_seconds load_bytes_per_second
store_bytes_per_second
"""
ALL = [*METRICS.values()]


def exposed() -> dict[str, set[str]]:
    """Sample names of the table, with their labels."""
    names: dict[str, set[str]] = {}
    for metric in ALL:
        labels = {*metric.labels, "model_name", "engine", "instance"}
        if metric.kind is Kind.COUNTER:
            names[f"{metric.full_name}_total"] = labels
        elif metric.kind is Kind.GAUGE:
            names[metric.full_name] = labels
        else:
            names |= {f"{metric.full_name}_{part}": labels for part in ("sum", "count")}
            names[f"{metric.full_name}_bucket"] = labels | {"le"}
    return names


@pytest.mark.parametrize("query", queries())
def test_every_query_uses_existing_metrics_and_labels(query: str) -> None:
    known = exposed()
    used = set(re.findall(r"vllm:\w+", query))
    assert used
    assert used <= known.keys() | VLLM
    for grouping in re.findall(r"by \(([^)]*)\)", query):
        wanted = {label.strip() for label in grouping.split(",")}
        ours = [known[name] for name in used if name in known]
        assert all(wanted <= labels for labels in ours), query
    if not query.startswith("label_values("):  # Grafana's own
        promql_parser.parse(query.replace("$__rate_interval", "5m"))
    for name in used:  # counters need a rate
        if name.endswith(("_total", "_sum", "_bucket", "_count")) and "label_values" not in query:
            assert re.search(rf"(rate|increase)\({name}", query), query


def test_the_dashboard_shows_every_metric_but_for_listed_ones() -> None:
    elsewhere = {*NOT_SHOWN.split()}
    elsewhere |= {name for name in METRICS if name.startswith("p2p_")}
    shown = {re.sub("_(total|bucket|sum|count)$", "", name) for name in used_metrics()}
    missing = {name for name, metric in METRICS.items() if metric.full_name not in shown}
    assert missing == elsewhere


def load(path: Path) -> dict[str, Any]:
    document = yaml.safe_load(path.read_text())
    assert isinstance(document, dict)
    return document


def alerts() -> list[dict[str, Any]]:
    return [rule for group in load(FOLDER / "alerts.yml")["groups"] for rule in group["rules"]]


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: str(rule["alert"]))
def test_an_alert_has_a_severity_and_a_runbook(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("critical", "warning")
    page, _, anchor = rule["annotations"]["runbook"].partition("#")
    assert anchor in anchors((ROOT / "docs" / page).read_text())
    # Its counters exist before the first event: otherwise that is no increase.
    counters = {f"{m.full_name}_total": m for m in ALL if m.kind is Kind.COUNTER}
    for name in re.findall(r"vllm:\w+", rule["expr"]):
        assert name not in counters or counters[name].known, name


def test_each_fault_of_a_value_fires_an_alert() -> None:
    (rule,) = (each for each in alerts() if each["alert"] == "KVCacheUnsoundValues")
    (results,) = re.findall(r'result=~"(.*?)"', rule["expr"])
    known = {labels[0] for labels in METRICS["redis_chunks"].known}
    faults = {fault.value for fault in ValueFault}
    assert {result for result in known if re.fullmatch(results, result)} == faults


def test_lookups_given_up_are_compared_with_those_that_ask_redis_or_peers() -> None:
    """A rate of lookups in Redis alone is 0 without one: each one given up would be an alert."""
    (rule,) = (each for each in alerts() if each["alert"] == "KVCacheLookupsGivenUp")
    (excluded,) = re.findall(r'lookups_total\{tier!="(\w+)"\}', rule["expr"])
    asked = {labels[0] for labels in METRICS["lookups"].known} - {excluded}
    assert asked == {tier.value for tier in Tier if tier is not Tier.CPU}


def test_the_documented_alerts_are_those_of_the_file() -> None:
    rows = table_after((ROOT / "docs" / "metrics.md").read_text(), "## Alerts")
    documented = [(alert.strip("`"), severity) for alert, severity, _ in rows]
    assert documented == [(rule["alert"], rule["labels"]["severity"]) for rule in alerts()]


def test_the_documented_metrics_are_the_table() -> None:
    documented = re.findall(
        r"^\| `(vllm:lmcache_\w+)` \| (\w+) \| (.*?) \| (.*) \|$",
        (ROOT / "docs" / "metrics.md").read_text(),
        re.MULTILINE,
    )
    table = [
        (
            metric.full_name + ("_total" if metric.kind is Kind.COUNTER else ""),
            metric.kind.value,
            ", ".join(f"`{label}`" for label in metric.labels),
            metric.documentation,
        )
        for metric in ALL
    ]
    assert [(name, kind, labels.strip(), text) for name, kind, labels, text in documented] == table


def test_the_documentation_names_existing_metrics() -> None:
    bare = {metric.full_name for metric in ALL} | exposed().keys()
    for page in (ROOT / "docs").glob("*.md"):
        for name in re.findall(r"vllm:lmcache_\w+", page.read_text()):
            assert name in bare, f"{page.name}: {name}"
