"""Where a hit may end, and which chunks a load that ends there needs.

With full attention only, a hit may end after any chunk of the leading run. With other parts, a hit
may end where every part has the chunks it needs::

    chunk        0  1  2  3  4  5  6  7
    full         x  x  x  x  x  x  x
    window       x  x        x  x         a hit may end after chunk 0, 1 (needs 0, 1) or 5 (4, 5)

vLLM recomputes the last token of a prompt that was found whole. For that, the window stored for
the prompt's end begins a token too late, and the state has seen the token: the hit ends earlier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lmcache_connector.kv_parts.part import Part, Rule


@dataclass(frozen=True, slots=True)
class Hit:
    """A hit. Chunks are numbered from the request's first. A load begins in chunk ``first``, and
    ends before one of the chunks ``ends`` (ascending). Before chunk ``shared_end``, every part with
    full attention has all chunks."""

    first: int
    ends: Sequence[int] = ()
    shared_end: int = 0

    def __bool__(self) -> bool:
        return bool(self.ends)

    @property
    def stop(self) -> int:
        """The largest end; ``first`` without any."""
        return self.ends[-1] if self.ends else self.first

    def up_to(self, chunk: int) -> Hit:
        """The hit, cut short to end before ``chunk`` at the latest."""
        if chunk >= self.stop:
            return self
        if isinstance(self.ends, range):
            return replace(self, ends=range(self.first + 1, max(self.first, chunk) + 1))
        return replace(self, ends=tuple(end for end in self.ends if end <= chunk))


def is_prefix_only(parts: Sequence[Part]) -> bool:
    """Whether the model's only part is full attention: any leading run of chunks is a hit."""
    return len(parts) == 1 and parts[0].rule is Rule.PREFIX


def first_token_to_load(part: Part, num_local_tokens: int, end_token: int) -> int:
    """The token from which a load of this part up to ``end_token`` fills blocks: the start of the
    block with the first token needed, but not before the ``num_local_tokens`` that vLLM has."""
    return max(part.first_needed(end_token) // part.block_size * part.block_size, num_local_tokens)


def chunks_to_load(part: Part, chunk_size: int, num_local_tokens: int, end_token: int) -> range:
    """The chunks of this part that a load up to ``end_token`` must bring."""
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
    """The hit of a request with ``num_tokens``, of which vLLM has ``num_local_tokens``.

    ``held[p][i]``: some tier has part p of chunk ``num_local_tokens // chunk_size + i``. Linear in
    the number of chunks. ``end_token``: end of the last chunk, if that is a tail.
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
    """For each end from chunk ``first`` on: the token where the run that ends there begins."""
    starts = [start := first * chunk_size]
    for chunk, is_there in enumerate(there, first + 1):
        start = start if is_there else chunk * chunk_size
        starts.append(start)
    return starts


_WINDOWS_BETWEEN_ENDS = 8


class PlannedEnds:
    """Where hits are likely to end, so that windows are stored there and not elsewhere.

    If five layers of six have windows, windows before the end of every chunk would take five times
    the bytes of the sixth layer. Hits end where an earlier prompt ended, where two prompts diverge,
    or in an answer. In between, windows are stored at regular intervals of ``window_interval``
    tokens, rounded up to whole chunks; ``None``: 8 times the widest window."""

    def __init__(self, parts: Sequence[Part], chunk_size: int, window_interval: int | None) -> None:
        self._chunk_size = chunk_size
        if window_interval is None:
            window_interval = _WINDOWS_BETWEEN_ENDS * max(part.span for part in parts)
        self._interval_chunks = max(1, -(-window_interval // chunk_size))

    def needs(self, num_prompt_tokens: int, junction: int, part: Part, chunk: int) -> bool:
        """Whether a hit at the next planned end needs this chunk of a window. A hit with a tail
        needs no chunks beyond these, since the tail directly follows a planned end. ``junction``:
        number of leading chunks shared with other prompts."""
        size, end = self._chunk_size, self._next(num_prompt_tokens, junction, chunk)
        return chunk in chunks_to_load(part, size, 0, end * size)

    def _next(self, num_tokens: int, junction: int, chunk: int) -> int:
        """The first planned end after ``chunk``."""
        size = self._chunk_size
        last = num_tokens // size
        if chunk >= last:
            return chunk + 1
        again = (num_tokens - 1) // size  # for the same prompt, whose last token is recomputed
        # An audit recomputes one more chunk.
        ends = (again - 1, again, last, junction)
        every = (chunk // self._interval_chunks + 1) * self._interval_chunks
        return min(every, *(end for end in ends if end > chunk))
