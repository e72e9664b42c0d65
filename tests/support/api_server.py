"""A running ``vllm serve``, as its clients and its operators see it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.support.servers import free_port

_START_SECONDS = 180
_SETTLE_SECONDS = 30.0
_RANK_HEADER = "X-data-parallel-rank"
_NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class ApiServer:
    """``address`` is ``host:port``."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self._process = process
        self.address = f"127.0.0.1:{port}"
        self._base = f"http://{self.address}"
        self._log = log

    def wait_ready(self) -> None:
        for _ in range(_START_SECONDS):
            if self._process.poll() is not None:
                break
            try:
                urllib.request.urlopen(self._base + "/health", timeout=1).close()
                return
            except OSError:
                try:
                    self._process.wait(1)
                except subprocess.TimeoutExpired:
                    continue
        raise AssertionError(self._log.read_text()[-4000:])

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def complete(self, prompt: list[int], data_parallel_rank: int | None = None) -> str:
        return self.post(
            "/v1/completions",
            {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0},
            {} if data_parallel_rank is None else {_RANK_HEADER: str(data_parallel_rank)},
        )

    def complete_afresh(self, prompt: list[int]) -> str:
        """Without vLLM's own prefix cache."""
        self.forget()
        return self.complete(prompt)

    def forget(self) -> None:
        """Empty vLLM's own prefix cache, once stores have let go of its blocks."""
        until = time.monotonic() + _SETTLE_SECONDS
        while not json.loads(self.post("/reset_prefix_cache"))["success"]:
            assert time.monotonic() < until, "vLLM does not empty its prefix cache"
            time.sleep(0.05)

    def post(self, path: str, body: object = None, headers: Mapping[str, str] = _NO_HEADERS) -> str:
        request = urllib.request.Request(
            self._base + path,
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json", **headers},
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            return str(response.read().decode())

    def metrics(self) -> str:
        with urllib.request.urlopen(self._base + "/metrics", timeout=10) as response:
            return str(response.read().decode())

    def metric(self, name: str) -> float:
        """Sum of all samples whose line begins so; give name, or name and the first labels."""
        lines = self.metrics().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    def settle(self, done: Callable[[], bool]) -> None:
        """Work in the background is reported with the next step: make steps until it is."""
        until = time.monotonic() + _SETTLE_SECONDS
        while not done():
            assert time.monotonic() < until, self.metrics()
            self.complete([1, 2, 3])


@contextmanager
def running_api(
    model: Path, transfer: dict[str, Any], log: Path, *arguments: str
) -> Iterator[ApiServer]:
    """Up and answering; stopped afterwards as an operator would."""
    port = free_port()
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--served-model-name", "tiny", "--port", str(port), "--enforce-eager"),
        *("--max-model-len", "4096", "--kv-cache-memory-bytes", str(256 << 20)),
        *("--kv-transfer-config", json.dumps(transfer), *arguments),
    ]
    environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_LOG_STATS_INTERVAL": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
    api = ApiServer(process, port, log)
    try:
        api.wait_ready()
        yield api
        process.terminate()
        assert process.wait(60) is not None, "the server does not exit"
    finally:
        process.kill()
        process.wait()
