"""A router as deployments of vLLM's NixlConnector have it, before two of our API servers."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.api_server import ApiServer, started_api
from tests.support.engines.p2p_engines import kv_transfer
from tests.support.engines.ports import free_ports
from tests.support.nixl import needs_nixl
from tests.support.prompts import random_prompt

# Two servers: test_transfers.py shows with engines what a router has to pass on.
pytestmark = [
    needs_nixl,
    pytest.mark.soak,
]  # two servers; what a router passes on: test_transfers.py
NUM_TOKENS = 1500
_ARGUMENTS = ("--max-model-len", "4096", "--kv-cache-memory-bytes", str(256 << 20))


@dataclass(frozen=True)
class NixlRouter:
    """Does what vLLM's example of a proxy for NIXL does, and knows nothing of our connector."""

    prefill: ApiServer
    decode: ApiServer

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        headers = {"X-Request-Id": str(uuid.uuid4())}
        first = {**body, "max_tokens": 1, "max_completion_tokens": 1, "stream": False}
        first["kv_transfer_params"] = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }
        answer = json.loads(self.prefill.post("/v1/completions", first, headers))
        params = answer.get("kv_transfer_params", {})
        second = {**body, "kv_transfer_params": params} if params else body
        found: dict[str, Any] = json.loads(self.decode.post("/v1/completions", second, headers))
        return found | {"passed_on": params}


@pytest.fixture(scope="module")
def router(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NixlRouter]:
    folder = tmp_path_factory.mktemp("router")
    cores = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        servers = []
        for place, role in enumerate(("kv_producer", "kv_consumer")):
            environment = {"VLLM_CPU_OMP_THREADS_BIND": str(cores[place % len(cores)])}
            transfer = kv_transfer(role, free_ports(1), audit_share=0.0, cpu_gib=0.5)
            log = folder / f"{role}.log"
            servers.append(
                stack.enter_context(
                    started_api(tiny_model, transfer, log, *_ARGUMENTS, environment=environment)
                )
            )
        for server in servers:
            server.wait_ready()
        yield NixlRouter(*servers)


def test_what_it_passes_on_is_enough(router: NixlRouter) -> None:
    body = {"model": "tiny", "max_tokens": 4, "temperature": 0}
    # Both know the name of their weights once they have served one.
    router.complete({**body, "prompt": random_prompt(2, 300)})
    before = router.decode.metric("vllm:lmcache_p2p_hit_tokens_total")
    answer = router.complete({**body, "prompt": random_prompt(1, NUM_TOKENS)})
    assert answer["usage"]["completion_tokens"] == 4
    passed_on = answer["passed_on"]
    assert passed_on["do_remote_prefill"] is True
    assert passed_on["do_remote_decode"] is False
    names = {"remote_engine_id", "remote_request_id", "remote_block_ids", "remote_host"}
    assert passed_on.keys() >= names | {"remote_port", "remote_num_tokens", "tp_size"}
    taken = router.decode.metric("vllm:lmcache_p2p_hit_tokens_total")
    assert taken - before == NUM_TOKENS - 1
    assert router.decode.metric("vllm:lmcache_p2p_failed_loads_total") == 0
