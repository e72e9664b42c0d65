"""Requests whose KV is handed over from here.

A request is reserved, started and sealed: there is room for its prompt, its first blocks are being
saved, all of them are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lmcache_connector.metrics.tally import Tally
from lmcache_connector.p2p.control.messages import MAX_BLOCK_IDS
from lmcache_connector.p2p.plans import (
    OTHER_WEIGHTS,
    Drop,
    HandoverHold,
    HandoverPlan,
    HandoverReport,
    HeldPrompt,
    Save,
    Start,
)
from lmcache_connector.p2p.reasons import Cause, Reason
from lmcache_connector.p2p.scheduler.reservations import Reservations
from lmcache_connector.p2p.scheduler.settings import P2PSchedulerSettings
from lmcache_connector.p2p.scheduler.transfer_params import Produce, offer_params

if TYPE_CHECKING:
    from lmcache_connector.vllm_compat.api.names import Request, SchedulerOutput

logger = logging.getLogger(__name__)

_ABORTED = Cause(Reason.ABORTED, "its request was aborted")
_FULL = Cause(Reason.BUFFER_FULL, "the producer's buffer is full")


@dataclass(slots=True)
class _Producing:
    """``asked_at``: when it first found no room. ``begins``: its next save is the first, perhaps
    once more. ``next_block``: of the prompt, to be saved next."""

    request: Request
    part: Produce
    digest: bytes
    asked_at: float | None = None
    reserved: bool = False
    declined: bool = False
    started: bool = False
    begins: bool = True
    sealed: bool = False
    next_block: int = 0
    held: bool = False

    @property
    def transfer_id(self) -> str:
        return self.part.transfer_id

    @property
    def is_saving(self) -> bool:
        return self.reserved and not self.declined and not self.sealed


class ProducingRequests:
    """``clock`` returns seconds. ``room``: the buffer space promised to them; only read it.
    ``address``: where consumers find them. ``holds``: those that are not pushed are read where they
    lie, in the paged cache."""

    def __init__(
        self, settings: P2PSchedulerSettings, tally: Tally, clock: Callable[[], float]
    ) -> None:
        self._settings = settings
        self._tally = tally
        self._clock = clock
        self.room = Reservations(settings.buffer_bytes, settings.num_writers, tally)
        self.address = settings.address
        self.holds = False
        self._requests: dict[str, _Producing] = {}
        self._waits_for_room = self._was_reset = False
        self._announced: list[str] = []
        self._holds: list[HandoverHold] = []
        self._drops: list[Drop] = []

    @property
    def request_ids(self) -> list[str]:
        return list(self._requests)

    def add(self, request: Request, part: Produce, digest: bytes) -> None:
        """``digest``: of the prompt. Of several requests for one hand-over, the first makes it."""
        if any(state.transfer_id == part.transfer_id for state in self._requests.values()):
            return
        self._requests[request.request_id] = _Producing(request, part, digest)
        self._announced.append(part.transfer_id)

    def may_begin(self, request_id: str) -> bool:
        """Whether the prompt may be computed: with room for its hand-over, or without one."""
        state = self._requests.get(request_id)
        if state is None or state.reserved or state.declined or state.held:
            return True
        if self._is_to_be_read(state):
            state.held = True
            return True
        ring = self._settings.ring(state.request.num_prompt_tokens)
        num_bytes = ring.memory_blocks * self._settings.block_bytes
        state.reserved = self.room.reserve(state.transfer_id, num_bytes)
        if state.reserved:
            return True
        now = self._clock()
        state.asked_at = now if state.asked_at is None else state.asked_at
        fits = num_bytes <= self.room.capacity_bytes
        if fits and now - state.asked_at < self._settings.buffer_wait_seconds:
            self._waits_for_room = True
            return False
        self._decline(state, num_bytes)
        return True

    def finish(
        self, request_id: str, block_ids: Sequence[int], *, is_served: bool
    ) -> tuple[bool, dict[str, Any] | None]:
        """True: saves still read the blocks, and the worker sides will say when they end.

        With it come the parameters that a router shall pass on, if it asked for them.
        """
        state = self._requests.pop(request_id, None)
        if state is None:
            return False, None
        if state.held and state.sealed and is_served and not state.declined:
            return True, self._hold(state, block_ids)
        if not state.started:
            self.room.cancel(state.transfer_id)
            self._drops.append(Drop(state.transfer_id, _ABORTED))
            return False, None
        self._holds.append(HandoverHold(request_id, state.transfer_id))
        if not state.sealed or not is_served:
            self._drops.append(Drop(state.transfer_id, _ABORTED))
            return True, None
        self._tally.count("p2p_handovers")
        return True, self._offer(state, block_ids) if state.part.answers else None

    def reset(self) -> None:
        """Hand-overs in flight end: what was computed before must not mix with what comes."""
        for state in self._requests.values():
            if (state.started or state.held) and not state.declined:
                self._drops.append(Drop(state.transfer_id, OTHER_WEIGHTS))
            state.declined = True
        self._drops += [Drop(hold.transfer_id, OTHER_WEIGHTS) for hold in self._holds if hold.held]
        self._holds = [replace(hold, held=None) for hold in self._holds]
        self._was_reset = True

    def draft(self, scheduler_output: SchedulerOutput) -> HandoverPlan:
        """The producer's part of a step's plan."""
        vacated = self._vacate(scheduler_output.preempted_req_ids or ())
        starts, saves = self._plan_saves(scheduler_output)
        plan = HandoverPlan(
            announced=tuple(self._announced),
            starts=tuple(starts),
            saves=tuple(saves),
            holds=tuple(self._holds),
            drops=tuple(self._drops),
            vacated=vacated,
            waits_for_room=self._waits_for_room,
            reset=self._was_reset,
        )
        self._announced, self._holds, self._drops = [], [], []
        self._waits_for_room = self._was_reset = False
        return plan

    def update(self, report: HandoverReport) -> None:
        """What one rank says of transfers that ended."""
        for transfer_id in report.released:
            self.room.release(transfer_id)
        for _, reason in report.unsent:
            self._tally.count("p2p_unsent_handovers", reason)

    # -- details -------------------------------------------------------------------------------

    def _is_to_be_read(self, state: _Producing) -> bool:
        """Whether it stays in its blocks: consumers come for it, and can be told where it lies."""
        num_blocks = self._settings.num_blocks(state.request.num_prompt_tokens)
        return self.holds and state.part.target is None and num_blocks <= MAX_BLOCK_IDS

    def _decline(self, state: _Producing, num_bytes: int) -> None:
        state.declined = True
        self._tally.count("p2p_declined_handovers")
        self._drops.append(Drop(state.transfer_id, _FULL))
        logger.warning(
            "Request %s is not handed over: its %d bytes of KV found no room in kv_buffer_size "
            "and overflow_bytes",
            state.request.request_id,
            num_bytes,
        )

    def _hold(self, state: _Producing, block_ids: Sequence[int]) -> dict[str, Any] | None:
        num_tokens = state.request.num_prompt_tokens
        ids = tuple(block_ids[: self._settings.num_blocks(num_tokens)])
        prompt = HeldPrompt(state.digest, num_tokens, ids)
        self._holds.append(HandoverHold(state.request.request_id, state.transfer_id, prompt))
        self._tally.count("p2p_handovers")
        return self._offer(state, block_ids) if state.part.answers else None

    def _offer(self, state: _Producing, block_ids: Sequence[int]) -> dict[str, Any]:
        settings, num_tokens = self._settings, state.request.num_prompt_tokens
        return offer_params(
            self.address,
            settings.engine_id,
            state.transfer_id,
            block_ids[: settings.num_blocks(num_tokens)],
            num_tokens,
            settings.tp_size,
        )

    def _plan_saves(self, scheduler_output: SchedulerOutput) -> tuple[list[Start], list[Save]]:
        starts, saves = [], []
        block_state = scheduler_output.kv_connector_block_state
        for request_id, num_scheduled in scheduler_output.num_scheduled_tokens.items():
            state = self._requests.get(request_id)
            if state is None or not (state.is_saving or state.held):
                continue
            num_tokens = state.request.num_prompt_tokens
            if state.held:
                state.sealed = state.request.num_computed_tokens + num_scheduled >= num_tokens
                continue
            if state.begins:
                if not state.started and not self._settings.ring(num_tokens).is_whole:
                    self._tally.count("p2p_streamed_handovers")
                state.started, state.begins = True, False
                starts.append(Start(state.transfer_id, state.digest, num_tokens, state.part.target))
            computed = state.request.num_computed_tokens + num_scheduled
            state.sealed = computed >= num_tokens
            size = self._settings.block_size
            end = self._settings.num_blocks(num_tokens) if state.sealed else computed // size
            if end > state.next_block:
                (block_ids,) = block_state.get_block_ids(request_id)
                ids = tuple(block_ids[state.next_block : end])
                saves.append(Save(state.transfer_id, state.next_block, ids, state.sealed))
                state.next_block = end
        return starts, saves

    def _vacate(self, preempted: Iterable[str]) -> tuple[str, ...]:
        """Transfers of requests that were preempted: unless all is saved, they begin anew."""
        vacated = []
        for request_id in preempted:
            state = self._requests.get(request_id)
            if state is not None and state.started:
                vacated.append(state.transfer_id)
                if not state.sealed:
                    state.begins, state.next_block = True, 0
        return tuple(vacated)
