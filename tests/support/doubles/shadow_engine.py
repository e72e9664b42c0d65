"""vLLM's real scheduler and our real scheduler side, over :class:`ShadowRank` workers.

Steps are executed in the order they were scheduled, up to ``depth`` steps later, as the engine core
does with asynchronous scheduling.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiConnector,
    MultiKVConnectorMetadata,
    MultiKVConnectorWorkerMetadata,
)
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request, RequestStatus

from lmcache_connector.change_count import ChangeCount
from lmcache_connector.connector import LMCacheTieredConnector, PlanMetadata
from lmcache_connector.kv_parts.part import BlockIds, Part, Rule
from lmcache_connector.plans import (
    AuditJob,
    Fetched,
    LoadJob,
    PartRun,
    RankReport,
    RankStart,
    StepPlan,
    StoreJob,
    Tier,
    WeightsInMemory,
)
from lmcache_connector.scheduler.scheduler import Scheduler
from tests.support.doubles.foreign_connector import ForeignConnector, ForeignMetadata, Offer
from tests.support.doubles.shadow_config import Shape, build_scheduler
from tests.support.doubles.shadow_memory import (
    BLOCK_SIZE,
    VOCABULARY,
    Cells,
    ForeignWork,
    Image,
    Source,
    WrongKV,
    cells_of,
    cells_of_part,
)
from tests.support.doubles.shadow_parts import (
    ShadowEncoders,
    ShadowIdentifier,
    SteppedLookup,
    finding_in_redis,
)
from tests.support.doubles.shadow_worker import Faults, KeyBook, Pass, ShadowRank, Step
from tests.support.engine_core import merged, sampled, sampling
from tests.support.integrity import check_scheduler_side

__all__ = ["ShadowEngine", "Shape"]


class TextRequest(Request):
    """Its images count for its identity, but vLLM's scheduler does not have them encoded."""

    @property
    def has_encoder_inputs(self) -> bool:
        return False


