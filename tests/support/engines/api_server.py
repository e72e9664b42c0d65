"""A running ``vllm serve``, as its clients and its operators see it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.support.clock import wait_until
from tests.support.engines.settings import random_prompt
from tests.support.processes import running_process, wait_until_healthy
from tests.support.redis.servers import free_port

SERVED_MODEL = "tiny"
_START_SECONDS = 400.0  # less than a test may take; a starved machine took 200
_SETTLE_SECONDS = 100.0  # what failed twice to be written is tried again after 42 s
_EXIT_SECONDS = 60.0
_RANK_HEADER = "X-data-parallel-rank"
_NO_HEADERS: Mapping[str, str] = MappingProxyType({})
_FOR_TESTS = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_LOG_STATS_INTERVAL": "1"}


class ApiServer:
    """``address`` is ``host:port``; the model it serves is called ``tiny``."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self._process = process
        self.address = f"127.0.0.1:{port}"
        self._base = f"http://{self.address}"
        self._log = log

    def wait_ready(self) -> None:
        """Raises :class:`~tests.support.processes.ServerError` if the server does not start."""
        wait_until_healthy(self._process, f"{self._base}/health", _START_SECONDS, self._log)

    def stop(self) -> None:
        """End it as an operator would. Raises ``TimeoutExpired`` if it does not exit."""
        self._process.terminate()
        self._process.wait(_EXIT_SECONDS)

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def complete(self, prompt: list[int], data_parallel_rank: int | None = None) -> str:
        return self.post(
            "/v1/completions",
            {"model": SERVED_MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0},
            {} if data_parallel_rank is None else {_RANK_HEADER: str(data_parallel_rank)},
        )

    def complete_afresh(self, prompt: list[int]) -> str:
        """Complete without vLLM's own prefix cache."""
        self.forget()
        return self.complete(prompt)

    def forget(self) -> None:
        """Empty vLLM's own prefix cache, once stores have let go of its blocks."""
        wait_until(
            lambda: bool(json.loads(self.post("/reset_prefix_cache"))["success"]),
            "vLLM does not empty its prefix cache",
            _SETTLE_SECONDS,
        )

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

    def metric(self, name: str, *labels: str) -> float:
        """Sum of the samples whose line begins with ``name`` and holds each of ``labels``, which
        are written as ``engine="0"``."""
        return sum(
            float(line.split()[-1])
            for line in self.metrics().splitlines()
            if line.startswith(name) and all(label in line for label in labels)
        )

    def settle(self, done: Callable[[], bool]) -> None:
        """Work in the background is reported with the next step: make steps until it is."""
        until = time.monotonic() + _SETTLE_SECONDS
        while not done():
            assert time.monotonic() < until, f"not in time; the connector says:\n{self.said()}"
            self.complete([1, 2, 3])

    def said(self) -> str:
        """The connector's warnings, and its metrics that are not 0."""
        warnings = re.findall(r"^.*WARNING.*(?:LMCache|redis).*$", self.log, re.MULTILINE)
        metrics = re.findall(
            r"^vllm:lmcache_(?!\w+_created).* (?!0\.0$)\S+$", self.metrics(), re.MULTILINE
        )
        return "\n".join((*warnings, *metrics))


@contextmanager
def started_api(
    model: Path,
    transfer: Mapping[str, Any] | None,
    log: Path,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    port: int | None = None,
) -> Iterator[ApiServer]:
    """A server that was just started; :meth:`ApiServer.wait_ready` tells when it answers."""
    port = port or free_port()
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--served-model-name", SERVED_MODEL, "--host", "127.0.0.1", "--port", str(port)),
        *("--enforce-eager", "--disable-uvicorn-access-log", *arguments),
    ]
    if transfer is not None:
        command += ["--kv-transfer-config", json.dumps(transfer)]
    with running_process(command, log, environment) as process:
        yield ApiServer(process, port, log)


@contextmanager
def running_api(
    model: Path, transfer: Mapping[str, Any], log: Path, *arguments: str
) -> Iterator[ApiServer]:
    """A server of the size tests need, up and answering; stopped afterwards as operators do."""
    sizes = ("--max-model-len", "4096", "--kv-cache-memory-bytes", str(256 << 20))
    with started_api(model, transfer, log, *sizes, *arguments, environment=_FOR_TESTS) as api:
        api.wait_ready()
        yield api
        api.stop()


_NUM_TOKENS = 700
_PATIENCE_SECONDS = 60.0


def check_pauses(api: ApiServer) -> None:
    """Pause and sleep in each mode: the engine rests, as without a connector, and then goes on."""
    seeds, stop = count(50_000), threading.Event()

    def serve() -> None:
        while not stop.is_set():
            api.complete(random_prompt(next(seeds), _NUM_TOKENS))

    with ThreadPoolExecutor(1) as pool:
        client = pool.submit(serve)
        try:
            for mode in ("abort", "wait", "keep"):
                for begin, end in (("/pause", "/resume"), ("/sleep", "/wake_up")):
                    api.complete(random_prompt(next(seeds), _NUM_TOKENS))
                    api.post(f"{begin}?mode={mode}")
                    api.post(end)
        finally:
            stop.set()
        client.result(_PATIENCE_SECONDS)
    answer = json.loads(api.complete(random_prompt(next(seeds), _NUM_TOKENS)))
    assert answer["choices"][0]["finish_reason"] == "length"
