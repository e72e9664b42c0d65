"""What the connector asks of vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.scheduler import Scheduler

from lmcache_connector.p2p.connector import LMCacheP2PConnector
from lmcache_connector.p2p.plans import HandoverPlan, Save, Start
from tests.p2p.scheduler.test_adapter import asks_for_decode, begin, make, step
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


class Reset:
    """vLLM's own reset of a producer's cache."""

    def __init__(self) -> None:
        self.side = make()
        self.pool = BlockPool(num_gpu_blocks=8, enable_caching=True, hash_block_size=16)
        connector = object.__new__(LMCacheP2PConnector)
        connector._scheduler, connector._worker = self.side, None
        manager: Any = SimpleNamespace(
            block_pool=self.pool, reset_prefix_cache=self.pool.reset_prefix_cache
        )
        connector.bind_kv_cache_manager(manager)
        self._vllm: Any = SimpleNamespace(
            kv_cache_manager=manager,
            connector=connector,
            aux_output_connector=None,
            log_stats=False,
            reset_connector_cache=lambda: Scheduler.reset_connector_cache(self._vllm),
        )

    def __call__(self) -> bool:
        return bool(Scheduler.reset_prefix_cache(self._vllm, reset_connector=True))

    def digest(self, name: str) -> bytes:
        """What a prompt is called."""
        request = asks_for_decode(name, 50)
        begin(self.side, request)
        found: bytes = step(self.side, {request: 50}, {name: [1, 2, 3, 4]}).starts[0].digest
        return found


def test_a_reset_that_vllm_refuses_does_not_count() -> None:
    """It is asked for again. Until then its weights are those of the start."""
    reset = Reset()
    block = reset.pool.get_new_blocks(1)
    before = reset.digest("one")
    assert not reset()
    assert reset.digest("two") == before
    reset.pool.free_blocks(block)
    assert reset()
    assert reset.digest("three") != before
