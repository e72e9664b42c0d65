"""The requests in flight, each under the keys that its root has now.

A request is entered once all ranks have told which model they run, and its content is read. After a
reset, or an audit that found other KV, its root has another epoch: the request goes on under other
keys. On *probation* it is also looked up under the keys from before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from lmcache_connector.audit.limits import Verdict
from lmcache_connector.audit.root_epochs import RootEpochs, RootState
from lmcache_connector.errors import ConfigError
from lmcache_connector.keys.request_keys import RequestIdentity, RequestKeys
from lmcache_connector.lookup.request_lookup import RequestLookup
from lmcache_connector.metrics.tally import Tally
from lmcache_connector.plans import AdapterRef
from lmcache_connector.requests.encoder_witness import EncoderWitness
from lmcache_connector.requests.identifier import UNREAD, NotYet, RequestIdentifier
from lmcache_connector.retention.hints import read_hints
from lmcache_connector.scheduler.auditor import Finding
from lmcache_connector.scheduler.engine_start import EngineStart
from lmcache_connector.scheduler.request_state import AuditState, RequestState
from lmcache_connector.scheduler.store_planner import adapter_of
from lmcache_connector.threads import StepWait

if TYPE_CHECKING:
    from lmcache_connector.vllm_compat.api.names import Request, SchedulerOutput

logger = logging.getLogger(__name__)

_AFTER_RESET = {
    RootState.SHARED: "its weights have a new label, under which it shares KV from now on.",
    RootState.PROBATION: "it loads nothing from before, and shares KV with no other instance, until"
    " an audit finds that its weights are the same.",
    RootState.APART: "it loads nothing from before, and shares KV with no other instance.",
}


class RequestBook:
    """Owns which requests there are, and their keys. ``states``: all of them, by id. ``adapters``:
    of those that vLLM has in its queue.

    ``start`` makes the hasher, ``identifier`` says what makes a request's KV unique, ``epochs``
    tells whose keys a root has. ``read_label()`` names the weights at a reset; it raises
    ``ConfigError`` if it cannot. ``audits``: they shall find out what a reset leaves open.
    """

    def __init__(
        self,
        start: EngineStart,
        identifier: RequestIdentifier,
        epochs: RootEpochs,
        tally: Tally,
        read_label: Callable[[], str],
        *,
        audits: bool,
    ) -> None:
        self.start = start
        self.epochs = epochs
        self.adapters = identifier.adapters
        self._identifier = identifier
        self._encoders = EncoderWitness()
        self._tally = tally
        self._read_label = read_label
        self._audits = audits
        self._states: dict[str, RequestState] = {}
        self.states: Mapping[str, RequestState] = self._states

    def __len__(self) -> int:
        """Requests in flight, and finished ones with open jobs."""
        return len(self._states)

    def get(self, request_id: str) -> RequestState | None:
        return self._states.get(request_id)

    # -- one request ---------------------------------------------------------------------------

    def enter(
        self, request: Request, wait: StepWait | None = None
    ) -> RequestState | Literal[NotYet.UNREAD] | None:
        """The request with all its full chunks hashed. ``UNREAD``: ask again, nothing can be said
        of it yet, though it was waited for as ``wait`` allows. ``None``: it bypasses us."""
        if self.start.hasher is None:
            return UNREAD if self.start.is_awaited() else None
        state = self._states.get(request.request_id)
        if state is None or state.request is not request:
            identity = self._identifier.identify(request, wait)
            if not isinstance(identity, RequestIdentity):
                return UNREAD if identity is UNREAD else None
            state = self._states[request.request_id] = self._new_state(request, identity)
        state.keys.extend(request.all_token_ids)
        return state

    def is_current(self, request: Request, wait: StepWait | None) -> bool | NotYet:
        """Whether vLLM would still compute what the request's keys name. ``UNREAD``: ask again."""
        return self._identifier.is_current(request, wait)

    def computes_its_own(self, state: RequestState, num_tokens: int) -> tuple[bool, bool]:
        """Whether vLLM computes the request's next tokens from what the request's keys name; and
        whether that is sure of all that follow, as long as no rank lists other adapters."""
        identity, start = state.keys.identity, state.request.num_computed_tokens
        end, spans = start + num_tokens, identity.multimodal
        if not self._identifier.adapters.may_compute(state.request, identity.lora):
            return False, False
        if spans and not self._encoders.vouches(state.request, spans, start, end):
            return False, False
        # An adapter that is read in place is not listed before it is.
        is_sure = identity.lora is None or start > 0
        return True, is_sure and all(span.end <= end for span in spans)

    def is_shared(self, state: RequestState) -> bool:
        """Whether the request's keys are not this instance's alone."""
        return state.keys.identity.weight_epoch == self.epochs.shared_epoch

    def has_current_keys(self, state: RequestState) -> bool:
        """Whether a later request would look for this one's keys."""
        identity = state.keys.identity
        return identity.weight_epoch == self.epochs.epoch(identity.kv_root)

    def finish(self, request: Request) -> RequestState | None:
        """vLLM is done with the request. Returns it, unless it bypassed us or had finished."""
        self._identifier.forget(request)
        state = self._states.get(request.request_id)
        if state is None or state.is_finished:
            return None
        state.is_finished = True
        state.lookup.cancel()
        return state

    def forget_if_done(self, state: RequestState) -> None:
        """Nothing is kept of a finished request once its jobs have ended."""
        if not state.is_finished or state.has_jobs:
            return
        if self._states.get(state.request.request_id) is state:
            del self._states[state.request.request_id]

    # -- all requests --------------------------------------------------------------------------

    def of_adapters(self, adapters: Collection[AdapterRef]) -> list[RequestState]:
        """Those named as computed with one of these."""
        return [state for state in self._states.values() if adapter_of(state) in adapters]

    def step_planned(self, scheduler_output: SchedulerOutput) -> None:
        """A step is about to run: what it computes of requests not read by now, nobody can name."""
        for new in scheduler_output.scheduled_new_reqs:
            self._identifier.give_up(new.req_id)
        if scheduler_output.free_encoder_mm_hashes or scheduler_output.scheduled_encoder_inputs:
            self._encoders.next_step(scheduler_output, self._identifier.multimodal)

    def reset(self) -> list[RequestState]:
        """The weights may have changed. Returns all requests, under the keys they have now."""
        state = self.epochs.reset(self._label(), audits=self._audits)
        logger.warning("The KV cache was reset: %s", _AFTER_RESET[state])
        self._count_apart()
        self._encoders.clear()
        return self._rekey(self._states.values())

    def follow(self, finding: Finding) -> list[RequestState] | None:
        """Do what an audit calls for. If what was loaded under the root may be wrong, returns its
        requests, under the keys they have now; else ``None``."""
        root, verdict = finding.root, finding.verdict
        # Of requests that queued on probation together, another may have ended it meanwhile.
        state = self.epochs.state(root)
        rekeyed = None
        if verdict is Verdict.MISMATCH and finding.strict and state is not RootState.SHARED:
            self.epochs.separate(root, keeps_keys=True)
        elif verdict is Verdict.MISMATCH:
            self.epochs.separate(root, keeps_keys=False)
            rekeyed = self._rekey(
                s for s in self._states.values() if s.keys.identity.kv_root == root
            )
        elif verdict is Verdict.MATCH and finding.strict and state is RootState.PROBATION:
            self.epochs.restore(root)
            logger.warning("An audit found the weights unchanged: KV is shared again.")
        self._count_apart()
        return rekeyed

    def close(self) -> None:
        self._identifier.close()

    # -- details -------------------------------------------------------------------------------

    def _new_state(self, request: Request, identity: RequestIdentity) -> RequestState:
        shared = None
        if self.epochs.state(identity.kv_root) is RootState.PROBATION:
            keys = self._keys(identity, self.epochs.shared_epoch)
            keys.extend(request.all_token_ids)
            shared = RequestLookup(request, keys, is_counted=True)
        hints = read_hints(identity.cache_salt, request.kv_transfer_params, request.kv_hints)
        self._tally.count("retention_hints", "taken", amount=hints.num_taken)
        self._tally.count("retention_hints", "ignored", amount=hints.num_ignored)
        return RequestState(
            request,
            self._current_keys(identity),
            claim=hints.claim,
            audit=AuditState(shared=shared),
        )

    def _rekey(self, states: Iterable[RequestState]) -> list[RequestState]:
        rekeyed = list(states)
        for state in rekeyed:
            state.reset(self._current_keys(state.keys.identity))
        return rekeyed

    def _current_keys(self, identity: RequestIdentity) -> RequestKeys:
        return self._keys(identity, self.epochs.epoch(identity.kv_root))

    def _keys(self, identity: RequestIdentity, epoch: str) -> RequestKeys:
        return RequestKeys(self.start.known_hasher, replace(identity, weight_epoch=epoch))

    def _label(self) -> str:
        try:
            return self._read_label()
        except ConfigError as error:
            logger.error("%s. The weights count as unknown.", error)
            return self.epochs.label

    def _count_apart(self) -> None:
        self._tally.set("roots_apart", value=self.epochs.num_apart())
