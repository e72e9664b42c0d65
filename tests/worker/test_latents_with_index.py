"""DeepSeek V3.2: beside the latents of a layer an index, of another width and dtype, in one KV
cache group. vLLM does not run it on CPU; its layers are described with vLLM's own specs, and
registered as vLLM would.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from lmcache_connector.audit.verdicts import NoiseGauge
from lmcache_connector.cost_model.cost_model import CostModel
from lmcache_connector.cost_model.policy import LoadPolicy
from lmcache_connector.plans import (
    JobResult,
    LoadJob,
    Outcome,
    PartRun,
    RankStart,
    StepPlan,
    StoreJob,
)
from lmcache_connector.scheduler.build import learn_layers
from lmcache_connector.storage.geometry import PartGeometries
from lmcache_connector.storage.redis.config import RedisTierConfig
from lmcache_connector.storage.redis.lookup import RedisLookup
from lmcache_connector.storage.redis.tier import RedisTier
from lmcache_connector.vllm_compat.model import ModelDescription, describe_model
from lmcache_connector.worker.adapter import WorkerAdapter, WorkerSettings
from lmcache_connector.worker.lmcache_start import EngineSettings
from tests.support.redis.servers import Server, running_valkey
from tests.support.vllm_configs import BLOCK_SIZE, latents_with_index, vllm_config

NUM_BLOCKS, CHUNK, LONG = 40, 128, 60.0
KEYS = tuple(hashlib.sha256(bytes((i,))).digest() for i in range(2))
PER_CHUNK = CHUNK // BLOCK_SIZE


@pytest.fixture(scope="module")
def valkey() -> Iterator[Server]:
    with running_valkey() as server:
        yield server


def described(model: Path, seen_by: str = "worker") -> ModelDescription:
    return describe_model(vllm_config(model), latents_with_index(seen_by), chunk_size=CHUNK)


def config_of(server: Server) -> RedisTierConfig:
    """Values are small, so that the widths of layers decide how many there are."""
    return RedisTierConfig(url=server.url, read_timeout_seconds=LONG, max_value_bytes=200_000)


class Rank:
    def __init__(self, model: ModelDescription, server: Server) -> None:
        (layout,) = model.parts
        names = [name for group in layout.groups for name in group.names]
        generator = torch.Generator().manual_seed(1)
        self.caches = {}
        for name, width in zip(names, layout.geometries[0].layer_widths, strict=True):
            shape = (NUM_BLOCKS, 1, BLOCK_SIZE, width)
            data = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
            self.caches[name] = data if "index" in name else data.view(torch.bfloat16)
        writes = (layout.ranks[0].write_shards,)
        self.worker = WorkerAdapter(
            WorkerSettings(
                engine=EngineSettings(rank=0, world_size=1, rank_gib=0.02),
                parts=model.parts,
            ),
            self.caches,
            partial(RedisTier, config_of(server), PartGeometries(layout.geometries), writes),
        )
        self.starts: list[RankStart] = []

    def bytes_of(self, blocks: range) -> list[torch.Tensor]:
        return [c[list(blocks)].view(torch.uint8).clone() for c in self.caches.values()]

    def end(self, plan: StepPlan, job_id: int) -> JobResult:
        for _ in range(20_000):
            self.worker.handle_preemptions(plan)
            self.worker.start_forward(plan)
            self.worker.start_loads(plan)
            self.worker.end_forward(plan)
            report = self.worker.finish_step().report
            if report is not None and report.start is not None:
                self.starts.append(report.start)
            for result in report.results if report else ():
                if result.job_id == job_id:
                    return result
            plan = StepPlan(idle=True)
        raise AssertionError("the job does not end")


def run_of(first_block: int) -> PartRun:
    blocks = tuple(range(first_block, first_block + 2 * PER_CHUNK))
    return PartRun(0, KEYS, (0, 1), (blocks,))


def test_latents_and_index_come_back_together(model: Path, valkey: Server) -> None:
    expected = []
    for number in range(2):  # the second instance has what the first wrote to Valkey
        rank = Rank(described(model), valkey)
        if number == 0:
            expected = rank.bytes_of(range(1, 1 + 2 * PER_CHUNK))
            job = StoreJob(1, "r", (run_of(1),), frozenset(KEYS))
            assert rank.end(StepPlan(stores=(job,)), 1).outcome is Outcome.DONE
        for cache in rank.caches.values():
            cache[20:].zero_()
        load = LoadJob(2, "s", (run_of(20),), LONG, number == 1, 0)
        assert rank.end(StepPlan(loads=(load,)), 2).outcome is Outcome.DONE
        found = rank.bytes_of(range(20, 20 + 2 * PER_CHUNK))
        assert all(map(torch.equal, found, expected))
        rank.worker.shutdown()
    check_what_the_scheduler_learns(model, valkey, rank.starts)


def check_what_the_scheduler_learns(model: Path, valkey: Server, starts: list[RankStart]) -> None:
    """Its process sees the narrow index alone: it would ask Redis for other names."""
    (start,) = starts
    seen = described(model, "scheduler")
    assert start.layer_widths == (described(model).parts[0].geometries[0].layer_widths,)
    assert start.layer_widths != (seen.parts[0].geometries[0].layer_widths,)
    lookup = RedisLookup(config_of(valkey), [PartGeometries(seen.parts[0].geometries)])
    policy = LoadPolicy(
        CostModel(clock=time.monotonic, max_deadline_seconds=1.0, mode="auto"),
        CHUNK,
        [1],
        time.monotonic,
    )
    noise = NoiseGauge(seen.parts[0].formats)
    assert lookup.exist(KEYS, time.monotonic() + LONG) == [False, False]
    learn_layers(seen, policy, lookup, noise, starts)
    assert lookup.exist(KEYS, time.monotonic() + LONG) == [True, True]
    assert policy.bytes_of(KEYS[0]) == CHUNK * sum(start.layer_widths[0])
    lookup.close()
