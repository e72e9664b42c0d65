"""The scheduler side: which requests hand over or are handed over, and the plan of every step.

Runs on the engine's scheduler thread only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from lmcache_connector.keys.prefix_hash import PrefixHasher
from lmcache_connector.keys.request_keys import RequestIdentity
from lmcache_connector.metrics.tally import Tally
from lmcache_connector.p2p.control.address import PeerAddress
from lmcache_connector.p2p.errors import AddressError
from lmcache_connector.p2p.plans import HandoverPlan, HandoverReport
from lmcache_connector.p2p.scheduler.consuming import ConsumingRequests
from lmcache_connector.p2p.scheduler.producing import ProducingRequests
from lmcache_connector.p2p.scheduler.routing import Router
from lmcache_connector.p2p.scheduler.settings import P2PSchedulerSettings
from lmcache_connector.p2p.scheduler.transfer_params import Consume, Produce
from lmcache_connector.plans import WeightsInMemory
from lmcache_connector.requests.identifier import UNREAD, Identified, NotYet
from lmcache_connector.tracing.spans import Spans
from lmcache_connector.vllm_compat.short_loads import ShortLoad
from lmcache_connector.weight_names import WeightNames

if TYPE_CHECKING:
    from lmcache_connector.vllm_compat.api.names import Request, SchedulerOutput

logger = logging.getLogger(__name__)


class Identifier(Protocol):
    """Says what makes a request's KV unique."""

    def identify(self, request: Request) -> Identified | NotYet:
        """``UNREAD``: its content is being read in the background; ask again."""
        ...

    def forget(self, request: Request) -> None:
        """The request has ended."""
        ...

    def close(self) -> None: ...


