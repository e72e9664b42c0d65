"""One vLLM instance without a model: vLLM's real scheduler, our real connector on both sides.

The forward pass is a wait and a write to checked memory (`kv_memory`). Everything else that a step
does is what vLLM does: its scheduler plans, each rank's worker side gets the plan, and what they
report goes back into the scheduler.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from lmcache_connector.plans import (
    AuditJob,
    JobResult,
    LoadJob,
    Outcome,
    PartRun,
    StepPlan,
    StoreJob,
    Tier,
)
from tests.simulation import stdlib
from tests.simulation.at_rest import AtRest, RouterView
from tests.simulation.kernel import Kernel, Process, SimulationFailure
from tests.simulation.kv_memory import next_cell
from tests.simulation.rank import (
    CHUNK_SIZE,
    PEER_PORT,
    Pass,
    Rank,
    Shape,
    Step,
    Weights,
    config_of,
    kv_cache_config,
)
from tests.support.engine_core import merged, sampled, sampling
from tests.support.integrity import check_scheduler_side
from tests.support.vllm_configs import BLOCK_SIZE, make_scheduler

VOCABULARY = 61
# What a call of the connector may take of an engine step.
_MAX_CALL_SECONDS = 0.1
# From a load's deadline to its report: steps under way, and a poll every 5 ms.
_REPORT_SECONDS = 1.0


@dataclass
class Asked:
    """A request, as its client sees it. ``ended`` is set when it has finished or was aborted."""

    request: Request
    asked_at: float
    ended: stdlib.Event
    wants_abort: bool = False


@dataclass
class _Loading:
    job: LoadJob
    planned_at: float
    results: list[JobResult] = field(default_factory=list)


class Instance:
    """Runs in ``process``. ``names`` is called for chunks that jobs move: :meth:`Ledger.name`."""

    def __init__(
        self,
        kernel: Kernel,
        process: Process,
        model: Path,
        shape: Shape,
        redis_url: str,
        names: Callable[..., None],
        weights: Weights,
    ) -> None:
        self.kernel = kernel
        self.process = process
        self.shape = shape
        self.is_up = False
        self.is_down = False
        self.counts = Counter[str]()
        self._model, self._redis_url, self._names = model, redis_url, names
        self._inbox: deque[Asked] = deque()
        self._asked: dict[str, Asked] = {}
        self._changed = stdlib.Event()
        self._stopping = False
        self.num_resets = 0
        self._weights = weights
        self._new_weights: list[int] = []
        self._wants_eviction = False
        self._wants_reset = False
        self._queue: deque[tuple[SchedulerOutput, Step]] = deque()
        self._requests: dict[str, Request] = {}
        self._streams: dict[str, list[int]] = {}
        self._cells: dict[str, list[int]] = {}
        self._loading: dict[int, _Loading] = {}
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        kernel.spawn(process, self._run, "engine")

    # -- for clients, on any process -------------------------------------------------------------

    def ask(
        self,
        request_id: str,
        prompt: Sequence[int],
        max_tokens: int,
        salt: str | None = None,
        hints: dict[str, Any] | None = None,
    ) -> Asked:
        """``hints``: of the request, for the tiers."""
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=sampling(max_tokens, hints or None),
            pooling_params=None,
            block_hasher=self._hasher,
            cache_salt=salt,
        )
        asked = Asked(request, self.kernel.now, stdlib.Event())
        self._inbox.append(asked)
        self._changed.set()
        return asked

    def abort(self, asked: Asked) -> None:
        asked.wants_abort = True
        self._changed.set()

    def stop(self) -> None:
        self._stopping = True
        self._changed.set()

    def evict_all(self) -> None:
        """Soon: forget what memory holds, in the CPU tier and, once no request runs, in vLLM."""
        self._wants_eviction = True
        self.evict_blocks()

    def slow_down(self, factor: float) -> None:
        """From now on computing takes ``factor`` times as long as it did at the start."""
        for rank in self._ranks:
            rank.token_seconds = factor * self.shape.token_seconds

    def evict_blocks(self) -> None:
        """Once no request runs: forget what vLLM holds. The CPU tier keeps it."""
        self._wants_reset = True
        self._changed.set()

    def load_weights(self, version: int) -> None:
        """Once no request has blocks: that version of the weights, or the same again."""
        self._new_weights.append(version)
        self._changed.set()

    def keys_in_memory(self) -> set[bytes]:
        """Chunks in the CPU tiers of all ranks, or, if ranks share chunks, of any rank."""
        held = [rank.keys_in_memory() for rank in self._ranks]
        return set.union(*held) if self.shape.shares else set.intersection(*held)

    @property
    def is_idle(self) -> bool:
        return self.is_up and not self._asked and not self._inbox

    # -- the engine's loop -------------------------------------------------------------------------

    def _run(self) -> None:
        self._start()
        self.is_up = True
        while not self._stopping:
            self._changed.clear()
            self._take_requests()
            self._take_aborts()
            self._evict()
            if self._scheduler.has_requests() or self._queue:
                self._step()
            else:
                self.at_rest.check(self.kernel.clock())
                self._changed.wait()
        self._shut_down()
        self.is_down = True

    def _start(self) -> None:
        shape = self.shape
        self._scheduler = make_scheduler(
            config_of(self._model, shape, self._transfer()), kv_cache_config(shape)
        )
        self._ranks = [
            Rank(
                self.kernel,
                config_of(self._model, shape, self._transfer(), rank),
                shape,
                rank,
                self._weights,
            )
            for rank in range(shape.world_size)
        ]
        for rank in self._ranks if shape.shares else ():
            rank.meet(self._ranks)
        self._aggregator = KVOutputAggregator(shape.world_size)
        view = None
        if shape.kv_events:
            view = self._scheduler.kv_event_publisher = RouterView()
        index = self._scheduler.connector._scheduler_side.index
        self.at_rest = AtRest(self._ranks, index, view, shares=shape.shares)

    def _transfer(self) -> KVTransferConfig:
        return KVTransferConfig(
            kv_connector="LMCacheTieredConnector",
            kv_connector_module_path="lmcache_connector",
            kv_role=self.shape.role,
            kv_connector_extra_config={
                "chunk_size": CHUNK_SIZE,
                "redis_url": self._redis_url,
                "cpu_gib": self.shape.cpu_gib,
                "model_digest": "simulated",
                "host_sharing": False,
                **self._peers(),
                **self.shape.settings,
            },
        )

    def _peers(self) -> dict[str, Any]:
        if not self.shape.peers:
            return {}
        own = f"{self.process.name}:{PEER_PORT}"
        hosts = [peer.partition(":")[0] for peer in self.shape.peers]
        named = {"peers": self.shape.peers, "peer_hosts": hosts, "peer_listen": own}
        return {**named, "peer_insecure": True, "lease_seconds": 5.0}

    def _shut_down(self) -> None:
        for rank in self._ranks:
            self.counts["read from other ranks"] += rank.num_read_from_ranks
            rank.connector.shutdown()
        self._scheduler.connector.shutdown()
        for rank in self._ranks:
            rank.check_memory()

    def _take_requests(self) -> None:
        while self._inbox:
            asked = self._inbox.popleft()
            request = asked.request
            self._asked[request.request_id] = asked
            self._requests[request.request_id] = request
            self._streams[request.request_id] = list(request.prompt_token_ids or ())
            self._cells[request.request_id] = []
            self._scheduler.add_request(request)

    def _take_aborts(self) -> None:
        for request_id, asked in list(self._asked.items()):
            if asked.wants_abort and not asked.request.is_finished():
                self._scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
                self._end(request_id)

    def _evict(self) -> None:
        if self._wants_eviction and not self._queue:
            self._wants_eviction = False
            self.at_rest.evicted_all()
            for rank in self._ranks:
                rank.evict()
        if self._wants_reset and not self._asked:
            self._wants_reset = not self._scheduler.reset_prefix_cache(reset_connector=False)
        if self._new_weights and not self._queue and self._scheduler.reset_prefix_cache():
            self._weights.load(self._new_weights.pop())
            self._scheduler.reset_prefix_cache(reset_connector=True)
            self.num_resets += 1
            self.at_rest.reset()
            for request_id, asked in self._asked.items():  # none of it is computed any more
                self._streams[request_id] = list(asked.request.all_token_ids)
                self._cells[request_id] = []

    def _end(self, request_id: str) -> None:
        self._asked.pop(request_id).ended.set()

    def _step(self) -> None:
        """Schedule a step, if there is anything to do; execute the oldest once ``depth`` are under
        way."""
        if self._scheduler.has_requests():
            started = self.kernel.now
            output = self._scheduler.schedule()
            self._check_call("schedule", started)
            self._queue.append((output, self._describe(output)))
            if len(self._queue) < self.shape.depth and self._scheduler.has_requests():
                return
        self._execute(*self._queue.popleft())

    def _check_call(self, name: str, started: float) -> None:
        took = self.kernel.now - started
        if took > _MAX_CALL_SECONDS + self.process.frozen_seconds:
            raise SimulationFailure(f"{self.process.name}: {name} held the engine for {took:.3f} s")

    # -- a step, as the ranks see it ---------------------------------------------------------------

    def _describe(self, output: SchedulerOutput) -> Step:
        plan: StepPlan = output.kv_connector_metadata.plan or StepPlan()
        manager = self._scheduler.kv_cache_manager
        tables = {r: list(manager.get_block_ids(r)[0]) for r in self._scheduler.requests}
        self._check_plan(plan, tables)
        passes = []
        for request_id, count in output.num_scheduled_tokens.items():
            request = self._scheduler.requests[request_id]
            end = request.num_computed_tokens
            passes.append(Pass(request_id, end - count, end, self._cells_of(request_id, end)))
        if self.kernel.is_traced:
            self._trace_step(plan, passes, tables)
        return Step(passes, tables, output.has_sync_kv_loads)

    def _trace_step(self, plan: StepPlan, passes: list[Pass], tables: dict[str, list[int]]) -> None:
        if passes or plan.loads or plan.stores:
            shown = [f"{p.request_id}[{p.start}:{p.end}]{tables[p.request_id]}" for p in passes]
            self.kernel.trace(f"step: {' '.join(shown)}")
        jobs: tuple[LoadJob | StoreJob, ...] = (*plan.loads, *plan.stores)
        for job in jobs:
            kind = type(job).__name__
            keys = [key.hex()[:6] for key in job.keys]
            self.kernel.trace(
                f"{kind} {job.job_id} of {job.request_id}: {keys} {job.runs[0].block_ids[:1]}"
            )

    def _check_plan(self, plan: StepPlan, tables: dict[str, list[int]]) -> None:
        self.counts["loads inside steps"] += len(plan.loads_in_step())
        for load in plan.loads:
            self._loading[load.job_id] = _Loading(load, self.kernel.now)
            (run,) = load.runs
            first = tables[load.request_id].index(run.block_ids[0][0]) * BLOCK_SIZE // CHUNK_SIZE
            assert run.chunks[0] == first
            self._name_keys(load.request_id, run, load.claim.tenant)
        for store in plan.stores:
            is_audit, tenant = isinstance(store, AuditJob), store.claim.tenant
            for run in store.runs:
                self._name_keys(store.request_id, run, tenant, is_audit=is_audit)

    def _name_keys(
        self,
        request_id: str,
        run: PartRun,
        tenant: bytes,
        *,
        is_audit: bool = False,
    ) -> None:
        request, is_common = self._requests[request_id], not (tenant or self.num_resets)
        for key, index in zip(run.keys, run.chunks, strict=True):
            if run.tail_tokens and index == run.chunks[-1]:  # no whole chunk, and in no other tier
                end = index * CHUNK_SIZE + run.tail_tokens
                self.at_rest.named(key, tenant, ())
                cells = self._cells_of(request_id, end)[index * CHUNK_SIZE :]
                self._names(key, tuple(cells), is_common=False)
                continue
            first, last = (i * CHUNK_SIZE // BLOCK_SIZE for i in (index, index + 1))
            self.at_rest.named(key, tenant, request.block_hashes[first:last])
            if is_audit:  # it finds out whether the key names that chunk
                continue
            cells = self._cells_of(request_id, (index + 1) * CHUNK_SIZE)
            self._names(key, tuple(cells[index * CHUNK_SIZE :]), is_common=is_common)

    def _cells_of(self, request_id: str, end: int) -> list[int]:
        """Tokens that are not sampled yet are known here: a sample is made from its cell."""
        stream, cells = self._streams[request_id], self._cells[request_id]
        while len(cells) < end:
            if len(cells) == len(stream):
                stream.append(cells[-1] % VOCABULARY)
            cells.append(
                next_cell(cells[-1] if cells else self._weights.version, stream[len(cells)])
            )
        return cells[:end]

    def _execute(self, output: SchedulerOutput, step: Step) -> None:
        metadata = output.kv_connector_metadata
        results = []
        for rank in self._ranks:
            result = self._sample(step)
            result.kv_connector_output = rank.run(metadata, step, self._check_call)
            results.append(result)
            self._check_reports(result.kv_connector_output)
        self._take_aborts()
        started = self.kernel.now
        self._scheduler.update_from_output(output, merged(self._aggregator, results))
        self._check_call("update_from_output", started)
        for request_id, asked in list(self._asked.items()):
            if asked.request.is_finished():
                self._check_answer(asked.request)
                self._end(request_id)
        for loading in self._loading.values():
            late = self.kernel.now - loading.planned_at - loading.job.deadline_seconds
            if late > _REPORT_SECONDS + self.process.frozen_seconds:
                raise SimulationFailure(
                    f"{self.process.name}: load {loading.job.job_id} is {late:.3f} s past its "
                    f"deadline of {loading.job.deadline_seconds:.3f} s"
                )

    def _sample(self, step: Step) -> ModelRunnerOutput:
        tokens = {}
        for one in step.passes:
            request = self._scheduler.requests.get(one.request_id)
            is_last = request is not None and one.end >= request.num_tokens
            tokens[one.request_id] = [one.cells[-1] % VOCABULARY] if is_last else []
        return sampled(tokens)

    def _check_reports(self, output: KVConnectorOutput) -> None:
        meta = output.kv_connector_worker_meta
        for report in meta.reports if meta is not None else ():
            for result in report.results:
                self.kernel.trace(f"{result}")
                loading = self._loading.get(result.job_id)
                if loading is None:
                    continue
                loading.results.append(result)
                if len(loading.results) == self.shape.world_size:
                    del self._loading[result.job_id]
                    self._count(loading)

    def _count(self, loading: _Loading) -> None:
        # A load that a deadline cut short is a hit if every rank has loaded some of it.
        has_hit = all(result.num_chunks for result in loading.results)
        from_redis = any(result.fetched_bytes for result in loading.results)
        fetched = [each for result in loading.results for each in result.fetched]
        self.counts.update(
            {
                "hits from redis": has_hit and from_redis,
                "hits from memory": has_hit and not from_redis,
                "hits from peers": any(f.tier is Tier.PEER and f.num_bytes for f in fetched),
                "handed over": has_hit and loading.job.source is not None,
                "failed loads": any(r.outcome is not Outcome.DONE for r in loading.results),
            }
        )

    def _check_answer(self, request: Request) -> None:
        if request.status not in (
            RequestStatus.FINISHED_STOPPED,
            RequestStatus.FINISHED_LENGTH_CAPPED,
        ):
            raise SimulationFailure(f"{request.request_id} ended as {request.status.name}")
        self._cells_of(request.request_id, request.num_tokens)
        if list(request.all_token_ids) != self._streams[request.request_id][: request.num_tokens]:
            raise SimulationFailure(f"WRONG BYTES: {request.request_id} has another answer")

    def is_settled(self) -> bool:
        """Whether the engine has come to rest: a finished request's stores take some steps more."""
        return self.is_idle and not self._scheduler.has_requests() and not self._queue

    def check_whole(self) -> None:
        """Nothing is left of any request: once idle."""
        check_scheduler_side(self._scheduler.connector._scheduler_side)
        pool = self._scheduler.kv_cache_manager.block_pool
        if pool.get_num_free_blocks() != self.shape.num_blocks - 1:
            raise SimulationFailure(f"{self.process.name}: blocks leaked")
        if self._loading:
            raise SimulationFailure(f"{self.process.name}: loads were never reported")
