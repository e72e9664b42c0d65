"""Where a hit may end, and what a load that ends there must bring.

A hit of a model with full attention alone may end after any chunk of the leading run. Where there
are other parts as well, it may end where every part has what it needs::

    chunk        0  1  2  3  4  5  6  7
    full         x  x  x  x  x  x  x
    window       x  x        x  x         a hit may end after chunk 1 (needs 0 and 1), or 5 (4, 5)

vLLM computes the last token of a prompt again when all of it was found. A window that ends with the
prompt does not reach back far enough for that, and a state is past it: such a hit ends before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lmcache_connector.kv_parts.part import Part, Rule


@dataclass(frozen=True, slots=True)
class Hit:
    """Chunks are counted from the request's first. A load of it begins in chunk ``first``, and ends
    before any chunk of ``ends``, which ascend. Parts that need all chunks have those before chunk
    ``shared_end``."""

    first: int
    ends: Sequence[int] = ()
    shared_end: int = 0

    def __bool__(self) -> bool:
        return bool(self.ends)

    @property
    def stop(self) -> int:
        """Its largest end; ``first`` if there is none."""
        return self.ends[-1] if self.ends else self.first

    def up_to(self, chunk: int) -> Hit:
        """The part of it that ends before ``chunk``, at the latest."""
        if chunk >= self.stop:
            return self
        if isinstance(self.ends, range):
            return replace(self, ends=range(self.first + 1, max(self.first, chunk) + 1))
        return replace(self, ends=tuple(end for end in self.ends if end <= chunk))


def is_prefix_only(parts: Sequence[Part]) -> bool:
    """Whether the model has full attention alone, with one shape: any leading run of chunks is a
    hit."""
    return len(parts) == 1 and parts[0].rule is Rule.PREFIX


def first_token_to_load(part: Part, num_local_tokens: int, end_token: int) -> int:
    """Where the blocks begin that a load of this part up to ``end_token`` fills: vLLM has those of
    the first ``num_local_tokens``, and leaves out what is not needed."""
    return max(part.first_needed(end_token) // part.block_size * part.block_size, num_local_tokens)


def chunks_to_load(part: Part, chunk_size: int, num_local_tokens: int, end_token: int) -> range:
    """The chunks of this part that a load must bring which ends before ``end_token``."""
    first_token = max(part.first_needed(end_token), num_local_tokens)
    return range(first_token // chunk_size, -(-end_token // chunk_size))


def find_hit(
    parts: Sequence[Part],
    chunk_size: int,
    num_local_tokens: int,
    num_tokens: int,
    held: Sequence[Sequence[bool]],
    end_token: int | None = None,
) -> Hit:
    """Where a hit of a request with ``num_tokens`` may end, of which vLLM has ``num_local_tokens``.

    ``held[p][i]``: some tier has part p of chunk ``num_local_tokens // chunk_size + i``. Linear in
    the number of chunks. ``end_token``: where the last one ends, if it is a tail.
    """
    first = num_local_tokens // chunk_size
    last_end = first + len(held[0])
    for part, there in zip(parts, held, strict=True):
        if part.rule is Rule.PREFIX:
            last_end = min(last_end, first + num_leading(there))
    if is_prefix_only(parts):
        return Hit(first, range(first + 1, last_end + 1), last_end)
    if end_token is None:
        end_token = (num_tokens - 1) // chunk_size * chunk_size
    last_end = min(last_end, -(-end_token // chunk_size))
    ends = list(range(first + 1, last_end + 1))
    for part, there in zip(parts, held, strict=True):
        if part.rule is not Rule.PREFIX:
            starts = _run_starts(there, first, chunk_size)
            ends = [
                end
                for end in ends
                if starts[end - first]
                <= max(part.first_needed(min(end * chunk_size, end_token)), num_local_tokens)
            ]
    return Hit(first, tuple(ends), last_end)


def num_leading(are_there: Sequence[bool]) -> int:
    """How many come before the first ``False``."""
    return are_there.index(False) if False in are_there else len(are_there)


def _run_starts(there: Sequence[bool], first: int, chunk_size: int) -> list[int]:
    """For each end from chunk ``first`` on: where the run of chunks that ends there begins."""
    starts = [start := first * chunk_size]
    for chunk, is_there in enumerate(there, first + 1):
        start = start if is_there else chunk * chunk_size
        starts.append(start)
    return starts


_WINDOWS_PER_END = 8


class PlannedEnds:
    """Where hits are likely to end: what windows need there is stored, and elsewhere it is not.

    Of a model with windows of 1,024 tokens in five layers of six, the windows before every chunk
    would take five times the bytes of the rest. A hit ends where a prompt ended before, where one
    prompt parted from another, or wherever an answer broke off; and every few windows, for all
    else. ``window_interval``: the most tokens between two planned ends; ``None``: 8 windows."""

    def __init__(self, parts: Sequence[Part], chunk_size: int, window_interval: int | None) -> None:
        self._chunk_size = chunk_size
        if window_interval is None:
            window_interval = _WINDOWS_PER_END * max(part.span for part in parts)
        self._interval_chunks = max(1, -(-window_interval // chunk_size))

    def need(self, num_prompt_tokens: int, junction: int, part: Part, chunk: int) -> bool:
        """Whether a hit that ends where one is planned to needs this chunk of a window. A tail
        needs no other: it ends in the chunk behind such an end.
        ``junction``: the chunk before which others part from the prompt."""
        size, end = self._chunk_size, self._next(num_prompt_tokens, junction, chunk)
        return chunk in chunks_to_load(part, size, 0, end * size)

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
