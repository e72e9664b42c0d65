"""The insides of a scheduler side and of a CPU tier: what no user of them reaches."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmcache_connector.scheduler.scheduler import Scheduler
if TYPE_CHECKING:  # vLLM cannot start once lmcache has been imported
    from lmcache_connector.worker.lmcache_engine import LMCacheEngineAdapter


def check_scheduler_side(side: Scheduler) -> None:
    """Raises ``AssertionError`` if anything is left."""
    assert not side.book.states, f"{len(side.book.states)} requests have not been dropped"
    assert len(side.jobs) == 0, f"{len(side.jobs)} jobs have not ended"
    assert not side.policy.num_open, "the cost model counts jobs that have ended"
    assert not side.index._planned, "chunks are still planned"
    assert not side.held._pins, "blocks are still pinned"
    assert not side._ask_until, "vLLM is still to ask for a request again"
    assert not side._to_compute, "requests are still excluded from loads"
    transfers = side.transfers
    open_ones = [*transfers._sent, *transfers._received]
    assert not open_ones, "KV transfers have not ended"


def empty(engine: LMCacheEngineAdapter) -> None:
    """Remove all chunks, with events."""
    for key in engine.cpu.all_keys():
        engine.cpu.forget(key)
