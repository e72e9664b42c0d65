"""One vLLM engine on a GPU, without its model: vLLM's real scheduler, both real sides of the
connector, and forward passes as in `passes`.

The loop is that of vLLM's engine core. With asynchronous scheduling a step is planned and queued on
the device while the one before it runs: the connector's report of a step covers events up to the
step's queueing, and the scheduler gets it when the step has run.

Threads and time are the standard library's, or the simulation's if it loads this module (see
`tests.simulation.loading`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from benchmarks.gpu_storms.passes import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    Device,
    GpuShape,
    Pass,
    Work,
    digests_of,
)
from lmcache_connector.connector import LMCacheTieredConnector
from tests.support.vllm_configs import engine_config, make_scheduler

_SCHEDULE_SECONDS = 300e-6
_SUBMIT_SECONDS = 1500e-6
_IDLE_SECONDS = 1e-3  # the engine core's sleep after a step without a forward pass
_STOP_SECONDS = 30.0


@dataclass(eq=False)
class Asked:
    """A request as its client sees it; ``first_token_at`` is set before ``ended``. ``is_computed``:
    the pass that completes its prompt was launched."""

    request: Request
    asked_at: float
    digests: Sequence[int]
    ended: threading.Event = field(default_factory=threading.Event)
    first_token_at: float = 0.0
    is_computed: bool = False

    @property
    def ttft(self) -> float:
        """Seconds."""
        return self.first_token_at - self.asked_at


@dataclass(frozen=True, slots=True)
class _Queued:
    """A step on the device; its output exists once its pass, if any, has ended."""

    scheduled: SchedulerOutput
    output: ModelRunnerOutput
    launched: Pass | None


class GpuEngine:
    """Runs on its own thread. ``model``: the folder of ``shape.model``."""

    def __init__(self, model: Path, shape: GpuShape, device: Device) -> None:
        self.shape = shape
        self.device = device
        self.is_up = threading.Event()
        self.num_loads = 0  # planned
        self._model = model
        self._inbox: deque[Asked] = deque()
        self._asked: dict[str, Asked] = {}
        self._changed = threading.Event()
        self._queue: deque[_Queued] = deque()
        self._is_stopping = False
        self._hasher = None
        if shape.prefix_caching:
            init_none_hash(sha256)
            self._hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def ask(self, request_id: str, prompt: Sequence[int], max_tokens: int = 1) -> Asked:
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            pooling_params=None,
            block_hasher=self._hasher,
        )
        asked = Asked(request, time.monotonic(), digests_of(prompt))
        self._inbox.append(asked)
        self._changed.set()
        return asked

    def stop(self) -> None:
        """Abandon requests, and free all memory and threads."""
        self._is_stopping = True
        self._changed.set()
        self._thread.join(_STOP_SECONDS)
        if self._thread.is_alive():
            raise RuntimeError("the engine does not stop")

    # -- the engine core's loop --------------------------------------------------------------------

    def _run(self) -> None:
        self._start()
        self.is_up.set()
        while not self._is_stopping:
            self._changed.clear()
            while self._inbox:
                asked = self._inbox.popleft()
                self._asked[asked.request.request_id] = asked
                self._scheduler.add_request(asked.request)
            if self._scheduler.has_requests() or self._queue:
                if not self._step() and self._scheduler.has_requests():
                    time.sleep(_IDLE_SECONDS)
            elif not self._is_stopping:
                self._changed.wait()
        for queued in self._queue:
            if queued.launched is not None:
                queued.launched.wait()
        self._worker.shutdown()
        self._scheduler.shutdown()
        for asked in (*self._asked.values(), *self._inbox):
            asked.ended.set()

    def _step(self) -> bool:
        """As vLLM's `step_with_batch_queue`, or its `step` at a depth of one. Returns whether a
        pass was queued."""
        executed: bool = False
        if self._scheduler.has_requests():
            time.sleep(_SCHEDULE_SECONDS)
            scheduled = self._scheduler.schedule()
            executed = bool(scheduled.total_num_scheduled_tokens)
            self._queue.append(self._submit(scheduled))
            if len(self._queue) < self.shape.depth and (executed or self._scheduler.has_requests()):
                return executed
        oldest = self._queue.popleft()
        if oldest.launched is not None:
            oldest.launched.wait()
        self._scheduler.update_from_output(oldest.scheduled, oldest.output)
        self._answer(oldest.output)
        return executed

    def _answer(self, output: ModelRunnerOutput) -> None:
        for request_id, tokens in zip(output.req_ids, output.sampled_token_ids, strict=True):
            asked = self._asked.get(request_id)
            if asked is None:
                continue
            if tokens and not asked.first_token_at:
                asked.first_token_at = time.monotonic()
            if asked.request.is_finished():
                if asked.request.status is not RequestStatus.FINISHED_LENGTH_CAPPED:
                    raise RuntimeError(f"{request_id} ended as {asked.request.status.name}")
                self._asked.pop(request_id).ended.set()

    # -- the worker --------------------------------------------------------------------------------

    def _submit(self, scheduled: SchedulerOutput) -> _Queued:
        """As the model runner: queue the forward pass, with the connector's calls around it."""
        connector, metadata = self._worker, scheduled.kv_connector_metadata
        if metadata.plan is not None:
            self.num_loads += len(metadata.plan.loads)
        connector.handle_preemptions(metadata)
        launched = None
        if scheduled.total_num_scheduled_tokens:
            time.sleep(_SUBMIT_SECONDS / 2)
        connector.bind_connector_metadata(metadata)
        if scheduled.has_sync_kv_loads:
            connector.start_load_kv(None)
        if scheduled.total_num_scheduled_tokens:
            launched = self._launch(scheduled)
            time.sleep(_SUBMIT_SECONDS / 2)
        if not scheduled.has_sync_kv_loads:
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
        connector.clear_connector_metadata()
        return _Queued(scheduled, output, launched)

    def _launch(self, scheduled: SchedulerOutput) -> Pass:
        manager, blocks, spans = self._scheduler.kv_cache_manager, set[int](), []
        works = []
        for request_id, count in scheduled.num_scheduled_tokens.items():
            asked, end = (
                self._asked[request_id],
                self._scheduler.requests[request_id].num_computed_tokens,
            )
            table = list(manager.get_block_ids(request_id)[0])
            blocks.update(table)
            spans.append((end - count, end))
            if not asked.is_computed:
                works.append(Work(request_id, table, asked.digests, end - count, end))
                asked.is_computed = end >= asked.request.num_prompt_tokens
        return self.device.launch(self.shape.speed.pass_seconds(spans), blocks, works)

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

    # -- the start ---------------------------------------------------------------------------------

    def _start(self) -> None:
        config = _vllm_config(self._model, self.shape)
        kv_cache = _kv_cache_config(self.shape)
        self._scheduler = make_scheduler(config, kv_cache)
        self._worker = LMCacheTieredConnector(config, KVConnectorRole.WORKER, kv_cache)
        self._worker.register_kv_caches(self.device.kv_caches)
        found = self._worker.get_handshake_metadata()
        if found is not None:
            self._scheduler.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): found})


def _vllm_config(model: Path, shape: GpuShape) -> VllmConfig:
    return engine_config(
        model,
        depth=shape.depth,
        max_batched_tokens=shape.max_batched_tokens,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=64,
        prefix_caching=shape.prefix_caching,
        kv_transfer_config=KVTransferConfig(
            kv_connector="LMCacheTieredConnector",
            kv_connector_module_path="lmcache_connector",
            kv_role=shape.role,
            kv_connector_extra_config={
                "cpu_gib": shape.cpu_gib,
                "model_digest": "simulated",
                "host_sharing": False,
                "store_generated": False,
                "audit_share": 0.0,
                **shape.settings,
            },
        ),
    )


def _kv_cache_config(shape: GpuShape) -> KVCacheConfig:
    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE,
        num_kv_heads=shape.model.num_kv_heads,
        head_size=shape.model.head_dim,
        dtype=torch.bfloat16,
    )
    return KVCacheConfig(
        num_blocks=shape.num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(shape.layer_names, spec)],
    )
