"""A real Prometheus scrapes a real engine with the example's rules and answers the dashboard."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import ROOT
from tests.support.dashboard import dashboard
from tests.support.engines.api_server import running_api
from tests.support.engines.settings import kv_transfer
from tests.support.prompts import random_prompt
from tests.support.redis.servers import Server, free_port

EXAMPLE = ROOT / "examples" / "observability"
# By reason or result: no series before there was one. Every hit is loaded, and none from Redis.
SILENT = {
    *("vllm:lmcache_failed_loads_total", "vllm:lmcache_failed_stores_total"),
    *("vllm:lmcache_dropped_writes_total", "vllm:lmcache_redis_chunks_total"),
    "vllm:lmcache_decisions_total",
}
_WAIT_SECONDS = 60.0


@contextmanager
def running_prometheus(target: str, folder: Path) -> Iterator[str]:
    """A Prometheus with the example's own files, except for the target and the interval."""
    shutil.copy(EXAMPLE / "alerts.yml", folder)
    config = yaml.safe_load((EXAMPLE / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["scrape_configs"][0]["static_configs"] = [{"targets": [target]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    url = f"http://127.0.0.1:{free_port()}"
    command = ["prometheus", f"--config.file={folder / 'prometheus.yml'}"]
    command += [f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={url[7:]}"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield url
    finally:
        process.terminate()
        process.wait(30)


def answer(url: str, path: str, **parameters: str) -> Any:
    query = urllib.parse.urlencode(parameters)
    with urllib.request.urlopen(f"{url}/api/v1/{path}?{query}", timeout=10) as response:
        return json.loads(response.read())["data"]


def ask(url: str, expression: str) -> list[Any]:
    """Ask what a panel asks, with Grafana's variables set to everything."""
    for name, value in (("$model", ".*"), ("$instance", ".*"), ("$__rate_interval", "30s")):
        expression = expression.replace(name, value)
    result: list[Any] = answer(url, "query", query=expression)["result"]
    return result


@pytest.mark.soak
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="no Prometheus is installed")
def test_prometheus_takes_the_rules_and_answers_every_panel(
    tiny_model: Path, valkey: Server, tmp_path: Path
) -> None:
    log = tmp_path / "engine.log"
    with (
        running_api(tiny_model, kv_transfer(redis_url=valkey.url), log) as api,
        running_prometheus(api.address, tmp_path) as url,
    ):
        until = time.monotonic() + _WAIT_SECONDS
        seed = 0
        while not _has_counted(url):
            assert time.monotonic() < until, (tmp_path / "log").read_text()[-2000:]
            seed += 1
            api.complete_afresh(random_prompt(1, 1500))
            api.complete_afresh(random_prompt(seed, 1500))
        (target,) = answer(url, "targets")["activeTargets"]
        assert target["health"] == "up", target["lastError"]
        rules = [rule for group in answer(url, "rules")["groups"] for rule in group["rules"]]
        assert len(rules) == 4
        assert all(rule["health"] == "ok" and rule["state"] == "inactive" for rule in rules)
        answered = {
            target["expr"]: bool(ask(url, target["expr"]))
            for panel in dashboard()["panels"]
            for target in panel["targets"]
        }
        silent = [expression for expression, has_series in answered.items() if not has_series]
        assert {n for expr in silent for n in re.findall(r"vllm:\w+", expr)} <= SILENT


def _has_counted(url: str) -> bool:
    try:
        return any(
            float(sample["value"][1]) > 0
            for sample in ask(url, "sum(rate(vllm:lmcache_hit_tokens_total[$__rate_interval]))")
        )
    except urllib.error.URLError:
        return False
