"""Tracks the contents of vLLM's encoder cache.

vLLM caches an encoder's output under the item's identifier, which may be a counter or chosen by the
client, and uses it for every later item with that identifier. A request's KV then depends on the
item that was encoded, not on the request's own. Entries come and go with the scheduler's output, so
they need no limit here. Runs on the scheduler's thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lmcache_connector.keys.request_keys import MultimodalSpan

if TYPE_CHECKING:
    from lmcache_connector.vllm_compat.api.names import Request, SchedulerOutput

Spans = tuple[MultimodalSpan, ...]


class EncoderWitness:
    """Maps each identifier in the encoder cache to the content that was encoded."""

    def __init__(self) -> None:
        self._inputs: dict[str, str | None] = {}  # None: one of several contents

    def __len__(self) -> int:
        return len(self._inputs)

    def clear(self) -> None:
        self._inputs.clear()

    def next_step(
        self, output: SchedulerOutput, find: Callable[[str], tuple[Request, Spans | None] | None]
    ) -> None:
        """Record which outputs the step about to run frees, and which it encodes.

        ``find(request_id)`` returns the request and the spans of its items, one per item (``None``
        if their content is unknown), or ``None`` for an unknown request.
        """
        for identifier in output.free_encoder_mm_hashes:
            self._inputs.pop(identifier, None)
        for request_id, item_ids in output.scheduled_encoder_inputs.items():
            if (found := find(request_id)) is None:
                self.clear()  # its identifiers are unknown
                continue
            request, spans = found
            for i in item_ids:
                encoded = spans[i].encoder_input if spans is not None else None
                self._encoded(request.mm_features[i].identifier, encoded)

    def vouches(self, request: Request, spans: Spans, start: int, end: int) -> bool:
        """Whether tokens ``[start, end)`` of a request use encoder outputs of its own items."""
        return all(
            self._inputs.get(feature.identifier) == span.encoder_input
            for span, feature in zip(spans, request.mm_features, strict=True)
            if span.start < end and span.end > start and _reads(feature.mm_position, start, end)
        )

    def _encoded(self, identifier: str, encoder_input: str | None) -> None:
        """Of two outputs for one identifier, one of vLLM's model runners keeps the first, the other
        the last."""
        known = self._inputs.get(identifier, encoder_input)
        self._inputs[identifier] = encoder_input if known == encoder_input else None


def _reads(position: object, start: int, end: int) -> bool:
    """Whether the placeholder's tokens in ``[start, end)`` use any encoder output."""
    offset, length = position.offset, position.length  # type: ignore[attr-defined]
    first, last = position.get_embeds_indices_in_range(  # type: ignore[attr-defined]
        max(0, start - offset), min(length, end - offset)
    )
    return bool(last > first)
