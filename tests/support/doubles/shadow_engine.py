"""vLLM's real scheduler and our real scheduler side, over :class:`ShadowRank` workers.

Steps are executed in the order they were scheduled, up to ``depth`` steps later, as the engine core
does with asynchronous scheduling.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from lmcache_connector.connector import LMCacheTieredConnector
from lmcache_connector.connector_base import PlanMetadata, ReportMetadata
from lmcache_connector.plans import AuditJob, LoadJob, StepPlan, StoreJob
from lmcache_connector.scheduler.adapter import SchedulerAdapter
from lmcache_connector.scheduler.background_lookup import (
    PENDING,
    BackgroundLookup,
    Found,
    LookupAnswer,
)
from lmcache_connector.scheduler.hit_finder import RedisHitFinder
from lmcache_connector.scheduler.wanted_chunks import WantedChunks
from tests.support.doubles.shadow_worker import (
    BLOCK_SIZE,
    VOCABULARY,
    Cells,
    Faults,
    KeyBook,
    Pass,
    ShadowRank,
    Step,
    StepReport,
    WrongKV,
    cells_of,
)

MAX_MODEL_LEN = 512
STOP_TOKEN = 7


@dataclass(frozen=True, slots=True)
class Shape:
    """Of one shadow engine. ``depth``: steps scheduled ahead of the one being waited for."""

    world_size: int = 1
    depth: int = 1
    chunk_size: int = 2 * BLOCK_SIZE
    num_blocks: int = 24
    prefix_caching: bool = True
    max_batched_tokens: int = 64
    tier_chunks: int = 12
    redis: bool = False
    role: str = "kv_both"
    admission: str = "all"
    audit_share: float = 0.0


class SteppedLookup(BackgroundLookup):
    """Redis look-ups that are answered after a random number of questions."""

    def __init__(self, ranks: Sequence[ShadowRank], chance: random.Random) -> None:
        # Not the real one's: it starts a thread.
        self.last_seconds = 0.0
        self._ranks = ranks
        self._chance = chance

    def exists_prefix(self, keys: Sequence[bytes], deadline: float) -> int:
        found = 0
        while found < len(keys) and all(keys[found] in rank.remote for rank in self._ranks):
            found += 1
        return found

    def submit(self, keys: Sequence[bytes]) -> SteppedAnswer:  # type: ignore[override]
        return SteppedAnswer(self.exists_prefix(keys, 0.0), self._chance.choice([0, 0, 1, 3]))

    def close(self) -> None:
        """Nothing is held."""


class SteppedAnswer:
    """Comes when it was waited for ``delay`` times."""

    def __init__(self, found: int, delay: int) -> None:
        self._found = Found(found)
        self._delay = delay

    @property
    def answer(self) -> LookupAnswer:
        return PENDING if self._delay > 0 else self._found

    def wait(self, seconds: float) -> LookupAnswer:
        self._delay -= 1
        return PENDING if self._delay >= 0 else self._found

    def cancel(self) -> None:
        """Nothing runs."""


class ShadowEngine:
    def __init__(self, model: Path, shape: Shape, seed: int, faults: Faults | None = None) -> None:
        self.shape = shape
        self.chance = random.Random(seed)
        self.version = 0
        self.book = KeyBook()
        self.scheduler = _build_scheduler(model, shape)
        connector = self.scheduler.connector
        assert isinstance(connector, LMCacheTieredConnector)
        self.adapter: SchedulerAdapter = connector._scheduler_side
        self.ranks = [
            ShadowRank(
                rank=rank,
                num_blocks=shape.num_blocks,
                chunk_size=shape.chunk_size,
                capacity=shape.tier_chunks,
                chance=self.chance,
                faults=faults or Faults(),
                book=self.book,
                remote={},
            )
            for rank in range(shape.world_size)
        ]
        if shape.redis:
            self.adapter.hits = _finding_in_redis(
                self.adapter, SteppedLookup(self.ranks, self.chance)
            )
        if shape.redis and shape.role != "kv_consumer":
            self.adapter.wanted = WantedChunks(self.adapter.index, lambda: 0.0)
        self._aggregator = KVOutputAggregator(shape.world_size)
        self._hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        self._queue: deque[tuple[SchedulerOutput, Step]] = deque()
        self._streams: dict[str, list[int]] = {}
        self._salts: dict[str, str | None] = {}
        self.requests: dict[str, Request] = {}
        self.plans: list[StepPlan] = []
        self.num_preemptions = 0
        self.num_resets = 0

    # -- what a client does ----------------------------------------------------------------------

    def add(
        self, prompt: Sequence[int], max_tokens: int, salt: str | None = None, **more: Any
    ) -> str:
        request_id = f"r{len(self.requests)}"
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(
                max_tokens=max_tokens, stop_token_ids=[STOP_TOKEN], ignore_eos=True
            ),
            pooling_params=None,
            cache_salt=salt,
            block_hasher=self._hasher if self.shape.prefix_caching else None,
            **more,
        )
        self.requests[request_id] = request
        self._salts[request_id] = salt
        self.scheduler.add_request(request)
        return request_id

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    @property
    def live(self) -> list[str]:
        return [r for r, request in self.requests.items() if not request.is_finished()]

    def is_loading(self, request_id: str) -> bool:
        return self.requests[request_id].status is RequestStatus.WAITING_FOR_REMOTE_KVS

    def share_redis_of(self, other: ShadowEngine) -> None:
        for mine, theirs in zip(self.ranks, other.ranks, strict=True):
            mine.remote = theirs.remote

    def reset(self, preempt: bool = False, new_weights: bool = True) -> bool:
        """New weights, if wanted, and if vLLM says that no old KV is left."""
        try:
            clean = self.scheduler.reset_prefix_cache(
                reset_running_requests=preempt, reset_connector=True
            )
        except RuntimeError:  # vLLM's answer while any block is held, by a load or a store
            assert preempt
            return False
        if clean:
            self.version += new_weights
            self.num_resets += 1
        return bool(clean)

    # -- steps -------------------------------------------------------------------------------------

    def step(self) -> None:
        """Schedule one step; execute and process the oldest once ``depth`` are under way."""
        output = self.scheduler.schedule()
        self._queue.append((output, self._describe(output)))
        if len(self._queue) >= self.shape.depth:
            self._execute(*self._queue.popleft())

    def run_until_idle(self, max_steps: int = 2000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_requests():
                break
            self.step()
        else:
            raise AssertionError(f"stuck: {self.live}")
        while self._queue:
            self._execute(*self._queue.popleft())

    def check_whole(self) -> None:
        """Nothing is left of any request."""
        self.adapter.check_integrity()
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == self.shape.num_blocks - 1, "blocks leaked"
        assert all(rank.num_open == 0 for rank in self.ranks)

    def check_answer(self, request_id: str) -> None:
        """The request finished with the tokens the shadow model says."""
        request = self.requests[request_id]
        assert request.status in (
            RequestStatus.FINISHED_STOPPED,
            RequestStatus.FINISHED_LENGTH_CAPPED,
        )
        tokens = list(request.prompt_token_ids or ())
        while len(tokens) < request.num_tokens:
            tokens.append(_next_token(tokens))
        assert list(request.all_token_ids) == tokens

    # -- the worker's view -------------------------------------------------------------------------

    def _describe(self, output: SchedulerOutput) -> Step:
        metadata = output.kv_connector_metadata
        assert isinstance(metadata, PlanMetadata)
        self.plans.append(metadata.plan)
        self.num_preemptions += len(output.preempted_req_ids or ())
        restarted = {new.req_id for new in output.scheduled_new_reqs}
        restarted |= set(output.scheduled_cached_reqs.resumed_req_ids)
        for request_id in restarted:
            self._streams[request_id] = list(self.requests[request_id].all_token_ids)
        manager = self.scheduler.kv_cache_manager
        tables = {rid: tuple(manager.get_block_ids(rid)[0]) for rid in self.scheduler.requests}
        self._name_keys(metadata.plan, tables)
        passes = []
        for request_id, count in output.num_scheduled_tokens.items():
            end = self.requests[request_id].num_computed_tokens
            passes.append(self._pass(request_id, end - count, end))
        return Step(metadata.plan, tuple(passes), tables)

    def _pass(self, request_id: str, start: int, end: int) -> Pass:
        """Tokens not sampled yet are known here: the shadow model is a function of the prompt."""
        stream = self._streams[request_id]
        while len(stream) < end:
            stream.append(_next_token(stream))
        return Pass(request_id, start, end, self._cells(request_id, stream[:end]))

    def _cells(self, request_id: str, tokens: Sequence[int]) -> Cells:
        return cells_of(tokens, self._salts[request_id], self.version)

    def _name_keys(self, plan: StepPlan, tables: dict[str, tuple[int, ...]]) -> None:
        """Say what each key of a plan must hold, from the request's own tokens."""
        size = self.shape.chunk_size
        jobs: tuple[StoreJob | LoadJob, ...] = (*plan.stores, *plan.loads)
        for job in jobs:
            if isinstance(job, AuditJob):
                continue  # it may name what other weights have computed
            if isinstance(job, LoadJob):
                start = tables[job.request_id].index(job.block_ids[0][0]) * BLOCK_SIZE
                first = start // size
                assert job.skip_blocks == start % size // BLOCK_SIZE
                indices: Sequence[int] = range(first, first + len(job.keys))
            else:
                indices = job.chunk_indices
            tokens = list(self.requests[job.request_id].all_token_ids)
            cells = self._cells(job.request_id, tokens)
            for key, i in zip(job.keys, indices, strict=True):
                if len(cells) < (i + 1) * size:
                    raise WrongKV("a chunk of tokens that are not known yet")
                self.book.check(key, cells[i * size : (i + 1) * size])

    # -- execution ---------------------------------------------------------------------------------

    def _execute(self, output: SchedulerOutput, step: Step) -> None:
        outputs: list[ModelRunnerOutput | None] = []
        for rank in self.ranks:
            result = self._sample(step)
            result.kv_connector_output = _connector_output(rank.run(step))
            outputs.append(result)
        merged = outputs[0] if len(outputs) == 1 else self._aggregator.aggregate(outputs)
        assert merged is not None
        if merged.kv_connector_output is not None and merged.kv_connector_output.is_empty():
            merged.kv_connector_output = None
        self.scheduler.update_from_output(output, merged)

    def _sample(self, step: Step) -> ModelRunnerOutput:
        ids = [one.request_id for one in step.passes]
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
            sampled_token_ids=[self._sample_one(one) for one in step.passes],
        )

    def _sample_one(self, one: Pass) -> list[int]:
        """A token if the pass reached the end of what the request had."""
        # Steps run in order, so whatever was sampled before this pass has been processed.
        if one.end < self.requests[one.request_id].num_tokens:
            return []
        return [_next_token(self._streams[one.request_id][: one.end])]


