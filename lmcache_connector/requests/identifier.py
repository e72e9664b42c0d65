"""Determines what makes the KV of a vLLM request unique.

A plain request is identified at once. Images, prompt embeddings and LoRA adapters are read in the
background; meanwhile the caller has to ask again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from lmcache_connector.keys.request_keys import MultimodalSpan, RequestIdentity
from lmcache_connector.requests.adapters import Adapters
from lmcache_connector.requests.content_digest import (
    EmbedsDigest,
    ItemDigests,
    NoContentError,
    mask_digest,
)
from lmcache_connector.requests.request_fields import UnknownFields
from lmcache_connector.threads import PENDING, Background, Pending, StepWait, Task

if TYPE_CHECKING:
    from lmcache_connector.vllm_compat.api.names import Request

logger = logging.getLogger(__name__)


class Bypass(Enum):
    """Why a request bypasses the tiers. The values are labels of a metric."""

    NO_SALT = "no_salt"
    POOLING = "pooling"
    SESSION = "session"
    UNKNOWN_FIELD = "unknown_field"
    ADAPTER = "adapter"
    MULTIMODAL = "multimodal"
    EMBEDDINGS = "embeddings"


Identified = RequestIdentity | Bypass
Spans = tuple[MultimodalSpan, ...]


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Digests of a request's inputs other than token ids."""

    spans: Spans
    embeds: EmbedsDigest | None


@dataclass(slots=True)
class _Open:
    """State of a request that is not plain, until it ends."""

    request: Request
    inputs: Task[_Inputs] | None = None
    adapter: Task[str] | None = None
    question: int = 0  # the number of the question to the ranks
    is_queued: bool = False  # counted in the queue of its adapter
    found: Identified | None = None


