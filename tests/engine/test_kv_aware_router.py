"""vllm-router's ``kv_aware`` policy, the real one, in front of two real servers."""

from __future__ import annotations

import json
import random
import re
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from examples.tiny_model import ModelShape
from tests.support import ROOT
from tests.support.engines.api_server import SERVED_MODEL, ApiServer, running_api
from tests.support.engines.ports import free_ports
from tests.support.engines.settings import CHUNK_SIZE, kv_transfer
from tests.support.processes import running_process, wait_until_healthy
from tests.support.prompts import random_prompt
from tests.support.redis.servers import free_port

ROUTER = ROOT / ".cache/field/vllm-router/bin/vllm-router"
BLOCK_SIZE = 32
# vLLM's own cache has room for four of the conversations that each server gets.
NUM_CONVERSATIONS, NUM_TOKENS, KV_CACHE_BYTES = 16, 700, 12 << 20
HIT_TOKENS = NUM_TOKENS // CHUNK_SIZE * CHUNK_SIZE
HOST_CREDIT = 0.8  # of the router: what a token in CPU memory is worth of one in vLLM's cache

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(not ROUTER.exists(), reason="`make soak` installs vllm-router"),
    pytest.mark.timeout(900),
]


@contextmanager
def server_with_events(
    model: Path, log: Path, port: int, **settings: Any
) -> Iterator[tuple[ApiServer, str]]:
    """The server, and where a router subscribes to its events."""
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{port}"}
    with running_api(
        model,
        kv_transfer(**settings),
        log,
        *("--block-size", str(BLOCK_SIZE), "--max-model-len", "2048"),
        *("--kv-cache-memory-bytes", str(KV_CACHE_BYTES)),
        *("--kv-events-config", json.dumps(events)),
    ) as api:
        yield api, f"http://{api.address}=tcp://127.0.0.1:{port}"


class Router:
    """``log`` is what it printed so far."""

    def __init__(self, port: int, log: Path) -> None:
        self._url = f"http://127.0.0.1:{port}"
        self._log = log

    def complete(self, prompt: list[int]) -> None:
        body = {"model": SERVED_MODEL, "prompt": prompt, "max_tokens": 2, "temperature": 0}
        request = urllib.request.Request(
            f"{self._url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            assert response.status == 200

    def decisions(self) -> list[tuple[str, int]]:
        """Of each request so far: the server's URL, and the tokens it was credited with."""
        plain = re.sub(r"\x1b\[[0-9;]*m", "", self._log.read_text(errors="replace"))
        found = re.findall(
            r'KV prefix decision .*worker="(\S+)".* credited_prefix_tokens=(\d+)', plain
        )
        return [(url, int(tokens)) for url, tokens in found]


@contextmanager
def running_router(
    servers: Sequence[ApiServer], sources: Sequence[str], log: Path
) -> Iterator[Router]:
    port, metrics_port = free_port(), free_port()
    command = [
        *(str(ROUTER), "--policy", "kv_aware", "--host", "127.0.0.1", "--port", str(port)),
        *("--worker-urls", *(f"http://{server.address}" for server in servers)),
        *(flag for source in sources for flag in ("--kv-event-source", source)),
        *("--kv-event-block-size", str(BLOCK_SIZE), "--kv-event-model", SERVED_MODEL),
        *("--prometheus-port", str(metrics_port), "--log-level", "debug"),
    ]
    with running_process(command, log, {"RUST_LOG": "info,vllm_router_rs=debug"}) as process:
        wait_until_healthy(process, f"http://127.0.0.1:{port}/health", 60.0, log)
        yield Router(port, log)


def test_a_turn_goes_to_the_server_whose_cpu_tier_has_it(tiny_model: Path, tmp_path: Path) -> None:
    """vLLM's own cache has dropped most of the conversations by their second turn."""
    ports = free_ports(2)
    with ExitStack() as stack:
        started = [
            stack.enter_context(server_with_events(tiny_model, tmp_path / f"{port}.log", port))
            for port in range(ports, ports + 2)
        ]
        servers, sources = zip(*started, strict=True)
        router = stack.enter_context(running_router(servers, sources, tmp_path / "router.log"))
        prompts = [random_prompt(seed, NUM_TOKENS) for seed in range(NUM_CONVERSATIONS)]
        homes = [*servers] * (NUM_CONVERSATIONS // 2)
        random.Random(3).shuffle(homes)
        for prompt, home in zip(prompts, homes, strict=True):
            home.complete(prompt)
        for server in servers:
            server.settle(partial(has_stored, server, HIT_TOKENS * NUM_CONVERSATIONS // 2))
        for prompt in prompts:
            router.complete([*prompt, *range(2, 42)])
        chosen, credited = zip(*router.decisions(), strict=True)
        assert chosen == tuple(f"http://{home.address}" for home in homes)
        assert min(credited) >= int(HOST_CREDIT * HIT_TOKENS)
        for server in servers:
            server.settle(partial(has_loaded, server, HIT_TOKENS * NUM_CONVERSATIONS // 4))


def has_stored(api: ApiServer, num_tokens: int) -> bool:
    num_bytes = num_tokens * ModelShape().kv_bytes_per_token
    return api.metric("vllm:lmcache_stored_bytes_total", 'tier="cpu"') >= num_bytes


def has_loaded(api: ApiServer, num_tokens: int) -> bool:
    return api.metric("vllm:lmcache_prefill_saved_tokens_total") >= num_tokens
