"""A store whose blocks change under it: what it copied is kept only if it was right.

The paged cache, the copies and LMCache are real; only vLLM is missing, and the copy ends when the
test says so.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from lmcache_connector.copy_kv_blocks.copier import Copier, QueuedCopy, make_copier
from lmcache_connector.plans import Outcome, StepPlan
from lmcache_connector.storage.geometry import ChunkGeometry, PartGeometries
from lmcache_connector.storage.redis.config import RedisTierConfig
from lmcache_connector.storage.redis.tier import RedisTier
from lmcache_connector.worker import adapter, rank_tiers
from lmcache_connector.worker.adapter import WorkerAdapter
from lmcache_connector.worker.job_queue import StepGate
from lmcache_connector.worker.lmcache_start import RankSettings
from tests.support.jobs import load_job, one_part, store_job, tier_config
from tests.support.redis.servers import Server
from tests.support.workers import FixedWeights, SteppedWorker

LONG = 60.0
BLOCK_SIZE, WIDTH, NUM_BLOCKS = 16, 64, 8
GEOMETRY = ChunkGeometry(2 * BLOCK_SIZE, 0, (WIDTH,), (0,), 1, "bfloat16")
KEY = b"k" * 32
STORE = store_job(1, "r", (KEY,), ((0, 1),))
LOAD = load_job(2, "s", (KEY,), ((4, 5),), deadline_seconds=LONG)


@dataclass
class HeldCopier:
    """Copies out of the paged cache when it may."""

    inner: Copier
    shares_cores: bool = True
    may_copy: threading.Event = field(default_factory=threading.Event)
    begun: threading.Event = field(default_factory=threading.Event)
    has_copied: threading.Event = field(default_factory=threading.Event)

    def copy(self, *args: Any) -> int:
        if args[1] == "d2h":
            self.begun.set()
            assert self.may_copy.wait(LONG)
        try:
            return self.inner.copy(*args)
        finally:
            if args[1] == "d2h":
                self.has_copied.set()

    def enqueue(self, copies: Any) -> QueuedCopy:
        return self.inner.enqueue(copies)

    def fence(self) -> Any:
        return self.inner.fence()

    def close(self) -> None:
        self.inner.close()


@dataclass
class Instance(SteppedWorker):
    copier: HeldCopier = field(kw_only=True)

    @property
    def layer(self) -> torch.Tensor:
        return self.cache["layers.0"]


@contextmanager
def made(redis: RedisTier | None = None) -> Iterator[Instance]:
    copier = HeldCopier(make_copier(torch.device("cpu")))
    cache = torch.randn(NUM_BLOCKS, 1, BLOCK_SIZE, WIDTH // 2).bfloat16()
    settings = RankSettings(
        tier_config(0.05),
        parts=one_part(GEOMETRY, BLOCK_SIZE),
        blocks_are_zeroed=True,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_tiers, "make_copier", lambda device: copier)
        patch.setattr(rank_tiers, "run_self_test", lambda *_, **more: None)
        worker = WorkerAdapter(settings, {"layers.0": cache}, redis, FixedWeights())
    yield Instance(worker, {"layers.0": cache}, copier=copier)
    copier.may_copy.set()
    worker.shutdown()


@pytest.fixture
def instance() -> Iterator[Instance]:
    with made() as instance:
        yield instance


def test_zeroes_are_not_stored_though_the_copy_ends_before_the_plan_comes(
    instance: Instance,
) -> None:
    """Model runner V2 zeroes reused blocks first, and hands over the plan that says so later."""
    instance.run(StepPlan(stores=(STORE,)))
    instance.layer[:2] = 0  # the next step has begun
    instance.copier.may_copy.set()
    assert instance.copier.has_copied.wait(LONG)
    instance.run(StepPlan(vacated_stores=(1,)))
    assert instance.outcome(1) is Outcome.CANCELLED
    instance.run(StepPlan(loads=(LOAD,)))
    assert instance.outcome(2) is Outcome.MISSING


def test_what_was_copied_between_two_steps_is_kept_if_nobody_wanted_the_blocks(
    instance: Instance,
) -> None:
    stored = instance.layer[:2].clone()
    instance.run(StepPlan(stores=(STORE,)))
    instance.copier.may_copy.set()
    assert instance.copier.has_copied.wait(LONG)
    assert instance.outcome(1) is Outcome.DONE
    instance.run(StepPlan(loads=(LOAD,), vacated_stores=(1,)))  # too late to matter
    assert instance.outcome(2) is Outcome.DONE
    assert torch.equal(instance.layer[4:6], stored)


@pytest.mark.parametrize("fails", [True, False], ids=["next step fails", "it does not"])
def test_a_shutdown_hands_on_no_zeroes_of_a_step_that_failed(valkey: Server, fails: bool) -> None:
    """vLLM ends a worker whose step has raised. The plan of that step may not have come."""
    config = RedisTierConfig(url=valkey.url)
    with valkey.client() as client:
        with made(RedisTier(config, PartGeometries((GEOMETRY,)))) as instance:
            instance.run(StepPlan(stores=(STORE,)))
            if fails:
                instance.layer[:2] = 0
            instance.copier.may_copy.set()
            assert instance.copier.has_copied.wait(LONG)
            if not fails:
                assert instance.outcome(1) is Outcome.DONE
            instance.worker.shutdown()  # writes what is queued
        written = list(client.scan_iter(f"lmc:*{KEY.hex()}*"))
    assert bool(written) is not fails


def test_a_copy_that_ends_after_the_last_step_is_void() -> None:
    """A shutdown first ends the probe of Redis. A copy may end meanwhile, uncancelled so far."""
    gate = StepGate()
    gate.close()
    gate.shut()
    assert not gate.passes(threading.Event())


def test_before_vllm_takes_the_memory_away_every_copy_ends(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = instance.layer[:2].clone()
    instance.run(StepPlan(stores=(STORE,)))
    assert instance.copier.begun.wait(LONG)
    monkeypatch.setattr(adapter, "_STOP_SECONDS", 0.05)
    assert not instance.worker.stop_copies()  # the copy waits for us
    monkeypatch.setattr(adapter, "_STOP_SECONDS", LONG)
    instance.copier.may_copy.set()
    assert instance.worker.stop_copies()  # though it may wait at the gate
    instance.layer[:] = 0
    assert instance.outcome(1) is Outcome.CANCELLED
    instance.run(StepPlan(stores=(replace(STORE, job_id=3),)))
    assert instance.outcome(3) is Outcome.DONE
    instance.layer[:2] = stored
    instance.run(StepPlan(loads=(replace(LOAD, job_id=4),)))
    assert instance.outcome(4) is Outcome.DONE
    assert not instance.layer[4:6].any()