class ShadowEngine:
    """``adapters``: the content that vLLM has, by name. ``started``: all ranks have reported their
    start, as they do with the first step. ``reads_requests``: the product names adapters and images
    itself, instead of being told the truth."""

    def __init__(
        self,
        model: Path,
        shape: Shape,
        seed: int,
        faults: Faults | None = None,
        *,
        started: bool = True,
        reads_requests: bool = False,
    ) -> None:
        self.shape = shape
        self.chance = random.Random(seed)
        self.version = 0
        self.book = KeyBook()
        self._sources: dict[str, Source] = {}
        self.adapters = {"lora-a": 0, "lora-b": 0}
        self.scheduler = build_scheduler(model, shape)
        connectors = [self.scheduler.connector]
        if isinstance(connectors[0], MultiConnector):
            connectors = connectors[0].sub_connectors
        (ours,) = [c for c in connectors if isinstance(c, LMCacheTieredConnector)]
        self.foreign = next((c for c in connectors if isinstance(c, ForeignConnector)), None)
        self.connector = ours
        self.adapter: Scheduler = ours._scheduler_side
        self.parts = self.adapter.settings.parts
        if not reads_requests:
            vars(self.adapter.book).update(
                identifier=ShadowIdentifier(self._sources.__getitem__),
                _encoders=ShadowEncoders(),
            )
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
                parts=self.parts,
                changes=ChangeCount() if shape.in_step else None,
            )
            for rank in range(shape.world_size)
        ]
        if shape.redis:
            self.adapter.hits = finding_in_redis(
                self.adapter, SteppedLookup(self.ranks, self.chance)
            )
        self._aggregator = KVOutputAggregator(shape.world_size)
        self._hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        self._queue: deque[tuple[SchedulerOutput, Step]] = deque()
        self._streams: dict[str, list[int]] = {}
        self._rows: dict[str, tuple[tuple[int, ...], ...]] = {}
        self._aborted: set[str] = set()
        self.requests: dict[str, Request] = {}
        self.plans: list[StepPlan] = []
        self.num_preemptions = 0
        self.num_resets = 0
        if started:
            for rank in range(shape.world_size):
                self.report_start(rank)

    def report_start(self, rank: int, configuration: tuple[tuple[str, str], ...] = ()) -> None:
        changes, digest = self.ranks[rank].changes, str(self.version)
        speed = (Fetched(Tier.CPU, 1 << 30, 1.0),) if changes is not None else ()
        start = RankStart(
            configuration,
            speed,
            changes_at=changes.place if changes is not None else "",
        )
        version = self.ranks[rank].weights_version
        weights = WeightsInMemory(version, digest=digest, first_digest=digest)
        report = RankReport(rank, (), (), weights=weights, start=start)
        self.adapter.update_from_reports([report])

    # -- what a client does ----------------------------------------------------------------------

    def add(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        salt: str | None = None,
        *,
        adapter: str | None = None,
        images: Sequence[Image] = (),
        offer: Offer | None = None,
        sends: bool = False,
        bypasses: bool = False,
        lora_request: LoRARequest | None = None,
        request_id: str = "",
        transfer: dict[str, Any] | None = None,
        **more: Any,
    ) -> str:
        """``offer``, ``sends``: what the other connector does with it. ``bypasses``: its KV depends
        on something that only it knows. ``transfer``: its ``kv_transfer_params``."""
        request_id = request_id or f"r{len(self.requests)}"
        version = self.adapters[adapter] if adapter else 0
        if bypasses:
            version = -1
        self._sources[request_id] = Source(salt, adapter, version, tuple(images))
        if self.foreign is not None and offer is not None:
            self.foreign.offers[request_id] = offer
        if self.foreign is not None and sends:
            self.foreign.sends.add(request_id)
        request = TextRequest(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=sampling(max_tokens, transfer),
            pooling_params=None,
            cache_salt=salt,
            lora_request=LoRARequest(adapter, 1 + list(self.adapters).index(adapter), "/adapter")
            if adapter
            else lora_request,
            mm_features=[
                MultiModalFeatureSpec(
                    None,
                    "image",
                    image.name,
                    PlaceholderRange(image.start, image.end - image.start),
                )
                for image in images
            ],
            block_hasher=self._hasher if self.shape.prefix_caching else None,
            **more,
        )
        self.requests[request_id] = request
        self.scheduler.add_request(request)
        return request_id

    def abort(self, request_id: str) -> None:
        if self.foreign is not None:
            self.foreign.sends.discard(request_id)
        self._aborted.add(request_id)
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    @property
    def live(self) -> list[str]:
        return [r for r, request in self.requests.items() if not request.is_finished()]

    def uses(self, request_id: str, adapter: str) -> bool:
        return self._sources[request_id].adapter == adapter

    def is_loading(self, request_id: str) -> bool:
        return self.requests[request_id].status is RequestStatus.WAITING_FOR_REMOTE_KVS

    def share_redis_of(self, other: ShadowEngine) -> None:
        for mine, theirs in zip(self.ranks, other.ranks, strict=True):
            mine.remote = theirs.remote

    def forget_prefixes(self) -> None:
        """Empty vLLM's own prefix cache, and step until the weights have their name again."""
        assert self.scheduler.reset_prefix_cache()
        while not self.adapter.book.weights.name:
            self.step()

    def reset(self, preempt: bool = False, new_weights: bool = True) -> bool:
        """Reset the caches; if vLLM says that no old KV is left, change the weights if wanted."""
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

    def sleep(self) -> None:
        """Abort everything and forget all KV, as vLLM does; the weights may be others after it."""
        for request_id in self.live:
            self.abort(request_id)
        self.run_until_idle()
        assert self.scheduler.reset_prefix_cache(reset_connector=True)
        for rank in self.ranks:
            rank.memory.forget()
        self.version += 1

    # -- steps -------------------------------------------------------------------------------------

    def step(self) -> None:
        """Schedule one step; execute and process the oldest once ``depth`` are under way."""
        output = self.scheduler.schedule()
        self._queue.append((output, self._describe(output)))
        if len(self._queue) >= self.shape.depth:
            self._execute(*self._queue.popleft())

    def run_until_idle(self, max_steps: int = 2000) -> None:
        while not self._is_idle_after(max_steps):
            lost = [request_id for request_id in self.live if self._has_lost_a_token(request_id)]
            assert lost, f"stuck: {self.live}"
            for request_id in lost:
                self.abort(request_id)

    def _is_idle_after(self, max_steps: int) -> bool:
        for _ in range(max_steps):
            if self.scheduler.has_requests():
                self.step()
            elif self._queue:
                self._execute(*self._queue.popleft())
            else:
                return True
        return False

    def _has_lost_a_token(self, request_id: str) -> bool:
        """With asynchronous scheduling vLLM drops the token of a request for which another
        connector's synchronous load failed, and waits for it; near the last token, for ever."""
        request = self.requests[request_id]
        is_running = any(one.request_id == request_id for _, s in self._queue for one in s.passes)
        return request.num_output_placeholders > 0 and not is_running

    def check_whole(self) -> None:
        """Nothing is left of any request."""
        check_scheduler_side(self.adapter)
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
            tokens.append(next_token(tokens))
        assert list(request.all_token_ids) == tokens

    # -- the worker's view -------------------------------------------------------------------------

    def _describe(self, output: SchedulerOutput) -> Step:
        plan, foreign = self._plans_of(output)
        self.plans.append(plan)
        self.num_preemptions += len(output.preempted_req_ids or ())
        restarted = {new.req_id for new in output.scheduled_new_reqs}
        restarted |= set(output.scheduled_cached_reqs.resumed_req_ids)
        for request_id in restarted:
            self._streams[request_id] = list(self.requests[request_id].all_token_ids)
        manager = self.scheduler.kv_cache_manager
        tables = {
            rid: tuple(tuple(ids) for ids in manager.get_block_ids(rid))
            or ((),) * len(self.shape.groups)
            for rid in self.scheduler.requests
        }
        self._name_keys(plan, tables)
        self._extend_rows(output)
        passes = []
        for request_id, count in output.num_scheduled_tokens.items():
            end = self.requests[request_id].num_computed_tokens
            drafts = output.scheduled_spec_decode_tokens.get(request_id, [])
            begins = request_id in restarted
            passes.append(self._pass(request_id, end - count, end, drafts, begins=begins))
        zeroed = tuple(output.new_block_ids_to_zero or ())
        rows = dict(self._rows)
        return Step(plan, tuple(passes), tables, rows, zeroed, foreign, str(self.version))

    def _extend_rows(self, output: SchedulerOutput) -> None:
        """As vLLM's workers know the blocks of a request: nothing is taken away."""
        for new in output.scheduled_new_reqs:
            self._rows[new.req_id] = tuple(map(tuple, new.block_ids))
        cached = output.scheduled_cached_reqs
        for request_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            more = tuple(map(tuple, blocks or [()] * len(self.shape.groups)))
            rows = self._rows[request_id]
            if request_id not in cached.resumed_req_ids:
                more = tuple(map(tuple.__add__, rows, more))
            self._rows[request_id] = more

    def _plans_of(self, output: SchedulerOutput) -> tuple[StepPlan, ForeignWork]:
        metadata = output.kv_connector_metadata
        parts = [metadata]
        if isinstance(metadata, MultiKVConnectorMetadata):
            parts = list(metadata.metadata)
        (ours,) = [part.plan or StepPlan() for part in parts if isinstance(part, PlanMetadata)]
        aborted, self._aborted = frozenset(self._aborted), set()
        for part in parts:
            if isinstance(part, ForeignMetadata):
                cells = tuple(
                    self._cells(
                        load.request_id,
                        list(self.requests[load.request_id].all_token_ids)[: load.offer.num_tokens],
                    )[load.start :]
                    for load in part.loads
                )
                return ours, ForeignWork(part.loads, cells, part.sends, aborted)
        return ours, ForeignWork()

    def _pass(
        self, request_id: str, start: int, end: int, drafts: Sequence[int], *, begins: bool
    ) -> Pass:
        """Tokens not sampled yet are known here: the shadow model is a function of the prompt."""
        lookahead = self.shape.lookahead
        stream, first = self._true_tokens(request_id, end + lookahead), end - len(drafts)
        if not self.shape.drafts:  # all of a head's drafts are right
            drafts = stream[first:]
        right = [draft == token for draft, token in zip(drafts, stream[first:end], strict=False)]
        num_right = [*right, False].index(False)
        tokens = [*stream[: first + num_right + lookahead], *drafts[num_right:]][: end + lookahead]
        cells = self._cells(request_id, tokens)
        return Pass(request_id, start, end, cells, end - first, num_right, begins=begins)

    def _true_tokens(self, request_id: str, count: int) -> list[int]:
        stream = self._streams[request_id]
        while len(stream) < count:
            stream.append(next_token(stream))
        return stream[:count]

    def _cells(self, request_id: str, tokens: Sequence[int]) -> Cells:
        source = self._sources[request_id]
        return cells_of(tokens, source, self.version, self.shape.lookahead)

    def _name_keys(self, plan: StepPlan, tables: dict[str, BlockIds]) -> None:
        """Say what each key of a plan must hold, from the request's own tokens."""
        size = self.shape.chunk_size
        jobs: tuple[LoadJob | StoreJob, ...] = (*plan.stores, *plan.loads)
        for job in jobs:
            if isinstance(job, AuditJob):
                continue  # it may name what other weights have computed
            tokens = list(self.requests[job.request_id].all_token_ids)
            cells = self._cells(job.request_id, tokens)
            for run in job.runs:
                part = self.parts[run.part]
                if isinstance(job, LoadJob):
                    self._check_place(run, part, tables[job.request_id])
                for key, i in zip(run.keys, run.chunks, strict=True):
                    is_tail = run.tail_tokens and i == run.chunks[-1]
                    end = i * size + (run.tail_tokens if is_tail else size)
                    if len(cells) < end:
                        raise WrongKV("a chunk of tokens that are not known yet")
                    start = end - 1 if part.rule is Rule.STATE else i * size
                    self.book.check(key, cells_of_part(cells[start:end], run.part))

    def _check_place(self, run: PartRun, part: Part, tables: BlockIds) -> None:
        """A load fills the request's own blocks of those tokens, without a gap."""
        size = self.shape.chunk_size
        for group, ids in zip(part.groups, run.block_ids, strict=True):
            first = tables[group].index(ids[0])
            assert tables[group][first : first + len(ids)] == ids
            end = run.chunks[-1] * size + (run.tail_tokens or size)
            assert -(-end // BLOCK_SIZE) == first + len(ids)
            if part.rule is not Rule.STATE:
                assert run.chunks[0] * size + run.skip_blocks * BLOCK_SIZE == first * BLOCK_SIZE

    # -- execution ---------------------------------------------------------------------------------

    def _execute(self, output: SchedulerOutput, step: Step) -> None:
        outputs = []
        for rank in self.ranks:
            outputs.append(sampled({one.request_id: self._sample(one) for one in step.passes}))
            outputs[-1].kv_connector_output = told = rank.run(step)
            if self.shape.beside is not None and told.kv_connector_worker_meta is not None:
                parts = [told.kv_connector_worker_meta, None]
                told.kv_connector_worker_meta = MultiKVConnectorWorkerMetadata(
                    tuple(parts if self.shape.beside == 0 else reversed(parts))
                )
        self.scheduler.update_from_output(output, merged(self._aggregator, outputs))
        if self.shape.drafts:
            names = [r for r in output.num_scheduled_tokens if r in self.scheduler.requests]
            drafts = [self._draft(request_id) for request_id in names]
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))

    def _draft(self, request_id: str) -> list[int]:
        """As many as an n-gram finds, the first ones right."""
        known = self.requests[request_id].num_tokens
        count = self.chance.randrange(self.shape.drafts + 1)
        drafts = self._true_tokens(request_id, known + count)[known:]
        right = self.chance.randrange(count + 1)
        return [*drafts[:right], *((token + 1) % VOCABULARY for token in drafts[right:])]

    def _sample(self, one: Pass) -> list[int]:
        """A token if the pass reached the end of what the request had, and each draft before it
        that is right."""
        # Steps run in order, so whatever was sampled before this pass has been processed.
        known, stream = self.requests[one.request_id].num_tokens, self._streams[one.request_id]
        if one.end < known:
            return []
        is_counted = self.shape.drafts > 0
        first = one.end - one.drafts if is_counted else known
        last = first + one.accepted if is_counted else one.end
        return [next_token(stream[:end]) for end in range(first, last + 1)]


def next_token(tokens: Sequence[int]) -> int:
    return cells_of(tokens)[-1] % VOCABULARY