class P2PSchedulerAdapter:
    """``tally`` counts everything under the names of the metrics. ``weights`` names those in
    memory; while that is unknown, nothing is handed over. ``configuration``: what else decides how
    they come there."""

    def __init__(
        self,
        settings: P2PSchedulerSettings,
        router: Router,
        model_root: dict[str, object],
        weights: WeightNames,
        configuration: Mapping[str, str],
        identifier: Identifier,
        clock: Callable[[], float] = time.monotonic,
        spans: Spans | None = None,
    ) -> None:
        self.tally = Tally()
        self._router = router
        self._model_root = model_root
        self._identifier = identifier
        self._unread: dict[str, Produce | Consume] = {}  # what they want, by request
        self._producing = ProducingRequests(settings, self.tally, clock)
        self._consuming = ConsumingRequests(settings, self.tally, spans)
        self.weights = weights
        self._configuration = configuration
        self._cached: str | None = None  # the weights of what vLLM's prefix cache has
        self._has_computed = False  # anything since it was reset
        self._settings = settings
        self._hosts: dict[int, str] = {}  # of ranks
        self._holding: set[int] = set()  # ranks whose paged cache can be read
        self._new_hosts: tuple[str, ...] = ()

    # -- requests ------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        """Understand what the request says. One that is malformed is served without a hand-over."""
        try:
            part = self._router.part_in(request.request_id, request.kv_transfer_params)
        except AddressError as error:
            self.tally.count("p2p_malformed_requests")
            logger.warning(
                "Request %s is computed here, without a hand-over: %s", request.request_id, error
            )
            return
        if part is not None:
            self._unread[request.request_id] = part
            self._has_read(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """``None``: this prompt has to wait until its content is read, or there is room to hand it
        over."""
        if not self._has_read(request):
            return None, False
        if not self._producing.may_begin(request.request_id):
            return None, False
        num_tokens = self._consuming.num_offered_tokens(request, num_computed_tokens)
        return num_tokens, bool(num_tokens)

    def update_state_after_alloc(
        self, request: Request, block_ids: Callable[[], Sequence[int]], num_external_tokens: int
    ) -> None:
        """``block_ids()``: of the request, from its first token on."""
        self._consuming.allocated(request, block_ids, num_external_tokens)

    def request_finished(
        self, request: Request, block_ids: Sequence[int], *, is_served: bool
    ) -> tuple[bool, dict[str, Any] | None]:
        """``is_served``: it ended as it should, not by an abort or an error.

        True: saves still read the blocks, and the worker sides will say when they end.
        """
        self._unread.pop(request.request_id, None)
        self._identifier.forget(request)
        self._consuming.finish(request.request_id)
        return self._producing.finish(request.request_id, block_ids, is_served=is_served)

    def reset_cache(self) -> None:
        """vLLM's prefix cache is about to be reset, as after a weight update: end all hand-overs in
        flight, and ask the ranks for their weights. O(requests in flight)."""
        self.weights.reset(is_external=False)
        self._cached, self._has_computed = None, False
        self._end_handovers()

    def shutdown(self) -> None:
        self._identifier.close()

    # -- plans and reports ---------------------------------------------------------------------

    def build_plan(self, scheduler_output: SchedulerOutput) -> HandoverPlan:
        """What all ranks are to do in this step."""
        plan = self._consuming.complete(self._producing.draft(scheduler_output))
        hosts, self._new_hosts = self._new_hosts, ()
        is_idle = scheduler_output.total_num_scheduled_tokens == 0
        self._has_computed |= not is_idle
        return replace(
            plan,
            idle=is_idle,
            rank_hosts=hosts,
            weights_question=self.weights.take_question(),
            heard_weights=self.weights.heard,
        )

    def update_from_reports(self, reports: Iterable[HandoverReport]) -> list[ShortLoad]:
        """One report per rank that has news. Returns the loads that have ended with it and did not
        bring everything."""
        short_loads = []
        for report in reports:
            found = map(self._consuming.update, report.loads)
            short_loads += [load for load in found if load is not None]
            self._producing.update(report)
            if report.start is not None:
                self._hosts[report.start.rank] = report.start.host
                if report.start.holds:
                    self._holding.add(report.start.rank)
                self._announce()
            if report.weights is not None:
                self._learn_weights(*report.weights)
        if not self.weights.name and self.weights.settle(self._configuration):
            self._cached = self.weights.name if self._cached is None else self._cached
        return short_loads

    def check_integrity(self) -> None:
        """Raises ``AssertionError`` unless nothing is left over once all requests are gone."""
        left = [*self._unread, *self._producing.request_ids, *self._consuming.request_ids]
        assert not left, f"requests left: {left}"

    @property
    def reserved_bytes(self) -> int:
        """Promised to prompts, on the rank that holds most."""
        return self._producing.room.reserved_bytes

    # -- details -------------------------------------------------------------------------------

    def _learn_weights(self, rank: int, weights: WeightsInMemory) -> None:
        were_others = 0 <= self.weights.heard[rank] != weights.version
        if were_others and self._has_computed and self._cached is None:
            self._cached = ""
        if self.weights.learn(rank, weights):
            self._end_handovers()

    def _end_handovers(self) -> None:
        """Those in flight."""
        self._producing.reset()
        self._consuming.reset()

    def _announce(self) -> None:
        """Once all ranks have said where they listen: tell them all, if they are not together."""
        own = self._settings.address
        if len(self._hosts) == self._settings.world_size:
            hosts = tuple(host for _, host in sorted(self._hosts.items()))
            self._producing.address = PeerAddress(hosts[0], own.port)
            self._producing.holds = len(self._holding) == len(hosts)
            if set(hosts) != {own.host}:
                self._new_hosts = hosts

    def _has_read(self, request: Request) -> bool:
        """Whether no content is left to read of the request: images, adapters. Then its hand-over
        begins."""
        part = self._unread.get(request.request_id)
        if part is None:
            return True
        if not self.weights.name and self.weights.is_awaited():
            return False
        identity = self._identifier.identify(request)
        if identity is UNREAD:
            return False
        del self._unread[request.request_id]
        # vLLM's prefix cache may have KV of other weights, after an update without a reset.
        is_named = bool(self.weights.name) and self.weights.name == self._cached
        if is_named and isinstance(identity, RequestIdentity) and request.num_prompt_tokens:
            digest = self._digest(request, identity)
            if isinstance(part, Produce):
                self._producing.add(request, part, digest)
            elif not request.skip_reading_prefix_cache:
                self._consuming.add(request, part, digest)
        return True

    def _digest(self, request: Request, identity: RequestIdentity) -> bytes:
        """What both instances call the prompt with everything that makes its KV unique."""
        identity = replace(identity, weights=self.weights.name)
        tokens = request.all_token_ids[: request.num_prompt_tokens]
        hasher = PrefixHasher(self._model_root, len(tokens))
        extras = identity.extras(0, len(tokens)) if identity.has_extras else b""
        (digest,) = hasher.extend(hasher.root_key(identity.root()), tokens, [extras])
        return bytes(digest)
