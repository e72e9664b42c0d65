"""What vLLM's encoder cache holds, seen as it is filled.

vLLM keeps an encoder's output under the item's identifier, which may be a counter or a client's
word, and takes it for every later item of that name. A request's own item then says nothing of what
its KV was computed with: what was encoded under the name does. The encoder cache's entries come and
go with the scheduler's output, so that this needs no bound of its own. Runs on the scheduler's
thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lmcache_connector.keys.request_keys import MultimodalSpan

if TYPE_CHECKING:
    from lmcache_connector.vllm_compat.api.names import Request, SchedulerOutput

Spans = tuple[MultimodalSpan, ...]


class EncoderWitness:
    """Knows by its content what lies in the encoder cache under each identifier."""

    def __init__(self) -> None:
        self._inputs: dict[str, str | None] = {}  # None: nobody can say which of several

    def __len__(self) -> int:
        return len(self._inputs)

    def clear(self) -> None:
        """What was encoded before counts no longer."""
        self._inputs.clear()

    def next_step(
        self, output: SchedulerOutput, find: Callable[[str], tuple[Request, Spans | None] | None]
    ) -> None:
        """Learn what the step about to run encodes, and which outputs it lets go of before.

        ``find(request_id)``: the request with the spans of its items, one each; ``None`` where
        nothing is known of their content, or of the request.
        """
        for identifier in output.free_encoder_mm_hashes:
            self._inputs.pop(identifier, None)
        for request_id, item_ids in output.scheduled_encoder_inputs.items():
            if (found := find(request_id)) is None:
                self.clear()  # under whatever name
                continue
            request, spans = found
            for i in item_ids:
                encoded = spans[i].encoder_input if spans is not None else None
                self._encoded(request.mm_features[i].identifier, encoded)

    def vouches(self, request: Request, spans: Spans, start: int, end: int) -> bool:
        """Whether the tokens ``[start, end)`` of a request read the outputs of its own items."""
        return all(
            self._inputs.get(feature.identifier) == span.encoder_input
            for span, feature in zip(spans, request.mm_features, strict=True)
            if span.start < end and span.end > start and _reads(feature.mm_position, start, end)
        )

    def _encoded(self, identifier: str, encoder_input: str | None) -> None:
        """An output already there is replaced by one model runner, and kept by the other."""
        known = self._inputs.get(identifier, encoder_input)
        self._inputs[identifier] = encoder_input if known == encoder_input else None


def _reads(position: object, start: int, end: int) -> bool:
    """Whether a placeholder takes any of its encoder's output at the tokens ``[start, end)``."""
    offset, length = position.offset, position.length  # type: ignore[attr-defined]
    first, last = position.get_embeds_indices_in_range(  # type: ignore[attr-defined]
        max(0, start - offset), min(length, end - offset)
    )
    return bool(last > first)