def _finding_in_redis(adapter: SchedulerAdapter, lookup: BackgroundLookup) -> RedisHitFinder:
    return RedisHitFinder(
        adapter._settings,
        adapter.index,
        adapter.tally,
        lookup,
        adapter.policy,
        adapter.kv_events,
        time.monotonic,
    )


def _next_token(tokens: Sequence[int]) -> int:
    return cells_of(tokens, None, 0)[-1] % VOCABULARY


def _connector_output(report: StepReport) -> KVConnectorOutput:
    return KVConnectorOutput(
        finished_recving=set(report.finished_recving) or None,
        kv_connector_worker_meta=ReportMetadata((report.report,)) if report.report else None,
    )


def _build_scheduler(model: Path, shape: Shape) -> Scheduler:
    init_none_hash(sha256)
    cache = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=shape.prefix_caching)
    cache.num_gpu_blocks = shape.num_blocks
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(model), tokenizer=str(model), max_model_len=MAX_MODEL_LEN, seed=0
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=6,
            max_num_batched_tokens=shape.max_batched_tokens,
            max_model_len=MAX_MODEL_LEN,
            is_encoder_decoder=False,
            async_scheduling=False,
            scheduler_reserve_full_isl=False,
        ),
        cache_config=cache,
        parallel_config=ParallelConfig(
            tensor_parallel_size=shape.world_size,
            distributed_executor_backend="mp" if shape.world_size > 1 else None,
        ),
        kv_transfer_config=KVTransferConfig(
            kv_connector="LMCacheTieredConnector",
            kv_connector_module_path="lmcache_connector",
            kv_role=shape.role,
            kv_connector_extra_config={
                "chunk_size": shape.chunk_size,
                "compute_or_load": "always",
                "redis_admission": shape.admission,
                "audit_share": shape.audit_share,
            },
        ),
    )
    # The CPU platform switches this off; what it means to the scheduler is the same everywhere.
    config.scheduler_config.async_scheduling = shape.depth > 1
    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE,
        num_kv_heads=2 // shape.world_size,
        head_size=32,
        dtype=torch.bfloat16,
    )
    layers = [f"model.layers.{i}.self_attn.attn" for i in range(2)]
    kv_cache = KVCacheConfig(
        num_blocks=shape.num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(layers, spec)],
    )
    scheduler = AsyncScheduler if shape.depth > 1 else Scheduler
    return scheduler(config, kv_cache, StructuredOutputManager(config), block_size=BLOCK_SIZE)
