"""``vllm serve``: scheduler and workers in their own processes, requests over HTTP.

Metrics and command line are compared with the requests sent.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from examples.tiny_model import ModelShape
from lmcache_connector.cli.app import app
from lmcache_connector.metrics.table import METRICS, Kind
from tests.support import ROOT
from tests.support.dashboard import used_metrics
from tests.support.engines.api_server import ApiServer, check_pauses, running_api
from tests.support.engines.settings import CHUNK_SIZE, kv_transfer, random_prompt
from tests.support.engines.updates import build_retrained_model
from tests.support.redis.servers import Server

# Room for about 50 chunks: the other prompts evict one, which then comes from Redis.
CPU_GIB = 0.05
PROMPT_TOKENS, FULL_CHUNKS = 1500, 5
HIT_TOKENS = FULL_CHUNKS * CHUNK_SIZE


@pytest.fixture(scope="module")
def api(
    tiny_model: Path, valkey: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ApiServer]:
    transfer = kv_transfer(redis_url=valkey.url, cpu_gib=CPU_GIB)
    with running_api(tiny_model, transfer, tmp_path_factory.mktemp("serve") / "log") as api:
        yield api


def cli(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return document


def stats(api: ApiServer) -> dict[str, Any]:
    (engine,) = cli("stats", api.address)["engines"]
    return dict(engine)


def stored(api: ApiServer, num_bytes: int) -> bool:
    return api.metric("vllm:lmcache_stored_bytes_total") >= num_bytes


def has_loaded_or_stored(api: ApiServer, num_bytes: int) -> bool:
    """Whether Redis has been read, or as many bytes have been stored in the CPU tier."""
    now = stats(api)
    return bool(now["load"]["redis"]["jobs"]) or now["stored_bytes"]["cpu"] >= num_bytes


def test_the_start_logs_its_settings_in_one_line(api: ApiServer) -> None:
    (banner,) = re.findall(r"LMCacheTieredConnector: (CPU tier .*)", api.log)
    assert banner.startswith(f"CPU tier {CPU_GIB:g} GiB, Redis ")
    assert re.search(r"self-test passed \(store [\d.]+ GB/s, load [\d.]+ GB/s\)", banner)
    warnings = re.findall(r"WARNING.*LMCacheTieredConnector: (\w+)", api.log)
    assert warnings == ["audit_share"]  # set to 0 here


def test_a_prompt_is_served_from_the_cpu_tier(api: ApiServer) -> None:
    prompt = random_prompt(1, PROMPT_TOKENS)
    cold = json.loads(api.complete(prompt))["choices"][0]["text"]
    assert api.metric("vllm:external_prefix_cache_hits_total") == 0
    hit = json.loads(api.complete_afresh(prompt))["choices"][0]["text"]
    assert api.metric("vllm:external_prefix_cache_hits_total") == HIT_TOKENS
    assert hit == cold


def test_the_metrics_are_exact(api: ApiServer, valkey: Server) -> None:
    chunk_bytes = ModelShape().kv_bytes_per_token * CHUNK_SIZE
    before = stats(api)
    for seed in range(2, 13):
        api.complete_afresh(random_prompt(seed, PROMPT_TOKENS))
        # At most 12 chunks may wait to be written: on a starved machine the next ones are dropped.
        num_stored = seed * FULL_CHUNKS
        in_both_tiers = 2 * num_stored * chunk_bytes
        api.settle(partial(stored, api, in_both_tiers))
    evicted = stats(api)
    assert evicted["cpu_evictions"] >= FULL_CHUNKS
    assert evicted["cpu_used_bytes"] <= evicted["cpu_capacity_bytes"] == int(CPU_GIB * 2**30)
    after = evicted
    for seed in range(1, 13):  # prompts leave in this order
        api.complete_afresh(random_prompt(seed, PROMPT_TOKENS))
        again = (num_stored + FULL_CHUNKS) * chunk_bytes
        api.settle(partial(has_loaded_or_stored, api, again))
        if (after := stats(api))["load"]["redis"]["jobs"]:
            break
        num_stored += FULL_CHUNKS  # on a starved machine, a lookup is given up

    assert before["hit_tokens"] == {"cpu": HIT_TOKENS, "peer": 0, "redis": 0}
    assert after["hit_tokens"] == {"cpu": HIT_TOKENS, "peer": 0, "redis": HIT_TOKENS}
    assert after["queried_tokens"] == api.metric("vllm:external_prefix_cache_queries_total")
    assert after["lookup_hits"] == {"cpu": 1, "peer": 0, "redis": 1}
    assert after["loaded_bytes"]["redis"] == FULL_CHUNKS * chunk_bytes
    assert after["loaded_bytes"]["cpu"] == 2 * FULL_CHUNKS * chunk_bytes
    assert after["stored_bytes"]["cpu"] == num_stored * chunk_bytes
    assert after["load"]["redis"]["bytes_per_second"] > 0
    assert after["prefill_saved_tokens"] == 2 * HIT_TOKENS
    assert after["prefill_saved_seconds"] > 0
    assert after["decisions"] == {"always": 2}
    assert after["redis_chunks"] == {"hit": FULL_CHUNKS}
    assert after["failed_loads"] == after["dropped_writes"] == after["failed_stores"] == {}
    assert after["recomputed_tokens"] == after["write_queue_bytes"] == after["queued_jobs"] == 0
    assert after["circuits"] == {f"127.0.0.1:{valkey.port}": "closed"}


def test_vllm_counts_hits_by_their_tier(api: ApiServer) -> None:
    found = dict(
        re.findall(
            r'^vllm:prompt_tokens_cached_by_source_total\{.*source="(\w+)"\} (\S+)$',
            api.metrics(),
            re.MULTILINE,
        )
    )
    hits = stats(api)["hit_tokens"]
    assert float(found["host"]) == hits["cpu"]
    assert float(found["external_unspecified"]) == hits["redis"]
    assert sum(hits.values()) == api.metric("vllm:external_prefix_cache_hits_total")


def test_the_chat_example_hits_its_document_and_earlier_turns(api: ApiServer) -> None:
    words = 1000
    command = [sys.executable, str(ROOT / "examples" / "chat.py"), f"http://{api.address}"]
    users = ("--users", "2", "--documents", "1")
    options = ("--words", str(words), *users, "--turns", "3", "--forget")
    done = subprocess.run(
        [*command, *options], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    turns = re.findall(
        r"^turn (\d) user (\d): .* (\d+) prompt tokens: "
        r"0 vLLM's cache, (\d+) CPU tier, 0 peers, (\d+) Redis, ",
        done.stdout,
        re.MULTILINE,
    )
    hits = {(int(t), int(u)): int(cpu) + int(redis) for t, u, _, cpu, redis in turns}
    lengths = {(int(t), int(u)): int(length) for t, u, length, _, _ in turns}
    assert hits.keys() == {(turn, user) for turn in (1, 2, 3) for user in (1, 2)}
    document = words // CHUNK_SIZE * CHUNK_SIZE
    assert hits[1, 1] == 0
    assert hits[1, 2] == document
    for turn in (2, 3):
        for user in (1, 2):
            # All full chunks of the previous turn.
            assert hits[turn, user] >= lengths[turn - 1, user] // CHUNK_SIZE * CHUNK_SIZE


def test_every_metric_of_the_table_is_exposed(api: ApiServer) -> None:
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", api.metrics(), re.MULTILINE))
    for metric in METRICS.values():
        suffix = "_total" if metric.kind is Kind.COUNTER else ""
        assert types[metric.full_name + suffix] == metric.kind.value


def test_the_dashboard_and_the_alerts_use_metrics_of_a_real_engine(api: ApiServer) -> None:
    """After the traffic above, only metrics of failures have no sample."""
    samples = set(re.findall(r"^(vllm:\w+)\{", api.metrics(), re.MULTILINE))
    types = set(re.findall(r"^# TYPE (\S+)", api.metrics(), re.MULTILINE))
    troubles = {"failed_loads", "failed_stores", "dropped_writes"}
    quiet = {f"vllm:lmcache_{name}_total" for name in troubles} | {"vllm:lmcache_audit_error"}
    assert used_metrics() - samples <= quiet <= types


def test_weights_reloaded_over_http_have_their_own_hits(
    api: ApiServer, tiny_model: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    build_retrained_model(other, tiny_model, 1.0)
    prompt, hits = random_prompt(900, PROMPT_TOKENS), "vllm:external_prefix_cache_hits_total"

    def hit_tokens() -> float:
        before = api.metric(hits)
        api.complete_afresh(prompt)
        return api.metric(hits) - before

    def reload(folder: Path) -> None:
        kwargs = {"weights_path": str(folder)}
        api.post("/collective_rpc", {"method": "reload_weights", "kwargs": kwargs})

    api.complete(prompt)
    assert hit_tokens() == HIT_TOKENS
    reload(other)
    assert hit_tokens() == 0
    assert hit_tokens() == HIT_TOKENS
    api.post("/sleep?level=2")
    reload(tiny_model)
    api.post("/wake_up")
    assert hit_tokens() == HIT_TOKENS


def test_a_pause_and_sleep_during_stores(api: ApiServer) -> None:
    """The last test: vLLM resets all caches in it."""
    check_pauses(api)
