"""What the trace benchmark reads of a server: its metrics, and why it did not start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness.replay import CachedTokens, cached_tokens
from benchmarks.peers.connectors import reason
from tests.support.engines.api_server import ApiServer
from tests.support.processes import ServerError

METRICS = """\
# HELP vllm:prompt_tokens_total Number of prefill tokens processed.
vllm:prompt_tokens_total{engine="0",model_name="tiny"} 1000.0
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="tiny",source="device"} 128.0
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="tiny",source="host"} 256.0
vllm:prompt_tokens_cached_by_source_total{engine="0",source="external_unspecified"} 512.0
vllm:prompt_tokens_cached_by_source_created{engine="0",source="host"} 1.7e+09
vllm:lmcache_declined_tokens_total{engine="0",model_name="tiny"} 64.0
vllm:lmcache_dropped_writes_total{engine="0",reason="queue_full"} 2.0
vllm:lmcache_dropped_writes_total{engine="0",reason="failed"} 1.0
"""


class Read(ApiServer):
    """A server of which only the metrics are there."""

    def __init__(self) -> None:
        """Nothing runs."""

    def metrics(self) -> str:
        return METRICS


def test_cached_tokens_are_told_apart_by_where_they_came_from() -> None:
    found = cached_tokens(Read())
    assert found == CachedTokens(
        prompt=1000, device=128, host=256, external=512, declined=64, dropped=3
    )
    assert found.since(found) == CachedTokens(0, 0, 0, 0, 0, 0)


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "WARNING This can cause errors like `OSError: [Errno 24]`\n"
        "ERROR core.py: ValueError: the model is too long\n"
        "RuntimeError: Engine core initialization failed\n"
    )
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait(30)
        with pytest.raises(ServerError) as failed:
            ApiServer(process, 1, log).wait_ready()
    assert reason(failed.value) == "ERROR core.py: ValueError: the model is too long"
