"""Long cases of KV transfers, each with its own engines."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.calls import forget, wait_for_writes
from tests.support.engines.instance import VllmInstance
from tests.support.engines.p2p_engines import NOTICED_SECONDS, Ask, Engines, ask, running
from tests.support.engines.settings import PATIENT, random_prompt
from tests.support.redis.servers import Server, free_ports
from tests.transfers.conftest import Way
from tests.transfers.test_transfers import BLOCK, check, missing_blocks

pytestmark = pytest.mark.soak
ROLES = "kv_producer", "kv_consumer"


@contextmanager
def pair(
    way: Way, model: Path, folder: Path, roles: tuple[str, str] = ROLES, **settings: Any
) -> Iterator[Engines]:
    """Two engines. ``settings``: of the connector under ``connector``, otherwise of vLLM."""
    ports = [free_ports(4) for _ in roles]
    extra = settings.pop("connector", {})
    transfers = [way(role, port, **extra) for role, port in zip(roles, ports, strict=True)]
    with running(model, folder, transfers, **settings) as (first, second):
        yield Engines([(first, ports[0])], [(second, ports[1])], count())


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)])
def test_other_tensor_parallel_sizes(
    way: Way, tiny_model: Path, tmp_path: Path, sizes: tuple[int, int]
) -> None:
    with pair(way, tiny_model, tmp_path, tensor_parallel_size=list(sizes)) as engines:
        for number, transfer in enumerate((Engines.hand_over, Engines.hand_over_by_params)):
            for num_tokens in (300, 3001):
                cold, served = transfer(
                    engines, random_prompt(10 * num_tokens + number, num_tokens)
                )
                assert served.served.external_hit_tokens in (num_tokens, num_tokens - 1)
                assert () != served.served.shard_digests == cold.served.shard_digests


def test_redis_completes_the_prefix_of_a_named_instance(
    way: Way, tiny_model: Path, tmp_path: Path, valkey: Server
) -> None:
    shared = {"redis_url": valkey.url, "compute_or_load": "always", "redis_timeout_seconds": 10.0}
    with pair(way, tiny_model, tmp_path, connector=shared, limits=PATIENT) as engines:
        (first, port), (second, _) = engines.prefill[0], engines.decode[0]
        prompt = random_prompt(1, 1500)
        cold = first.call(ask, Ask("whole", prompt))
        first.call(wait_for_writes)
        first.call(forget)
        first.call(ask, Ask("half", prompt[:700]))
        second.call(ask, Ask("warm", random_prompt(2, 300)))  # connects to Redis
        place = {"remote_kv_source": {"remote_host": "127.0.0.1", "remote_port": port}}
        served = second.call(ask, Ask("named", prompt, params=place))
        assert served.served.external_hit_tokens == 1500 // BLOCK * BLOCK
        assert () != served.served.block_digests == cold.served.block_digests


def strike(victim: VllmInstance, seconds: float, number: int) -> threading.Timer:
    timer = threading.Timer(seconds, os.kill, (victim.pid, number))
    timer.start()
    return timer


def until_it_dies(instance: VllmInstance, request: Ask) -> None:
    with contextlib.suppress(RuntimeError):
        instance.call(ask, request)


@pytest.mark.parametrize("seconds", [0.05, 0.25, 0.6])
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
def test_the_prefill_engine_falls_silent(
    way: Way, tiny_model: Path, tmp_path: Path, number: signal.Signals, seconds: float
) -> None:
    """While it computes or sends: the decode engine soon recomputes, and later transfers work."""
    with pair(way, tiny_model, tmp_path, max_num_batched_tokens=[512, None]) as engines:
        (first, _), (second, _) = engines.prefill[0], engines.decode[0]
        name, prompt = engines.name(), random_prompt(1, 7901)
        computing = threading.Thread(target=until_it_dies, args=(first, Ask(name, prompt, 1)))
        computing.start()
        timer, started = strike(first, seconds, number), time.monotonic()
        answer = second.call(ask, Ask(name, prompt))
        assert answer.finish_reason == "length"
        assert time.monotonic() - started < NOTICED_SECONDS
        timer.join()
        assert second.call(missing_blocks) == 0
        if number is signal.SIGSTOP:
            os.kill(first.pid, signal.SIGCONT)
            computing.join()
            check(*engines.hand_over(random_prompt(2, 500)), 500)
        computing.join()
