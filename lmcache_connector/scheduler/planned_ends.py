"""Where hits are likely to end: what windows need there is stored, and elsewhere it is not.

Of a model with windows of 1,024 tokens in five layers of six, the windows before every chunk would
take five times the bytes of the rest. A hit ends where a prompt ended before, where one prompt
parted from another, or wherever an answer broke off; and every few windows, for all else.
"""

from __future__ import annotations

from lmcache_connector.kv_parts.hit import chunks_to_load
from lmcache_connector.kv_parts.part import Part
from lmcache_connector.scheduler.request_state import RequestState, SchedulerSettings

_WINDOWS_PER_END = 8


class PlannedEnds:
    """``window_interval`` of the settings: the most tokens between two planned ends."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self._chunk_size = settings.chunk_size
        interval = settings.window_interval
        if interval is None:
            interval = _WINDOWS_PER_END * max(part.span for part in settings.parts)
        self._interval_chunks = max(1, -(-interval // settings.chunk_size))

    def need(self, state: RequestState, part: Part, chunk: int) -> bool:
        """Whether a hit that ends where one is planned to needs this chunk of a window."""
        end = self._next(state, chunk)
        return chunk >= chunks_to_load(part, self._chunk_size, 0, end).start

    def _next(self, state: RequestState, chunk: int) -> int:
        """The first planned end after a chunk."""
        num_tokens, size = state.request.num_prompt_tokens, self._chunk_size
        last = num_tokens // size
        if chunk >= last:
            return chunk + 1
        again = (num_tokens - 1) // size  # the same prompt: its last token is computed
        # An audit leaves one more chunk of it to compute.
        ends = (again - 1, again, last, state.store.junction)
        every = (chunk // self._interval_chunks + 1) * self._interval_chunks
        return min(every, *(end for end in ends if end > chunk))
