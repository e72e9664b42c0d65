"""vllm-router between a prefill and a decode server: by NIXL's parameters, and by discovery."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests.support.engines.api_server import ApiServer, started_api
from tests.support.engines.p2p_engines import kv_transfer
from tests.support.engines.settings import random_prompt
from tests.support.engines.vllm_router import BINARY, running_router
from tests.support.redis.servers import free_port, free_ports

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(not BINARY.exists(), reason="`make soak` installs vllm-router"),
    pytest.mark.timeout(1800),
]

LENGTHS = 9, 300, 1000, 3000
HIT, FAILED = "vllm:lmcache_p2p_hit_tokens_total", "vllm:lmcache_p2p_failed_loads_total"


@dataclass(frozen=True)
class Servers:
    """``discovery``: the address at which they register."""

    prefill: ApiServer
    decode: ApiServer
    discovery: str


@pytest.fixture(scope="module")
def servers(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder, discovery = tmp_path_factory.mktemp("servers"), f"127.0.0.1:{free_port()}"
    started = []
    with ExitStack() as stack:
        for role in ("kv_producer", "kv_consumer"):
            http_port = free_port()
            address = f"127.0.0.1:{http_port}"
            transfer = kv_transfer(
                role,
                free_ports(1),
                cpu_gib=0.5,
                router=f"tcp://{discovery}",
                http_address=address,
                audit_share=0.0,
            )
            api = started_api(
                tiny_model,
                transfer,
                folder / f"{role}.log",
                *("--max-model-len", "4096", "--kv-cache-memory-bytes", str(64 << 20)),
                port=http_port,
            )
            started.append(stack.enter_context(api))
        for server in started:
            server.wait_ready()
        prefill, decode = started
        yield Servers(prefill, decode, discovery)


def check_transfers(servers: Servers, seed: int, log: Path, *arguments: str) -> None:
    """All tokens of a prompt but the last are transferred, and the answer is that of a prefill
    server alone."""
    prompts = [random_prompt(seed + i, length) for i, length in enumerate(LENGTHS)]
    failed = servers.decode.metric(FAILED)
    mode = ("--vllm-pd-disaggregation", "--policy", "round_robin")
    with running_router(log, *mode, *arguments) as router:
        for prompt in prompts:
            before = servers.decode.metric(HIT)
            text = router.complete(prompt)
            servers.decode.settle(partial(has_hits, servers.decode, before + len(prompt) - 1))
            alone = json.loads(servers.prefill.complete(prompt))["choices"][0]["text"]
            assert text != ""
            assert alone.startswith(text)
    assert servers.decode.metric(FAILED) == failed


def has_hits(api: ApiServer, num_tokens: float) -> bool:
    return api.metric(HIT) >= num_tokens


def test_by_the_parameters_of_nixl(servers: Servers, tmp_path: Path) -> None:
    urls = [f"http://{api.address}" for api in (servers.prefill, servers.decode)]
    arguments = ["--kv-connector", "nixl", "--prefill", urls[0], "--decode", urls[1]]
    check_transfers(servers, 100, tmp_path / "router.log", *arguments)


def test_by_discovery(servers: Servers, tmp_path: Path) -> None:
    arguments = ["--vllm-discovery-address", servers.discovery]
    check_transfers(servers, 200, tmp_path / "router.log", *arguments)
