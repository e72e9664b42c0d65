"""Names, labels and units of the metrics."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from enum import Enum
from fnmatch import fnmatchcase

import pytest

from lmcache_connector.cost_model.decision import Reason
from lmcache_connector.metrics.table import METRICS, Kind
from lmcache_connector.plans import Outcome
from lmcache_connector.storage.chunk_codec import ValueFault
from lmcache_connector.storage.redis.counters import WriteEnd
from tests.support import ROOT

ENUMS: dict[str, Iterable[Enum]] = {
    "redis_chunks": ValueFault,
    "failed_loads": set(Outcome) - {Outcome.DONE},
    "failed_stores": set(Outcome) - {Outcome.DONE},
    "decisions": set(Reason) - {Reason.NO_HIT},
    "dropped_writes": (WriteEnd.QUEUE_FULL, WriteEnd.FAILED),
}
"""What a label may be; rates and increases need the series before the first event."""

WAYS = {
    "count": Kind.COUNTER,
    "count_up_to": Kind.COUNTER,
    "set": Kind.GAUGE,
    "observe": Kind.HISTOGRAM,
}
"""Methods of a tally, and what each of them counts."""


def test_names_follow_the_conventions() -> None:
    """https://prometheus.io/docs/practices/naming: base units last, counters without the suffix
    that the client library adds."""
    units = ("bytes", "seconds", "tokens", "bytes_per_second", "jobs", "chunks")
    for metric in METRICS.values():
        assert re.fullmatch(r"vllm:lmcache_[a-z0-9_]+", metric.full_name)
        assert not metric.name.endswith("_total")
        assert metric.documentation.endswith(".")
        if metric.kind is Kind.HISTOGRAM:
            assert metric.name.endswith(units)
            assert list(metric.buckets) == sorted(metric.buckets)
    assert all(name == metric.name for name, metric in METRICS.items())


def counted() -> Iterator[tuple[Kind, str]]:
    """What the product counts: kinds and names of metrics, names as patterns."""
    for path in (ROOT / "lmcache_connector").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                pattern = name_pattern(node.args[0])
                if pattern and node.func.attr in WAYS:
                    yield WAYS[node.func.attr], pattern


def name_pattern(argument: ast.expr) -> str | None:
    if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
        return argument.value
    if isinstance(argument, ast.JoinedStr):
        return "".join(
            str(v.value) if isinstance(v, ast.Constant) else "*" for v in argument.values
        )
    return None


@pytest.mark.parametrize("name", ENUMS)
def test_series_that_alerts_watch_exist_from_the_start(name: str) -> None:
    known = {labels[0] for labels in METRICS[name].known}
    assert {one.value for one in ENUMS[name]} <= known


def test_every_metric_is_counted_somewhere() -> None:
    """Whoever adds a metric thinks of counting it."""
    found = list(counted())
    for name, metric in METRICS.items():
        assert any(kind is metric.kind and fnmatchcase(name, pattern) for kind, pattern in found), (
            name
        )
