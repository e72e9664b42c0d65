"""Real engines that hand over to each other: each computes prompts for the other one."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.handover import Ask, ask, at_rest
from tests.support.engines.handover import prefill as prefill_only
from tests.support.engines.instance import VllmInstance
from tests.support.engines.p2p_engines import kv_transfer, running
from tests.support.engines.p2p_instances import free_ports
from tests.support.nixl import needs_nixl
from tests.support.prompts import random_prompt

pytestmark = [needs_nixl, pytest.mark.soak]  # tests/p2p/worker/test_both_ways.py is quick
_WANTS = {"do_remote_decode": True, "do_remote_prefill": False}
_SETTINGS: dict[str, Any] = {
    "secret": "shared by these two",
    "lease_seconds": 4.0,
    "kv_buffer_size": 1 << 16,
    "overflow_bytes": 0,
}


@pytest.fixture(scope="module")
def pair(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[VllmInstance]]:
    """Each has room in its cache for one and a half of the prompts, and in host memory for none."""
    transfers = [kv_transfer("kv_both", free_ports(1), **_SETTINGS) for _ in range(2)]
    folder = tmp_path_factory.mktemp("both")
    sizes: dict[str, Any] = {"num_gpu_blocks_override": 40, "max_model_len": 4096}
    with running(tiny_model, folder, transfers, **sizes) as engines:
        for engine in engines:
            engine.serve(random_prompt(99, 50))  # with its first step it says that it can be read
        yield engines


def test_two_that_hold_what_the_other_one_waits_for(pair: list[VllmInstance]) -> None:
    """Neither has blocks left to read into."""
    prompts = [random_prompt(1 + i, 3000) for i in range(2)]
    cold = [
        engine.call(prefill_only, Ask(f"p{i}", prompt, 1, _WANTS))
        for i, (engine, prompt) in enumerate(zip(pair, prompts, strict=True))
    ]
    asks = [Ask(f"d{i}", prompts[1 - i], 2, cold[1 - i].params) for i in range(2)]
    with ThreadPoolExecutor(2) as pool:
        served = list(pool.map(lambda e, a: e.call(ask, a), pair, asks))
    for first, second in zip(cold, reversed(served), strict=True):
        assert second.finish_reason == "length"
        assert () != first.served.block_digests == second.served.block_digests
    for engine in pair:
        engine.call(at_rest)
