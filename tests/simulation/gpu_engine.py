"""One vLLM engine on a simulated GPU: vLLM's real scheduler, our real connector on both sides.

The loop is that of vLLM's engine core. With asynchronous scheduling a step is planned, and queued
on the device, while the one before it runs: what the connector reports with a step is what had
ended when that step was queued, and the scheduler hears of it when the step has run.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.config import (
    CacheConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from lmcache_connector.connector import LMCacheTieredConnector
from lmcache_connector.worker import adapter as worker_adapter
from lmcache_connector.worker.self_test import SelfTestResult
from tests.simulation import lmcache_model, stdlib
from tests.simulation.device import AddressPool, Device, DeviceCopier, DeviceSpeed
from tests.simulation.kernel import Kernel, SimulationFailure
from tests.support.engines.tiny_model import ModelShape

BLOCK_SIZE = 16
MAX_MODEL_LEN = 32768
# 128 KiB of KV per token, as an 8B model has; four wide layers take less Python than 32.
MODEL = ModelShape(
    num_layers=4,
    hidden_size=64,
    intermediate_size=64,
    num_heads=8,
    num_kv_heads=8,
    head_dim=1024,
    vocab_size=64,
    max_position=MAX_MODEL_LEN,
)
_MAP_NORESERVE = 0x4000  # of Linux; Python has it since 3.13
_SCHEDULE_SECONDS = 300e-6
_SUBMIT_SECONDS = 1500e-6
_IDLE_SECONDS = 1e-3  # the engine core's nap after a step without a forward pass


@dataclass(frozen=True, slots=True)
class GpuShape:
    """``depth``: batches under way at once, 2 with asynchronous scheduling. ``settings``:
    ``kv_connector_extra_config``."""

    speed: DeviceSpeed = field(default_factory=DeviceSpeed)
    depth: int = 2
    num_blocks: int = 6000
    max_batched_tokens: int = 8192
    role: str = "kv_both"
    settings: dict[str, Any] = field(default_factory=dict, hash=False)


@dataclass(eq=False)
class Asked:
    """A request as its client sees it; ``first_token_at`` is set before ``answered``."""

    request: Request
    asked_at: float
    answered: stdlib.Event = field(default_factory=stdlib.Event)
    ended: stdlib.Event = field(default_factory=stdlib.Event)
    first_token_at: float = 0.0
    digests: list[int] = field(default_factory=list)
    checked: bool = False

    @property
    def ttft(self) -> float:
        """Seconds."""
        return self.first_token_at - self.asked_at


@dataclass(frozen=True, slots=True)
class _Queued:
    """A step on the device; its output is there at ``ends_at``."""

    scheduled: SchedulerOutput
    output: ModelRunnerOutput
    ends_at: float


class GpuEngine:
    """Runs as a task of its own. ``model``: a folder, see :data:`MODEL`."""

    def __init__(self, kernel: Kernel, model: Path, shape: GpuShape) -> None:
        self.kernel = kernel
        self.shape = shape
        self.device = Device(kernel, shape.speed)
        self.is_up = False
        self.loads: list[Any] = []  # results of load jobs
        self._process = kernel.new_process("gpu")
        self._model = model
        self._inbox: deque[Asked] = deque()
        self._asked: dict[str, Asked] = {}
        self._changed = stdlib.Event()
        self._queue: deque[_Queued] = deque()
        kernel.spawn(self._process, self._run, "engine")

    def ask(self, request_id: str, prompt: Sequence[int], max_tokens: int = 1) -> Asked:
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            pooling_params=None,
        )
        asked = Asked(request, self.kernel.now, digests=_digests(prompt))
        self._inbox.append(asked)
        self._changed.set()
        return asked

    # -- the engine core's loop --------------------------------------------------------------------

    def _run(self) -> None:
        self._start()
        self.is_up = True
        while True:
            self._changed.clear()
            while self._inbox:
                asked = self._inbox.popleft()
                self._asked[asked.request.request_id] = asked
                self._scheduler.add_request(asked.request)
            if not (self._scheduler.has_requests() or self._queue):
                self._changed.wait()
            elif not self._step() and self._scheduler.has_requests():
                self.kernel.sleep(_IDLE_SECONDS)

    def _step(self) -> bool:
        """`step_with_batch_queue`, and with a depth of one `step`. Whether a pass was queued."""
        executed: bool = False
        if self._scheduler.has_requests():
            self.kernel.sleep(_SCHEDULE_SECONDS)
            scheduled = self._scheduler.schedule()
            executed = bool(scheduled.total_num_scheduled_tokens)
            self._queue.append(self._submit(scheduled))
            if len(self._queue) < self.shape.depth and (executed or self._scheduler.has_requests()):
                return executed
        oldest = self._queue.popleft()
        if self.kernel.now < oldest.ends_at:
            self.kernel.sleep(oldest.ends_at - self.kernel.now + self.device.late())
        self._scheduler.update_from_output(oldest.scheduled, oldest.output)
        self._answer(oldest.output)
        return executed

    def _answer(self, output: ModelRunnerOutput) -> None:
        for request_id, tokens in zip(output.req_ids, output.sampled_token_ids, strict=True):
            asked = self._asked.get(request_id)
            if asked is None:
                continue
            if tokens and not asked.first_token_at:
                asked.first_token_at = self.kernel.now
                asked.answered.set()
            if asked.request.is_finished():
                if asked.request.status is not RequestStatus.FINISHED_LENGTH_CAPPED:
                    raise SimulationFailure(f"{request_id} ended as {asked.request.status.name}")
                self._asked.pop(request_id).ended.set()

    # -- the worker --------------------------------------------------------------------------------

    def _submit(self, scheduled: SchedulerOutput) -> _Queued:
        """What the model runner does: it queues the forward pass, and calls the connector around
        that."""
        kernel, connector, metadata = self.kernel, self._worker, scheduled.kv_connector_metadata
        connector.handle_preemptions(metadata)
        ends_at = kernel.now
        if scheduled.total_num_scheduled_tokens:
            kernel.sleep(_SUBMIT_SECONDS / 2)
        connector.bind_connector_metadata(metadata)
        if scheduled.total_num_scheduled_tokens:
            ends_at = self._launch(scheduled)
            kernel.sleep(_SUBMIT_SECONDS / 2)
        connector.start_load_kv(None)
        connector.wait_for_save()
        results = connector.get_transfer_results(set())
        output = self._sample(scheduled)
        output.kv_connector_output = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
        )
        self._remember(output.kv_connector_output)
        connector.clear_connector_metadata()
        return _Queued(scheduled, output, ends_at)

    def _launch(self, scheduled: SchedulerOutput) -> float:
        manager, blocks, spans = self._scheduler.kv_cache_manager, set[int](), []
        works = []
        for request_id, count in scheduled.num_scheduled_tokens.items():
            end = self._scheduler.requests[request_id].num_computed_tokens
            table = list(manager.get_block_ids(request_id)[0])
            blocks.update(table)
            spans.append((end - count, end))
            if not self._asked[request_id].checked:
                works.append((self._asked[request_id], table, end - count, end))
        seconds = self.shape.speed.pass_seconds(spans)
        ends_at = self.device.launch(seconds, frozenset(blocks))
        for work in works:
            self.kernel.at(ends_at - seconds / 2, partial(self._check, *work))
            self.kernel.at(ends_at, partial(self._write, *work))
        return ends_at

    def _check(self, asked: Asked, table: list[int], start: int, end: int) -> None:
        """A request's first pass after a load finds right KV before its own tokens."""
        held = [self.device.blocks.get(block) for block in table[: start // BLOCK_SIZE]]
        if held != asked.digests[: start // BLOCK_SIZE]:
            self.kernel.fail(f"WRONG BYTES: {asked.request.request_id} computes on wrong KV")

    def _write(self, asked: Asked, table: list[int], start: int, end: int) -> None:
        for i in range(start // BLOCK_SIZE, min(end // BLOCK_SIZE, len(asked.digests))):
            self.device.blocks[table[i]] = asked.digests[i]
        asked.checked = end >= asked.request.num_prompt_tokens

    def _sample(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        ids = list(scheduled.num_scheduled_tokens)
        tokens = []
        for request_id in ids:
            request = self._scheduler.requests[request_id]
            tokens.append([2] if request.num_computed_tokens >= request.num_tokens else [])
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
            sampled_token_ids=tokens,
        )

    def _remember(self, output: KVConnectorOutput) -> None:
        meta: Any = output.kv_connector_worker_meta
        for report in meta.reports if meta is not None else ():
            self.loads += [r for r in report.results if r.job_id in self._load_ids()]

    def _load_ids(self) -> set[int]:
        jobs = self._scheduler.connector._scheduler_side._jobs._jobs
        return {i for i, planned in jobs.items() if hasattr(planned.job, "deadline_seconds")}

    # -- the start ---------------------------------------------------------------------------------

    def _start(self) -> None:
        config = _vllm_config(self._model, self.shape)
        kv_cache = _kv_cache_config(self.shape)
        kind = AsyncScheduler if self.shape.depth > 1 else Scheduler
        self._scheduler = kind(
            config, kv_cache, StructuredOutputManager(config), block_size=BLOCK_SIZE
        )
        _replace_parts(DeviceCopier(self.device), self.shape.speed)
        self._worker = LMCacheTieredConnector(config, KVConnectorRole.WORKER, kv_cache)
        self._worker.register_kv_caches(_kv_caches(self.shape))
        found = self._worker.get_handshake_metadata()
        if found is not None:
            self._scheduler.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): found})


def _replace_parts(copier: DeviceCopier, speed: DeviceSpeed) -> None:
    """Of what runs in `setup`: memory has no bytes here, and copies take the bus' time."""
    vars(lmcache_model)["Pool"] = AddressPool
    worker = vars(worker_adapter)
    worker["make_copier"] = lambda device: copier

    def self_test(engine: Any, parts: Sequence[Any], clock: Any) -> SelfTestResult:
        num_bytes = parts[0].geometry.chunk_bytes
        seconds = speed.copy_seconds + num_bytes / speed.bus_bytes_per_second
        return SelfTestResult(num_bytes, seconds, seconds)

    worker["run_self_test"] = self_test


def _digests(prompt: Sequence[int]) -> list[int]:
    """What each full block of a prompt holds."""
    digests, last = [], 0
    for end in range(BLOCK_SIZE, len(prompt) + 1, BLOCK_SIZE):
        last = hash((last, *prompt[end - BLOCK_SIZE : end]))
        digests.append(last)
    return digests


def _kv_caches(shape: GpuShape) -> dict[str, torch.Tensor]:
    """Address space that is never touched."""
    size = (shape.num_blocks, MODEL.num_kv_heads, BLOCK_SIZE, 2 * MODEL.head_dim)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    caches = {}
    for layer in range(MODEL.num_layers):
        memory = np.frombuffer(mmap.mmap(-1, 2 * int(np.prod(size)), flags=flags), np.int16)
        tensor = torch.from_numpy(memory).view(torch.bfloat16).view(size)
        caches[f"model.layers.{layer}.self_attn.attn"] = tensor
    return caches


def _vllm_config(model: Path, shape: GpuShape) -> VllmConfig:
    cache = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=False)
    cache.num_gpu_blocks = shape.num_blocks
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(model), tokenizer=str(model), max_model_len=MAX_MODEL_LEN, seed=0
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=64,
            max_num_batched_tokens=shape.max_batched_tokens,
            max_model_len=MAX_MODEL_LEN,
            is_encoder_decoder=False,
            async_scheduling=False,
            scheduler_reserve_full_isl=False,
        ),
        cache_config=cache,
        kv_transfer_config=KVTransferConfig(
            kv_connector="LMCacheTieredConnector",
            kv_connector_module_path="lmcache_connector",
            kv_role=shape.role,
            kv_connector_extra_config={
                "cpu_gib": 16,
                "model_digest": "simulated",
                "shutdown_seconds": 1.0,
                "store_generated": False,
                "audit_share": 0.0,
                **shape.settings,
            },
        ),
    )
    # The CPU platform switches this off; what it means to the scheduler is the same everywhere.
    config.scheduler_config.async_scheduling = shape.depth > 1
    return config


def _kv_cache_config(shape: GpuShape) -> KVCacheConfig:
    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE,
        num_kv_heads=MODEL.num_kv_heads,
        head_size=MODEL.head_dim,
        dtype=torch.bfloat16,
    )
    layers = [f"model.layers.{i}.self_attn.attn" for i in range(MODEL.num_layers)]
    return KVCacheConfig(
        num_blocks=shape.num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(layers, spec)],
    )
