"""vllm-router, the real one, in front of real servers."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support import ROOT
from tests.support.engines.api_server import SERVED_MODEL
from tests.support.processes import running_process, wait_until_healthy
from tests.support.redis.servers import free_port

BINARY = ROOT / ".cache/field/vllm-router/bin/vllm-router"


class Router:
    """``log`` is what it printed so far."""

    def __init__(self, port: int, log: Path) -> None:
        self._url = f"http://127.0.0.1:{port}"
        self._log = log

    def complete(self, prompt: list[int], max_tokens: int = 2) -> str:
        """The text that comes after the prompt."""
        body = {"model": SERVED_MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        request = urllib.request.Request(
            f"{self._url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            answer: dict[str, Any] = json.load(response)
        return str(answer["choices"][0]["text"])

    def decisions(self) -> list[tuple[str, int]]:
        """Of each request so far: the server's URL, and the tokens it was credited with."""
        plain = re.sub(r"\x1b\[[0-9;]*m", "", self._log.read_text(errors="replace"))
        found = re.findall(
            r'KV prefix decision .*worker="(\S+)".* credited_prefix_tokens=(\d+)', plain
        )
        return [(url, int(tokens)) for url, tokens in found]


@contextmanager
def running_router(log: Path, *arguments: str) -> Iterator[Router]:
    port, metrics_port = free_port(), free_port()
    command = [
        *(str(BINARY), "--host", "127.0.0.1", "--port", str(port), *arguments),
        *("--prometheus-port", str(metrics_port), "--log-level", "debug"),
    ]
    with running_process(command, log, {"RUST_LOG": "info,vllm_router_rs=debug"}) as process:
        wait_until_healthy(process, f"http://127.0.0.1:{port}/health", 60.0, log)
        yield Router(port, log)
