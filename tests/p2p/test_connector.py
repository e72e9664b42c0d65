"""What the connector asks of vLLM."""

from __future__ import annotations

from lmcache_connector.p2p.connector import LMCacheP2PConnector
from lmcache_connector.p2p.plans import HandoverPlan, Save, Start
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
