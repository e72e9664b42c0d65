"""Requests whose KV is handed over to here.

A request waits in line, is offered to vLLM, loading, and over. Of several requests for one
hand-over (vLLM makes them for ``n`` answers to one prompt) the first loads it, and the others are
asked again until it has: then vLLM's prefix cache has it for them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lmcache_connector.metrics.tally import Tally
from lmcache_connector.p2p.plans import (
    Arrival,
    HandoverLoad,
    HandoverPlan,
    HandoverResult,
    Release,
)
from lmcache_connector.p2p.scheduler.settings import P2PSchedulerSettings
from lmcache_connector.p2p.scheduler.transfer_params import Consume
from lmcache_connector.tracing.spans import Spans
from lmcache_connector.vllm_compat.short_loads import ShortLoad

if TYPE_CHECKING:
    from lmcache_connector.vllm_compat.api.names import Request

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Consuming:
    """``offered_from``: the first token offered to vLLM. ``over``: the offer was taken or refused.
    ``fetched``: it was taken, here or by another request for the same hand-over. ``ranks_left``:
    have not yet reported the load. ``num_blocks``: came to every rank so far."""

    request: Request
    part: Consume
    digest: bytes
    offered_from: int = 0
    over: bool = False
    fetched: bool = False
    ranks_left: int = 0
    num_blocks: int = 0
    load: HandoverLoad | None = None


class ConsumingRequests:
    def __init__(
        self, settings: P2PSchedulerSettings, tally: Tally, spans: Spans | None = None
    ) -> None:
        self._settings = settings
        self._spans = spans if spans is not None else Spans()
        self._tally = tally
        self._requests: dict[str, _Consuming] = {}
        self._arrivals: list[Arrival] = []
        self._loads: list[HandoverLoad] = []
        self._cancelled_loads: list[str] = []
        self._releases: list[Release] = []

    @property
    def request_ids(self) -> list[str]:
        return list(self._requests)

    def add(self, request: Request, part: Consume, digest: bytes) -> None:
        """``digest``: of the prompt."""
        if not self._others(part):
            self._arrivals.append(Arrival(part.transfer_id, part.source))
        self._requests[request.request_id] = _Consuming(request, part, digest)

    def num_offered_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        """Tokens of the prompt that are worth waiting for, beyond those already computed; ``None``:
        another request is loading them."""
        state = self._requests.get(request.request_id)
        if state is None or state.over:
            return 0
        others = self._others(state.part)
        if any(other.ranks_left for other in others):
            return None
        if any(other.over for other in others):  # it is in vLLM's cache, or it cannot be had
            state.over, state.fetched = True, any(other.fetched for other in others)
            self._release(state)
            return 0
        missing: int = request.num_prompt_tokens - num_computed_tokens
        # The last block alone is computed sooner than it is fetched: its last token has to be.
        if missing <= (self._settings.block_size if num_computed_tokens else 0):
            return 0
        state.offered_from = num_computed_tokens
        return missing

    def allocated(
        self, request: Request, block_ids: Callable[[], Sequence[int]], num_external_tokens: int
    ) -> None:
        """Plan the load, once, or tell the producer that none is needed."""
        state = self._requests.get(request.request_id)
        if state is None or state.over:
            return
        state.over = True
        if num_external_tokens <= 0:
            self._release(state)
            return
        first = state.offered_from // self._settings.block_size
        last = self._settings.num_blocks(state.offered_from + num_external_tokens)
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
        state.fetched, state.ranks_left = True, self._settings.world_size
        state.num_blocks = last - first
        self._loads.append(state.load)
        self._spans.begin(request, "handover")
        self._tally.count("p2p_loads")

    def finish(self, request_id: str) -> None:
        """vLLM keeps the blocks of an aborted load until it is reported."""
        state = self._requests.pop(request_id, None)
        if state is not None:
            self._spans.drop(state.request, "handover")
            self._cancel(state)

    def reset(self) -> None:
        """Loads in flight end: what they bring was computed before."""
        for state in self._requests.values():
            self._cancel(state)
            state.over = True

    def complete(self, plan: HandoverPlan) -> HandoverPlan:
        """The plan with the consumer's part of it."""
        plan = replace(
            plan,
            arrivals=tuple(self._arrivals),
            loads=tuple(self._loads),
            cancelled_loads=tuple(self._cancelled_loads),
            releases=tuple(self._releases),
        )
        self._arrivals, self._loads, self._cancelled_loads, self._releases = [], [], [], []
        return plan

    def update(self, result: HandoverResult) -> ShortLoad | None:
        """How a load ended on one rank; what it lacks, if that was the last one."""
        self._tally.count("p2p_received_bytes", amount=result.wire_bytes)
        self._tally.count("p2p_receive_seconds", amount=result.wire_seconds)
        self._tally.observe("p2p_load_seconds", value=result.seconds)
        if result.cause is not None:
            self._tally.count("p2p_failed_loads", result.cause.reason)
            logger.warning(
                "Of the KV of request %s, %d blocks arrived, the rest is recomputed: %s",
                result.request_id,
                result.num_blocks,
                result.cause.text,
            )
        state = self._requests.get(result.request_id)
        if state is None or state.load is None:
            return None
        state.ranks_left -= 1
        state.num_blocks = min(state.num_blocks, result.num_blocks)
        if state.ranks_left > 0:
            return None
        self._count_tokens(state.load, state.num_blocks)
        blocks = {"blocks": len(state.load.block_ids), "blocks_done": state.num_blocks}
        self._spans.end(state.request, "handover", blocks)
        if state.num_blocks == len(state.load.block_ids):
            return None
        arrived = state.load.first_block + state.num_blocks
        return ShortLoad(state.request, arrived * self._settings.block_size)

    # -- details -------------------------------------------------------------------------------

    def _count_tokens(self, load: HandoverLoad, num_blocks: int) -> None:
        size = self._settings.block_size
        wanted = load.num_tokens - load.first_block * size
        arrived = min(wanted, num_blocks * size)
        self._tally.count("p2p_hit_tokens", amount=arrived)
        self._tally.count("p2p_recomputed_tokens", amount=wanted - arrived)

    def _others(self, part: Consume) -> list[_Consuming]:
        """Requests for the same hand-over."""
        return [s for s in self._requests.values() if s.part == part and s.part is not part]

    def _cancel(self, state: _Consuming) -> None:
        if not state.over:
            self._release(state)
        elif state.ranks_left:
            self._cancelled_loads.append(state.request.request_id)

    def _release(self, state: _Consuming) -> None:
        """The last one of those that have not fetched it says so for all."""
        if any(other.fetched or not other.over for other in self._others(state.part)):
            return
        self._releases.append(Release(state.part.transfer_id, state.part.source))