class RequestIdentifier:
    """Turns requests into identities. Runs on the scheduler's thread. ``chunk_size``: in tokens,
    the unit of embeddings' digests. ``count`` is called for each request that bypasses.
    """

    def __init__(
        self,
        require_cache_salt: bool,
        adapters: Adapters,
        chunk_size: int = 128,
        count: Callable[[Bypass], None] = lambda reason: None,
    ) -> None:
        self._require_cache_salt = require_cache_salt
        self.adapters = adapters
        self._chunk_size = chunk_size
        self._count = count
        self._unknown = UnknownFields()
        self._items = ItemDigests()
        self._reads = Background("lmc-inputs")
        self._open: dict[str, _Open] = {}

    def identify(self, request: Request, wait: StepWait | None = None) -> Identified | Pending:
        """Waits for content as long as ``wait`` allows. ``PENDING``: ask again, until the request
        runs. Call it first when the request arrives, and :meth:`forget` when it has ended.
        """
        opened = self._open.get(request.request_id)
        if opened is None or opened.request is not request:
            opened = self._begin(request)
            if opened is None:
                return RequestIdentity(request.cache_salt)
        if opened.found is None:
            found = self._settle(opened, wait)
            if found is None:
                return PENDING
            self._set(opened, found)
        assert opened.found is not None
        return opened.found

    def multimodal(self, request_id: str) -> tuple[Request, Spans | None] | None:
        """The request and the spans of its multimodal items (``None`` unless it is identified);
        ``None`` in place of the pair for a plain or unknown request."""
        opened = self._open.get(request_id)
        if opened is None:
            return None
        found = opened.found
        return opened.request, found.multimodal if isinstance(found, RequestIdentity) else None

    def give_up(self, request_id: str) -> None:
        """The request starts to run: if its content is not known yet, it bypasses the tiers."""
        opened = self._open.get(request_id)
        if opened is None:
            return
        self._leave_queue(opened)
        if opened.found is None:
            self._set(opened, _bypass_reason(opened.request))

    def is_current(self, request: Request, wait: StepWait | None = None) -> bool | Pending:
        """Whether vLLM would still use the identified adapter, as far as is known. While a request
        queues, its adapter's files may change and be read again. ``PENDING``: ask again.
        """
        opened = self._open.get(request.request_id)
        if (
            opened is None
            or opened.adapter is None
            or not isinstance(opened.found, RequestIdentity)
        ):
            return True
        if not opened.is_queued:  # preempted
            self._join_queue(opened)
        reading, name = self.adapters.last_look(request.lora_request), opened.found.lora
        if not _is_read(reading, wait):
            return PENDING
        return reading.value == name and self.adapters.may_compute(request, name)

    def forget(self, request: Request) -> None:
        opened = self._open.get(request.request_id)
        if opened is not None and opened.request is request:
            self._leave_queue(opened)
            if opened.inputs is not None:
                opened.inputs.cancel()
            del self._open[request.request_id]

    def forget_all(self) -> None:
        """Treat all requests as new."""
        self._open.clear()
        self.adapters.looks.clear()

    def close(self) -> None:
        """Stop the threads, within two seconds."""
        self._reads.close()
        self.adapters.close()

    # -- details -------------------------------------------------------------------------------

    def _begin(self, request: Request) -> _Open | None:
        """Start identifying; ``None`` for a plain request, which has no state."""
        refused = self._refuse(request)
        has_inputs = bool(request.mm_features) or request.prompt_embeds is not None
        if refused is None and not has_inputs and request.lora_request is None:
            return None
        opened = self._open[request.request_id] = _Open(request)
        if refused is not None:
            self._set(opened, refused)
            return opened
        if has_inputs:
            opened.inputs = self._reads.submit(lambda: self._read_inputs(request))
        if request.lora_request is not None:
            opened.adapter = self._join_queue(opened)
            opened.question = self.adapters.ask_ahead(request.lora_request)
        return opened

    def _join_queue(self, opened: _Open) -> Task[str]:
        opened.is_queued = True
        return self.adapters.enter(opened.request.lora_request)

    def _leave_queue(self, opened: _Open) -> None:
        if opened.is_queued:
            opened.is_queued = False
            self.adapters.leave(opened.request.lora_request)

    def _refuse(self, request: Request) -> Bypass | None:
        """Why the request's fields rule the tiers out. A pooling model's attention may be
        bidirectional; a session's prompt still changes.
        """
        if self._require_cache_salt and not request.cache_salt:
            return Bypass.NO_SALT
        if request.pooling_params is not None:
            return Bypass.POOLING
        if request.resumable:
            return Bypass.SESSION
        return Bypass.UNKNOWN_FIELD if self._unknown.are_used_in(request) else None

    def _settle(self, opened: _Open, wait: StepWait | None) -> Identified | None:
        """``None`` while content is being read or a rank has not answered."""
        readings = [each for each in (opened.inputs, opened.adapter) if each is not None]
        is_read = all(_is_read(reading, wait) for reading in readings)
        if not is_read or not self._have_ranks_answered(opened):
            return None
        inputs, lora = _NOTHING, None
        if opened.inputs is not None:
            if opened.inputs.value is None:
                return _bypass_reason(opened.request)
            inputs = opened.inputs.value
        if opened.adapter is not None:
            lora = opened.adapter.value
            if lora is None or not self.adapters.will_compute(opened.request, lora):
                return Bypass.ADAPTER
        return _identity(opened.request, inputs, lora)

    def _have_ranks_answered(self, opened: _Open) -> bool:
        """Whether the ranks' reports suffice; if not, asks them."""
        adapter, reading = opened.request.lora_request, opened.adapter
        if reading is None or reading.value is None:
            return True
        if self.adapters.is_known(adapter, reading.value, opened.question):
            return True
        if not opened.question:
            opened.question = self.adapters.ask()
        return False

    def _set(self, opened: _Open, found: Identified) -> None:
        opened.found = found
        if isinstance(found, Bypass):
            self._count(found)
            if opened.inputs is not None:
                opened.inputs.cancel()

    # -- reading, on a background thread -------------------------------------------------------

    def _read_inputs(self, request: Request) -> _Inputs | None:
        try:
            embeds = None
            if request.prompt_embeds is not None:
                size, is_token = self._chunk_size, request.prompt_is_token_ids
                embeds = EmbedsDigest(request.prompt_embeds, is_token, size)
                embeds.read()
            return _Inputs(tuple(map(self._span, request.mm_features)), embeds)
        except NoContentError as error:
            logger.debug("Request %s bypasses the tiers: %s", request.request_id, error)
            return None

    def _span(self, feature: Any) -> MultimodalSpan:
        position, item = feature.mm_position, self._items.digest(feature.data)
        mask = mask_digest(position.is_embed)
        return MultimodalSpan(
            content_hash=f"{feature.modality}:{item}:{position.length}:{mask}",
            start=position.offset,
            end=position.offset + position.length,
            encoder_input=f"{feature.modality}:{item}",
        )


_NOTHING = _Inputs((), None)


def _is_read(reading: Task[Any], wait: StepWait | None) -> bool:
    return reading.is_done or (wait is not None and wait.on(reading.wait))


def _bypass_reason(request: Request) -> Bypass:
    """The bypass reason of a request that could not be identified."""
    if request.mm_features:
        return Bypass.MULTIMODAL
    return Bypass.EMBEDDINGS if request.prompt_embeds is not None else Bypass.ADAPTER


def _identity(request: Request, inputs: _Inputs, lora: str | None) -> RequestIdentity:
    adapter = request.lora_request
    return RequestIdentity(
        cache_salt=request.cache_salt,
        lora=lora,
        lora_number=adapter.lora_int_id if adapter is not None else 0,
        # vLLM prefixes an item's identifier with the adapter's name if the encoder is adapted too.
        multimodal=tuple(
            span
            if feature.identifier == feature.mm_hash
            else replace(span, encoder_input=f"{span.encoder_input}:{lora}")
            for span, feature in zip(inputs.spans, request.mm_features, strict=True)
        ),
        embeds_digest=inputs.embeds,
    )
