"""vllm-router between prefill and decode servers, the real one: by NIXL's parameters, by what it
discovers, and to the prefill server whose CPU tier holds a prompt."""

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
from tests.support.engines.ports import free_ports
from tests.support.engines.vllm_router import BINARY, running_router
from tests.support.prompts import random_prompt
from tests.support.redis.servers import free_port

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(not BINARY.exists(), reason="`make soak` installs vllm-router"),
    pytest.mark.timeout(1800),
]

BLOCK_SIZE = 32
LENGTHS = 9, 300, 1000, 3000
HIT, FAILED = "vllm:lmcache_p2p_hit_tokens_total", "vllm:lmcache_p2p_failed_loads_total"


@dataclass(frozen=True)
class Servers:
    """``events``: where each prefill server publishes, as the router wants to be told."""

    prefill: list[ApiServer]
    decode: ApiServer
    events: list[str]
    discovery: str

    @property
    def urls(self) -> list[str]:
        prefill = [flag for api in self.prefill for flag in ("--prefill", f"http://{api.address}")]
        return [*prefill, "--decode", f"http://{self.decode.address}"]


@pytest.fixture(scope="module")
def servers(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder, discovery = tmp_path_factory.mktemp("servers"), f"127.0.0.1:{free_port()}"
    started, events = [], []
    with ExitStack() as stack:
        for number, role in enumerate(["kv_producer", "kv_producer", "kv_consumer"]):
            http_port, events_port = free_port(), free_ports(1)
            address = f"127.0.0.1:{http_port}"
            transfer = kv_transfer(
                role,
                free_ports(1),
                cpu_gib=0.5,
                router=f"tcp://{discovery}",
                http_address=address,
                audit_share=0.0,
            )
            publishes = {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": f"tcp://*:{events_port}",
            }
            events.append(f"http://{address}=tcp://127.0.0.1:{events_port}")
            api = started_api(
                tiny_model,
                transfer,
                folder / f"{number}.log",
                *("--max-model-len", "4096", "--kv-cache-memory-bytes", str(64 << 20)),
                *("--block-size", str(BLOCK_SIZE), "--kv-events-config", json.dumps(publishes)),
                environment={"VLLM_SERVER_DEV_MODE": "1"},
                port=http_port,
            )
            started.append(stack.enter_context(api))
        for server in started:
            server.wait_ready()
        yield Servers(started[:2], started[2], events[:2], discovery)


def check_transfers(servers: Servers, seed: int, log: Path, *arguments: str) -> None:
    """Every prompt is transferred but for its last token, and continued as a prefill server alone
    continues it."""
    prompts = [random_prompt(seed + i, length) for i, length in enumerate(LENGTHS)]
    failed = servers.decode.metric(FAILED)
    with running_router(log, "--vllm-pd-disaggregation", *arguments) as router:
        for prompt in prompts:
            before = servers.decode.metric(HIT)
            text = router.complete(prompt)
            servers.decode.settle(partial(has_hits, servers.decode, before + len(prompt) - 1))
            alone = json.loads(servers.prefill[0].complete(prompt))["choices"][0]["text"]
            assert alone.startswith(text)
    assert servers.decode.metric(FAILED) == failed


def has_hits(api: ApiServer, num_tokens: float) -> bool:
    return api.metric(HIT) >= num_tokens


def test_by_the_parameters_of_nixl(servers: Servers, tmp_path: Path) -> None:
    arguments = ("--policy", "round_robin", "--kv-connector", "nixl", *servers.urls)
    check_transfers(servers, 100, tmp_path / "router.log", *arguments)


def test_by_what_the_router_discovers(servers: Servers, tmp_path: Path) -> None:
    arguments = ("--policy", "round_robin", "--vllm-discovery-address", servers.discovery)
    check_transfers(servers, 200, tmp_path / "router.log", *arguments)


def test_a_prompt_is_prefilled_where_the_cpu_tier_has_it(servers: Servers, tmp_path: Path) -> None:
    """Both prefill servers have forgotten what they computed, but for their tiers."""
    prompts = [random_prompt(300 + i, 1000) for i in range(8)]
    arguments = [
        *("--vllm-pd-disaggregation", "--kv-connector", "nixl", "--policy", "round_robin"),
        *("--prefill-policy", "kv_aware", *servers.urls, "--kv-event-block-size", str(BLOCK_SIZE)),
        *(flag for source in servers.events for flag in ("--pd-kv-events", source)),
    ]
    with running_router(tmp_path / "router.log", *arguments) as router:
        homes = [servers.prefill[i % 3 % 2] for i in range(len(prompts))]
        for prompt, home in zip(prompts, homes, strict=True):
            home.complete(prompt)
        for server in servers.prefill:
            server.settle(lambda: True)
            server.forget()
        saved = [api.metric("vllm:lmcache_prefill_saved_tokens_total") for api in servers.prefill]
        for prompt in prompts:
            router.complete([*prompt, *range(2, 42)])
        for api, before in zip(servers.prefill, saved, strict=True):
            num_tokens = before + 896 * homes.count(api)
            api.settle(partial(has_saved, api, num_tokens))


def has_saved(api: ApiServer, num_tokens: float) -> bool:
    return api.metric("vllm:lmcache_prefill_saved_tokens_total") >= num_tokens
