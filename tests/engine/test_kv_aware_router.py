"""vllm-router's ``kv_aware`` policy in front of two real servers."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from examples.tiny_model import ModelShape
from tests.support.engines.api_server import SERVED_MODEL, ApiServer, running_api
from tests.support.engines.settings import CHUNK_SIZE, kv_transfer, random_prompt
from tests.support.engines.vllm_router import BINARY, running_router
from tests.support.redis.servers import Server, free_ports

BLOCK_SIZE = 32
# vLLM's own cache has room for four of each server's conversations.
NUM_CONVERSATIONS, NUM_TOKENS, KV_CACHE_BYTES = 16, 700, 12 << 20
HIT_TOKENS = NUM_TOKENS // CHUNK_SIZE * CHUNK_SIZE
SMALL_GIB = 0.012  # each CPU tier: five conversations
CREDITS = {"cpu": 0.8, "redis": 0.3}  # the router's value of a token in each tier; vLLM's cache: 1

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(not BINARY.exists(), reason="`make soak` installs vllm-router"),
    pytest.mark.timeout(900),
]


@contextmanager
def server_with_events(
    model: Path, log: Path, port: int, **settings: Any
) -> Iterator[tuple[ApiServer, str]]:
    """The server, and the address of its events."""
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


def kv_aware(servers: Sequence[ApiServer], sources: Sequence[str]) -> list[str]:
    return [
        *("--policy", "kv_aware", "--worker-urls"),
        *(f"http://{server.address}" for server in servers),
        *(flag for source in sources for flag in ("--kv-event-source", source)),
        *("--kv-event-block-size", str(BLOCK_SIZE), "--kv-event-model", SERVED_MODEL),
    ]


@pytest.mark.parametrize("in_redis", [False, True])
def test_a_turn_goes_to_its_conversations_home(
    tiny_model: Path, tmp_path: Path, valkey: Server, in_redis: bool
) -> None:
    """By then vLLM's own cache has dropped most of the conversations, and with ``in_redis`` the CPU
    tier some."""
    ports, tier = free_ports(2), "redis" if in_redis else "cpu"
    settings = {"redis_url": valkey.url, "cpu_gib": SMALL_GIB} if in_redis else {}
    with ExitStack() as stack:
        started = [
            stack.enter_context(
                server_with_events(tiny_model, tmp_path / f"{port}.log", port, **settings)
            )
            for port in range(ports, ports + 2)
        ]
        servers, sources = zip(*started, strict=True)
        arguments = kv_aware(servers, sources)
        router = stack.enter_context(running_router(tmp_path / "router.log", *arguments))
        prompts = [random_prompt(seed, NUM_TOKENS) for seed in range(NUM_CONVERSATIONS)]
        homes = [*servers] * (NUM_CONVERSATIONS // 2)
        random.Random(3).shuffle(homes)
        for prompt, home in zip(prompts, homes, strict=True):
            home.complete(prompt)
        for server in servers:
            server.settle(partial(has_stored, server, tier, HIT_TOKENS * NUM_CONVERSATIONS // 2))
        for prompt in prompts:
            router.complete([*prompt, *range(2, 42)])
        chosen, credited = zip(*router.decisions(), strict=True)
        assert chosen == tuple(f"http://{home.address}" for home in homes)
        assert min(credited) >= int(CREDITS[tier] * HIT_TOKENS)
        for server in servers:
            server.settle(partial(has_loaded, server, HIT_TOKENS * NUM_CONVERSATIONS // 4))
            assert not in_redis or server.metric("vllm:lmcache_hit_tokens_total", 'tier="redis"')


def has_stored(api: ApiServer, tier: str, num_tokens: int) -> bool:
    num_bytes = num_tokens * ModelShape().kv_bytes_per_token
    return api.metric("vllm:lmcache_stored_bytes_total", f'tier="{tier}"') >= num_bytes


def has_loaded(api: ApiServer, num_tokens: int) -> bool:
    return api.metric("vllm:lmcache_prefill_saved_tokens_total") >= num_tokens
