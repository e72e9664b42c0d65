"""Where hits are likely to end: what windows need there is stored, and elsewhere it is not.

Of a model with windows of 1,024 tokens in five layers of six, the windows before every chunk would
take five times the bytes of the rest. A hit ends where a prompt ended before, where one prompt
parted from another, or wherever an answer broke off; and every few windows, for all else.
"""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_connector.kv_parts.hit import chunks_to_load
from lmcache_connector.kv_parts.part import Part

_WINDOWS_PER_END = 8


class PlannedEnds:
    """``window_interval``: the most tokens between two planned ends; ``None``: 8 windows."""

    def __init__(self, parts: Sequence[Part], chunk_size: int, window_interval: int | None) -> None:
        self._chunk_size = chunk_size
        if window_interval is None:
            window_interval = _WINDOWS_PER_END * max(part.span for part in parts)
        self._interval_chunks = max(1, -(-window_interval // chunk_size))

    def need(
        self, num_prompt_tokens: int, junction: int, tail_end: int, part: Part, chunk: int
    ) -> bool:
        """Whether a hit that ends where one is planned to needs this chunk of a window.
        ``junction``: the chunk before which others part from the prompt. ``tail_end``: the token
        before which it is handed over; 0 if it is not."""
        size, end = self._chunk_size, self._next(num_prompt_tokens, junction, chunk)
        ends = end * size, tail_end
        return any(chunk in chunks_to_load(part, size, 0, end_token) for end_token in ends)

    def _next(self, num_tokens: int, junction: int, chunk: int) -> int:
        """The first planned end after a chunk."""
        size = self._chunk_size
        last = num_tokens // size
        if chunk >= last:
            return chunk + 1
        again = (num_tokens - 1) // size  # the same prompt: its last token is computed
        # An audit leaves one more chunk of it to compute.
        ends = (again - 1, again, last, junction)
        every = (chunk // self._interval_chunks + 1) * self._interval_chunks
        return min(every, *(end for end in ends if end > chunk))
