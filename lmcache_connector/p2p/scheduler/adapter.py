"""The scheduler side: which requests hand over or are handed over, and the plan of every step.

A producer's request goes through ``reserved -> started -> sealed``: there is room for its prompt,
its first blocks are being saved, all of them are. A consumer's is offered, loading, and over.
One object per request owns all of it. Runs on the engine's scheduler thread only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmcache_connector.keys.prefix_hash import PrefixHasher
from lmcache_connector.p2p.control.address import PeerAddress
from lmcache_connector.p2p.errors import AddressError
from lmcache_connector.p2p.plans import (
    Drop,
    HandoverHold,
    HandoverLoad,
    HandoverPlan,
    HandoverReport,
    HandoverResult,
    Release,
    Save,
    Start,
)
from lmcache_connector.p2p.scheduler.counters import P2PCounters
from lmcache_connector.p2p.scheduler.reservations import Reservations
from lmcache_connector.p2p.scheduler.routing import Consume, Produce, Router
from lmcache_connector.p2p.scheduler.transfer_params import offer_params

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from lmcache_connector.keys.request_keys import RequestIdentity

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class P2PSchedulerSettings:
    """``block_bytes``: of the rank that holds most. ``num_writers``: ranks that send something."""

    block_size: int
    block_bytes: int
    world_size: int
    num_writers: int
    tp_size: int
    buffer_bytes: int
    buffer_wait_seconds: float
    load_deadline_seconds: float
    engine_id: str
    address: PeerAddress


@dataclass(slots=True)
class _Producing:
    request: Request
    part: Produce
    digest: bytes
    asked_at: float | None = None
    reserved: bool = False
    declined: bool = False
    started: bool = False
    begins: bool = True
    """Its next save is the first, maybe once more."""
    sealed: bool = False
    next_block: int = 0


@dataclass(slots=True)
class _Consuming:
    request: Request
    part: Consume
    digest: bytes
    offered_from: int = 0
    over: bool = False
    ranks_left: int = 0
    num_blocks: int = 0
    load: HandoverLoad | None = None


class P2PSchedulerAdapter:
    """``identify`` returns what makes a request's KV unique, or ``None`` for one to leave alone."""

    def __init__(
        self,
        settings: P2PSchedulerSettings,
        router: Router,
        model_root: dict[str, object],
        identify: Callable[[Request, str], RequestIdentity | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._router = router
        self._model_root = model_root
        self._identify = identify
        self._clock = clock
        self._producing: dict[str, _Producing] = {}
        self._consuming: dict[str, _Consuming] = {}
        self._room = Reservations(settings.buffer_bytes, settings.num_writers)
        self._load_seconds: list[float] = []
        self._num_resets = 0
        self._waits_for_room = False
        self._announced: list[str] = []
        self._holds: list[HandoverHold] = []
        self._drops: list[Drop] = []
        self._loads: list[HandoverLoad] = []
        self._cancelled_loads: list[str] = []
        self._releases: list[Release] = []
        self.counters = P2PCounters()

    # -- requests ------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        """Understand what the request says. One that is malformed is served without a hand-over."""
        try:
            part = self._router.part_in(request.request_id, request.kv_transfer_params)
        except AddressError as error:
            self.counters.malformed += 1
            logger.warning(
                "Request %s is computed here, without a hand-over: %s", request.request_id, error
            )
            return
        digest = self._digest(request) if part is not None else None
        if part is None or digest is None:
            return
        if isinstance(part, Produce):
            self._producing[request.request_id] = _Producing(request, part, digest)
            self._announced.append(part.transfer_id)
        elif not request.skip_reading_prefix_cache:
            self._consuming[request.request_id] = _Consuming(request, part, digest)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """``None``: this prompt has to wait until there is room to hand it over."""
        producing = self._producing.get(request.request_id)
        if producing is not None and not self._reserve(producing):
            self._waits_for_room = True
            return None, False
        consuming = self._consuming.get(request.request_id)
        if consuming is None or consuming.over:
            return 0, False
        missing = request.num_prompt_tokens - num_computed_tokens
        # The last block alone is computed sooner than it is fetched: its last token has to be.
        if missing <= (self._settings.block_size if num_computed_tokens else 0):
            return 0, False
        consuming.offered_from = num_computed_tokens
        return missing, True

    def update_state_after_alloc(
        self, request: Request, block_ids: Callable[[], Sequence[int]], num_external_tokens: int
    ) -> None:
        """Plan the load, once, or tell the producer that none is needed."""
        state = self._consuming.get(request.request_id)
        if state is None or state.over:
            return
        state.over = True
        if num_external_tokens <= 0:
            self._releases.append(Release(state.part.transfer_id, state.part.source))
            return
        size = self._settings.block_size
        first = state.offered_from // size
        last = -(-(state.offered_from + num_external_tokens) // size)
        state.load = HandoverLoad(
            request_id=request.request_id,
            transfer_id=state.part.transfer_id,
            digest=state.digest,
            num_tokens=request.num_prompt_tokens,
            source=state.part.source,
            first_block=first,
            block_ids=tuple(block_ids()[first:last]),
            deadline_seconds=self._settings.load_deadline_seconds,
        )
        state.ranks_left = self._settings.world_size
        state.num_blocks = last - first
        self._loads.append(state.load)
        self.counters.loads += 1

    def request_finished(
        self, request: Request, block_ids: Sequence[int], *, is_served: bool
    ) -> tuple[bool, dict[str, Any] | None]:
        """``is_served``: it ended as it should, not by an abort or an error.

        True: saves still read the blocks, and the worker sides will say when they end.
        """
        consuming = self._consuming.pop(request.request_id, None)
        if consuming is not None:
            if not consuming.over:
                self._releases.append(Release(consuming.part.transfer_id, consuming.part.source))
            elif consuming.ranks_left:
                # vLLM keeps the blocks of an aborted load until it is reported.
                self._cancelled_loads.append(request.request_id)
        producing = self._producing.pop(request.request_id, None)
        if producing is None:
            return False, None
        transfer_id = producing.part.transfer_id
        if not producing.started:
            self._room.cancel(transfer_id)
            self._drops.append(Drop(transfer_id, "its request was aborted"))
            return False, None
        self._holds.append(HandoverHold(request.request_id, transfer_id))
        if not producing.sealed or not is_served:
            self._drops.append(Drop(transfer_id, "its request was aborted"))
            return True, None
        self.counters.handovers += 1
        if not producing.part.answers:
            return True, None
        return True, offer_params(
            self._settings.address,
            self._settings.engine_id,
            transfer_id,
            block_ids[: self._num_blocks(request)],
            request.num_prompt_tokens,
            self._settings.tp_size,
        )

    def reset_cache(self) -> None:
        """What was computed before is not to be mixed with what comes: hand-overs in flight end.

        Instances hand over only if they were reset equally often.
        """
        self._num_resets += 1
        for producing in self._producing.values():
            if producing.started and not producing.declined:
                self._drops.append(Drop(producing.part.transfer_id, "the cache was reset"))
            producing.declined = True
        for consuming in self._consuming.values():
            if not consuming.over:
                consuming.over = True
                self._releases.append(Release(consuming.part.transfer_id, consuming.part.source))
            elif consuming.ranks_left:
                self._cancelled_loads.append(consuming.request.request_id)

    # -- plans and reports ---------------------------------------------------------------------

    def build_plan(self, scheduler_output: SchedulerOutput) -> HandoverPlan:
        vacated = self._vacate(scheduler_output.preempted_req_ids or ())
        starts, saves = self._plan_saves(scheduler_output)
        plan = HandoverPlan(
            announced=tuple(self._announced),
            starts=tuple(starts),
            saves=tuple(saves),
            holds=tuple(self._holds),
            drops=tuple(self._drops),
            vacated=vacated,
            loads=tuple(self._loads),
            cancelled_loads=tuple(self._cancelled_loads),
            releases=tuple(self._releases),
            idle=scheduler_output.total_num_scheduled_tokens == 0,
            waits_for_room=self._waits_for_room,
        )
        self._announced, self._holds, self._drops, self._loads = [], [], [], []
        self._cancelled_loads, self._releases = [], []
        self._waits_for_room = False
        return plan

    def update_from_reports(self, reports: Iterable[HandoverReport]) -> None:
        for report in reports:
            for result in report.loads:
                self._load_ended(result)
            for transfer_id in report.released:
                self._room.release(transfer_id)
            self.counters.count_unsent(reason for _, reason in report.unsent)

    def check_integrity(self) -> None:
        """Raises ``AssertionError`` unless nothing is left over once all requests are gone."""
        assert not self._producing, f"requests left: {list(self._producing)}"
        assert not self._consuming, f"requests left: {list(self._consuming)}"

    @property
    def reserved_bytes(self) -> int:
        """Promised to prompts, on the rank that holds most."""
        return self._room.reserved_bytes

    @property
    def capacity_bytes(self) -> int:
        return self._room.capacity_bytes

    def take_load_seconds(self) -> list[float]:
        """Of the loads that ended since the last call, on each rank."""
        taken, self._load_seconds = self._load_seconds, []
        return taken

    # -- details -------------------------------------------------------------------------------

    def _digest(self, request: Request) -> bytes | None:
        identity = self._identify(request, f"reset {self._num_resets}")
        tokens = request.all_token_ids[: request.num_prompt_tokens]
        if identity is None or not tokens:
            return None
        hasher = PrefixHasher(self._model_root, len(tokens))
        extras = identity.extras(0, len(tokens)) if identity.has_extras else b""
        (digest,) = hasher.extend(hasher.root_key(identity.root()), tokens, [extras])
        return bytes(digest)

    def _num_blocks(self, request: Request) -> int:
        num_tokens: int = request.num_prompt_tokens
        return -(-num_tokens // self._settings.block_size)

    def _reserve(self, state: _Producing) -> bool:
        """Whether the prompt may begin: with room for its hand-over, or without one."""
        if state.reserved or state.declined:
            return True
        transfer_id = state.part.transfer_id
        num_bytes = self._num_blocks(state.request) * self._settings.block_bytes
        if self._room.reserve(transfer_id, num_bytes):
            state.reserved = True
            return True
        now = self._clock()
        state.asked_at = now if state.asked_at is None else state.asked_at
        fits = num_bytes <= self._room.capacity_bytes
        if fits and now - state.asked_at < self._settings.buffer_wait_seconds:
            return False
        state.declined = True
        self.counters.declined += 1
        self._drops.append(Drop(transfer_id, "the producer's buffer is full"))
        logger.warning(
            "Request %s is not handed over: its %d bytes of KV found no room in kv_buffer_size "
            "and overflow_bytes",
            state.request.request_id,
            num_bytes,
        )
        return True

    def _plan_saves(self, scheduler_output: SchedulerOutput) -> tuple[list[Start], list[Save]]:
        starts, saves = [], []
        block_state = scheduler_output.kv_connector_block_state
        for request_id, num_scheduled in scheduler_output.num_scheduled_tokens.items():
            state = self._producing.get(request_id)
            if state is None or state.declined or state.sealed or not state.reserved:
                continue
            request = state.request
            transfer_id = state.part.transfer_id
            if state.begins:
                state.started, state.begins = True, False
                starts.append(
                    Start(transfer_id, state.digest, request.num_prompt_tokens, state.part.target)
                )
            computed = request.num_computed_tokens + num_scheduled
            state.sealed = computed >= request.num_prompt_tokens
            end = (
                self._num_blocks(request) if state.sealed else computed // self._settings.block_size
            )
            if end > state.next_block:
                (block_ids,) = block_state.get_block_ids(request_id)
                ids = tuple(block_ids[state.next_block : end])
                saves.append(Save(transfer_id, state.next_block, ids, state.sealed))
                state.next_block = end
        return starts, saves

    def _vacate(self, preempted: Iterable[str]) -> tuple[str, ...]:
        """Transfers of requests that were preempted: unless all is saved, they begin anew."""
        vacated = []
        for request_id in preempted:
            state = self._producing.get(request_id)
            if state is not None and state.started:
                vacated.append(state.part.transfer_id)
                if not state.sealed:
                    state.begins, state.next_block = True, 0
        return tuple(vacated)

    def _load_ended(self, result: HandoverResult) -> None:
        counters = self.counters
        counters.count_load(result)
        self._load_seconds.append(result.seconds)
        if result.reason:
            logger.warning(
                "Of the KV of request %s, %d blocks arrived, the rest is recomputed: %s",
                result.request_id,
                result.num_blocks,
                result.reason,
            )
        state = self._consuming.get(result.request_id)
        if state is None or state.load is None:
            return
        state.ranks_left -= 1
        state.num_blocks = min(state.num_blocks, result.num_blocks)
        if state.ranks_left == 0:
            size, load = self._settings.block_size, state.load
            wanted = load.num_tokens - load.first_block * size
            arrived = min(wanted, state.num_blocks * size)
            counters.remote_hit_tokens += arrived
            counters.recomputed_tokens += wanted - arrived
