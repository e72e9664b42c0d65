"""The requests in flight, each under the current keys of its root.

A request is entered once all ranks have reported their configuration and weights, and its content
is read. When an audit finds a mismatch, the root gets another epoch and the request other keys.
When the weights may have changed, all requests are dropped; waiting ones are entered again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from lmcache_connector import __version__
from lmcache_connector.audit.verdicts import RootEpochs
from lmcache_connector.keys.request_keys import RequestIdentity, RequestKeys
from lmcache_connector.metrics.samples import Tally
from lmcache_connector.plans import AdapterRef
from lmcache_connector.requests.encoder_witness import EncoderWitness
from lmcache_connector.requests.identifier import RequestIdentifier
from lmcache_connector.retention.hints import read_hints
from lmcache_connector.scheduler.engine_start import EngineStart
from lmcache_connector.scheduler.request_state import (
    NO_TRANSFER,
    RequestState,
    SchedulerSettings,
    Transfer,
)
from lmcache_connector.scheduler.store_planner import adapter_of
from lmcache_connector.threads import PENDING, Pending, StepWait
from lmcache_connector.weight_names import WeightNames

if TYPE_CHECKING:
    from lmcache_connector.vllm_compat.api.names import Request, SchedulerOutput

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class RequestBook:
    """Owns the requests and their keys. ``states``: requests in flight by id; a later request may
    reuse the id of an ended one. ``adapters``: those of ``identifier``.

    ``start`` makes the hasher, ``weights`` names the weights, ``identifier`` finds what makes a
    request's KV unique, ``epochs`` names the current epoch of each root.
    """

    settings: SchedulerSettings
    start: EngineStart
    weights: WeightNames
    identifier: RequestIdentifier
    epochs: RootEpochs
    tally: Tally
    part_of: Callable[[Request], Transfer]

    def __post_init__(self) -> None:
        self.adapters = self.identifier.adapters
        self._encoders = EncoderWitness()
        self._plain: set[str] = set()  # running requests without an adapter, if adapters leak
        self._states: dict[str, RequestState] = {}
        self.states: Mapping[str, RequestState] = self._states

    def get(self, request_id: str) -> RequestState | None:
        """State of a request in flight; ``None`` if the request bypasses the connector."""
        return self._states.get(request_id)

    # -- one request ---------------------------------------------------------------------------

    def enter(
        self, request: Request, wait: StepWait | None = None
    ) -> RequestState | Literal[Pending.PENDING] | None:
        """The request's state, with all full chunks hashed. ``PENDING``: its content, the hasher or
        the weights' name is unknown, ask again. ``None``: the request bypasses the connector."""
        if self.start.hasher is None or not self.weights.name:
            self.weights.ask_again()
        if self.start.hasher is None:
            return PENDING if self.start.is_awaited() else None
        if not self.weights.name:
            return PENDING if self.weights.is_awaited() else None
        state = self._states.get(request.request_id)
        if state is None or state.request is not request:
            self._states.pop(request.request_id, None)
            identity = self.identifier.identify(request, wait)
            if not isinstance(identity, RequestIdentity):
                return PENDING if identity is PENDING else None
            state = self._states[request.request_id] = self._new_state(request, identity)
        state.keys.extend(request.all_token_ids)
        return state

    def leaks_adapters(self, scheduler_output: SchedulerOutput) -> bool:
        """Whether the step may compute a request with an adapter, even one that bypasses the cache.
        Requests whose first step was not seen here count. Call for each step if adapters leak."""
        self._plain -= scheduler_output.finished_req_ids
        for new in scheduler_output.scheduled_new_reqs:
            (self._plain.discard if new.lora_request else self._plain.add)(new.req_id)
        return not self._plain.issuperset(scheduler_output.num_scheduled_tokens)

    def computes_its_own(
        self, state: RequestState, num_tokens: int, *, leaks: bool
    ) -> tuple[bool, bool]:
        """Whether vLLM computes the next ``num_tokens`` from what the request's keys name, and
        whether all later tokens too, as long as no rank reports other adapters. ``leaks``: the
        step's adapters leak."""
        identity, start = state.keys.identity, state.request.num_computed_tokens
        end, spans = start + num_tokens, identity.multimodal
        if leaks and identity.lora is None:
            return False, False
        if not self.identifier.adapters.may_compute(state.request, identity.lora):
            return False, False
        if spans and not self._encoders.vouches(state.request, spans, start, end):
            return False, False
        # vLLM splits an image of a mm-prefix model only if a step begins in it, as after a hit.
        is_split = any(span.start < end < span.end for span in spans)
        if is_split and self.settings.is_mm_prefix_lm:
            return False, False
        # A rank lists an adapter that it reloads in place only after the reload.
        is_sure = start > 0 if identity.lora is not None else not self.settings.adapters_leak
        return True, is_sure and all(span.end <= end for span in spans)

    def is_shared(self, state: RequestState) -> bool:
        """Whether other instances use the same keys as this request."""
        return state.keys.identity.weights == self.epochs.name

    def has_current_keys(self, state: RequestState) -> bool:
        """Whether later requests would look up the same keys."""
        identity = state.keys.identity
        return identity.weights == self.epochs.epoch(identity.kv_root)

    def finish(self, request: Request) -> RequestState | None:
        """vLLM has finished the request. Returns its state; ``None`` without one."""
        self.identifier.forget(request)
        state = self._states.pop(request.request_id, None)
        if state is not None:
            state.lookup.cancel()
        return state

    def forget_all(self) -> None:
        self._states.clear()
        self._plain.clear()
        self._encoders.clear()
        self.identifier.forget_all()

    # -- all requests --------------------------------------------------------------------------

    def of_adapters(self, adapters: Collection[AdapterRef]) -> list[RequestState]:
        """Requests whose keys name one of ``adapters``."""
        return [state for state in self._states.values() if adapter_of(state) in adapters]

    def step_planned(self, scheduler_output: SchedulerOutput) -> None:
        """Give up on requests in the step that are still unread: their KV cannot be named."""
        for new in scheduler_output.scheduled_new_reqs:
            self.identifier.give_up(new.req_id)
        if scheduler_output.free_encoder_mm_hashes or scheduler_output.scheduled_encoder_inputs:
            self._encoders.next_step(scheduler_output, self.identifier.multimodal)

    def drop_all(self) -> list[RequestState]:
        """Drop and return all requests: the weights may no longer be those in their keys."""
        states = list(self._states.values())
        self._states.clear()
        for state in states:
            state.lookup.cancel()
        return states

    def forget_encoded(self) -> None:
        """Encoder outputs may come from other weights."""
        self._encoders.clear()

    def rename(self, weights: str) -> None:
        """The weights have a new name: every root is shared again."""
        self._show_root(0.0)
        self.epochs.rename(weights)
        self._show_root(1.0)
        self.forget_encoded()
        self._count_apart()

    def separate(self, root: bytes, others: Iterable[RequestState] = ()) -> list[RequestState]:
        """KV loaded under ``root`` may be wrong: give the root a new epoch. Returns its requests,
        under their new keys; ``others`` are some that may have left."""
        self.epochs.separate(root)
        self._count_apart()
        known = {id(state): state for state in (*self._states.values(), *others)}
        rekeyed = [s for s in known.values() if s.keys.identity.kv_root == root]
        for state in rekeyed:
            state.reset(self._current_keys(state.keys.identity))
        return rekeyed

    def close(self) -> None:
        self.identifier.close()

    # -- details -------------------------------------------------------------------------------

    def _new_state(self, request: Request, identity: RequestIdentity) -> RequestState:
        hints = read_hints(identity.cache_salt, request.kv_transfer_params, request.kv_hints)
        self.tally.count("retention_hints", "taken", amount=hints.num_taken)
        self.tally.count("retention_hints", "ignored", amount=hints.num_ignored)
        keys = self._current_keys(identity)
        transfer = self.part_of(request)
        if transfer == NO_TRANSFER:
            transfer = Transfer.of(request.kv_transfer_params, self.settings)
        if (transfer.stores or transfer.loads) and self.settings.has_tails:
            keys.extend(request.all_token_ids)
            prompt = request.all_token_ids[: request.num_prompt_tokens]
            keys.name_tail(prompt, loads=transfer.loads)
        return RequestState(request, keys, claim=hints.claim, transfer=transfer)

    def _current_keys(self, identity: RequestIdentity) -> RequestKeys:
        name = self.epochs.epoch(identity.kv_root)
        return RequestKeys(self.start.known_hasher, replace(identity, weights=name))

    def _show_root(self, value: float) -> None:
        """Set metric ``info``: 1 for the root of plain requests, 0 for the one before."""
        if not self.epochs.name:
            return
        identity = RequestIdentity(weights=self.epochs.name)
        root = self.start.known_hasher.root_digest(identity.root())
        self.tally.set("info", root, __version__, value=value)
        if value:
            logger.info("lmcache-connector: root %s: instances with this root share KV", root)

    def _count_apart(self) -> None:
        self.tally.set("roots_apart", value=self.epochs.num_apart())
