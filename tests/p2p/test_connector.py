"""What the connector asks of vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.scheduler import Scheduler

from lmcache_connector.p2p.connector import LMCacheP2PConnector
from lmcache_connector.p2p.plans import HandoverPlan, Save, Start
from tests.p2p.scheduler.test_adapter import answer_weights, asks_for_decode, begin, make, step
from tests.support.engines.p2p_instances import (
    BLOCK_SIZE,
    DIGEST,
    OTHERS,
    SHUFFLED,
    check_all_arrived,
    running_instance,
)


def test_full_graphs_are_kept() -> None:
    """A graph of a whole pass calls nothing in its middle: what it computed is saved after it."""
    assert not LMCacheP2PConnector.requires_piecewise_for_cudagraph({})
    with (
        running_instance(produces=True) as prefill,
        running_instance(consumes=True) as decode,
    ):
        (rank,) = prefill.ranks
        start = Start("t", DIGEST, len(SHUFFLED) * BLOCK_SIZE, None)
        plan = HandoverPlan(starts=(start,), saves=(Save("t", 0, tuple(SHUFFLED), True),))
        rank.worker.start_forward(plan)
        for layer in range(3):
            prefill.compute(SHUFFLED, 1)(layer)
        rank.worker.end_forward(plan)  # without a save_layer before
        decode.load("t", OTHERS, prefill.address)
        check_all_arrived(prefill, decode, "t")


@pytest.mark.parametrize("is_whole", [True, False])
def test_every_reset_asks_for_the_weights(is_whole: bool) -> None:
    """vLLM's own with its defaults too, as trainers call it, and one that it refuses."""
    side = make()
    pool = BlockPool(num_gpu_blocks=8, enable_caching=True, hash_block_size=16)
    connector = object.__new__(LMCacheP2PConnector)
    connector._scheduler, connector._worker = side, None
    manager: Any = SimpleNamespace(block_pool=pool, reset_prefix_cache=pool.reset_prefix_cache)
    connector.bind_kv_cache_manager(manager)
    vllm: Any = SimpleNamespace(
        kv_cache_manager=manager, connector=connector, aux_output_connector=None, log_stats=False
    )
    if not is_whole:
        pool.get_new_blocks(1)
    assert Scheduler.reset_prefix_cache(vllm) is is_whole
    assert connector.has_pending_push_work()
    request = asks_for_decode("r", 50)
    assert begin(side, request) == (None, False)
    assert step(side, {}, {}).weights_question == 1
    answer_weights(side)
    assert not connector.has_pending_push_work()
    assert begin(side, asks_for_decode("s", 50)) == (0, False)
