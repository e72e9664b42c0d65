"""``stats``, on metrics as the connector registers them, over HTTP."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from lmcache_connector.metrics.samples import Samples
from tests.cli.conftest import Cli
from tests.support.prometheus import prom_metrics
from tests.support.redis.servers import free_port


class Engine:
    """vLLM's front end for our samples, without an engine."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._prom = prom_metrics(self.registry, engines=2)
        self.url = ""

    def happened(self, engine: int, fill: Callable[[Samples], None]) -> None:
        samples = Samples()
        fill(samples)
        self._prom.observe(samples.to_data(), engine)


@contextmanager
def served(body: Callable[[], bytes]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body())

        def log_message(self, *_: Any) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    with served(lambda: generate_latest(engine.registry)) as url:
        engine.url = url
        yield engine


def some_traffic(samples: Samples) -> None:
    samples.count("queried_tokens", amount=1000)
    samples.count("hit_tokens", "cpu", amount=512)
    samples.count("hit_tokens", "redis", amount=256)
    samples.count("prefill_saved_tokens", amount=640)
    samples.count("recomputed_tokens", amount=128)
    samples.count("bypassed_requests", "no_salt", amount=3)
    samples.count("loaded_bytes", "redis", amount=1 << 20)
    samples.observe("load_seconds", "redis", value=0.5)
    samples.count("failed_loads", "deadline", amount=2)
    samples.set("circuit_state", "0", "h:1", value=2)
    samples.set("cpu_capacity_bytes", "0", value=100)


def test_stats_adds_up_the_engines_of_one_server(cli: Cli, engine: Engine) -> None:
    engine.happened(0, some_traffic)
    engine.happened(1, some_traffic)
    (found,) = cli("stats", engine.url, "--json").document["engines"]
    assert found["queried_tokens"] == 2000
    assert found["hit_tokens"] == {"cpu": 1024, "peer": 0, "redis": 512}
    assert found["hit_rate"] == 0.64  # loaded tokens count, not planned ones
    assert found["bypassed_requests"] == {"no_salt": 6}
    assert found["load"]["redis"]["bytes_per_second"] == 2 << 20
    assert 0.25 < found["load"]["redis"]["seconds_p50"] <= 0.5
    assert found["failed_loads"] == {"deadline": 4}
    assert found["circuits"] == {"h:1": "open"}
    assert found["cpu_capacity_bytes"] == 200
    people = cli("stats", engine.url).out
    assert "hit rate 64.0% of 2,000 tokens" in people
    assert "; 256 more were planned, then lost and recomputed\n" in people
    assert "requests that are not cached: no salt 6\n" in people
    assert "failed loads: deadline 4" in people
    assert "circuit open" in people


def test_an_engine_without_a_request_says_so(cli: Cli, engine: Engine) -> None:
    unknown = "with its first request"
    people = cli("stats", engine.url).out
    assert (unknown in people, "CPU tier" in people) == (True, False)
    engine.happened(0, some_traffic)
    people = cli("stats", engine.url).out
    assert (unknown in people, "CPU tier" in people) == (False, True)


def test_wrong_kv_that_an_audit_found_is_an_exit_code(cli: Cli, engine: Engine) -> None:
    engine.happened(0, some_traffic)
    assert cli("stats", engine.url).code == 0
    engine.happened(1, lambda samples: samples.count("audits", "mismatch"))
    outcome = cli("stats", engine.url)
    assert outcome.code == 1
    assert "STORED KV WAS WRONG" in outcome.out
    beside_one_away = cli("stats", engine.url, f"127.0.0.1:{free_port()}", "--json")
    assert (beside_one_away.code, beside_one_away.document["ok"]) == (1, False)
    assert cli("stats", engine.url, "--json").document["ok"] is False


def test_watch_shows_the_changes_between_two_looks(cli: Cli, engine: Engine) -> None:
    def page() -> bytes:
        engine.happened(0, some_traffic)  # before each look
        return generate_latest(engine.registry)

    with served(page) as url:
        outcome = cli("stats", "--watch", url, "--count", "1", "--interval", "1", "--json")
    (seen,) = outcome.document["engines"]
    assert math.isclose(seen["hit_rate"], 0.64)
    assert (seen["queried_tokens"], seen["recomputed_tokens"]) == (1000, 128)
    assert seen["hit_tokens"] == {"cpu": 512, "peer": 0, "redis": 256}
    assert seen["load"]["redis"]["jobs"] == 1
    assert seen["cpu_capacity_bytes"] == 100
    assert seen["seconds"] >= 1.0
    quiet = cli("stats", "--watch", engine.url, "--count", "1", "--interval", "0.1")
    assert "DOWN" in quiet.out


def test_an_engine_beside_one_that_hangs_is_shown_by_its_own_time(cli: Cli, engine: Engine) -> None:
    """The first is read again only after the second has been waited for."""

    def late() -> bytes:
        time.sleep(1.0)
        return generate_latest(engine.registry)

    with served(late) as url:
        outcome = cli(
            "stats", "--watch", engine.url, url, "--count", "1", "--interval", "0.1", "--json"
        )
    assert outcome.document["engines"][0]["seconds"] >= 1.0


def test_an_absent_engine_is_shown_as_absent(cli: Cli, engine: Engine) -> None:
    away = f"127.0.0.1:{free_port()}"
    outcome = cli(
        "stats", "--watch", engine.url, away, "--count", "1", "--interval", "0.1", "--json"
    )
    assert (outcome.code, outcome.document["ok"]) == (3, False)
    here, gone = outcome.document["engines"]
    assert here["problem"] is None
    assert "refused" in gone["problem"]
    some = cli("stats", engine.url, away, "--json")
    assert some.code == 3
    assert (len(some.document["engines"]), len(some.document["problems"])) == (1, 1)
    people = cli("stats", engine.url, away)
    assert "hit rate" in people.out
    assert "refused" in people.err
    assert cli("stats", "--watch", away).code == 3
    assert cli("stats", away).code == 3


def test_other_servers_get_an_error(cli: Cli) -> None:
    for body in (b"vllm:num_requests_running 1\n", b"<html>{{{"):
        with served(lambda body=body: body) as url:  # type: ignore[misc]
            outcome = cli("stats", url)
        assert outcome.code in (1, 2)
        assert "Error: " in outcome.err
    for url in (
        "http://u:hunter2@h",
        "u:hunter2@h:port",
        "u:hunter2@h:99999",
        "http://u:hunter2@[h",
    ):
        outcome = cli("stats", url)
        assert (outcome.code, "hunter2" in outcome.err) == (2, False)
    assert cli("stats", "ftp://host").code == 2
    document = cli("stats", "ftp://host", "--json").document
    assert document["ok"] is False


def test_a_misspelt_command_names_the_nearest(cli: Cli) -> None:
    outcome = cli("stat")
    assert outcome.code == 2
    assert "stats" in outcome.err
