"""Input and output of the cost model."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from lmcache_connector.plans import Tier


class Reason(Enum):
    """The reason for a decision; a metrics label."""

    ALWAYS = "always"
    UNMEASURED = "unmeasured"
    LOAD_FASTER = "load_faster"
    COMPUTE_FASTER = "compute_faster"
    SOURCE_STALLED = "source_stalled"


@dataclass(frozen=True, slots=True)
class LoadOffer:
    """A hit to decide on, of at least one chunk.

    ``context_tokens`` of ``prompt_tokens`` are computed. ``tiers``: the tier of each chunk of the
    hit, in prompt order; the first chunk may be computed in part. ``chunk_bytes``: bytes per chunk
    on the rank with the largest share. ``queued_bytes``: bytes per tier ahead of this load, which
    can begin after ``wait_seconds``.
    ``step_seconds``: length of the coming steps, ``None`` if nothing runs in them.
    ``num_waiting``: requests that no step has begun, this one included.

    ``ends`` lists, in ascending order, the numbers of chunks after which a load may end; empty: any
    number. A load of ``n`` chunks also needs ``other_bytes(n)`` of each tier.

    A load of at most ``num_firm`` chunks and ``in_step_seconds`` runs inside the step.
    """

    context_tokens: int
    prompt_tokens: int
    chunk_tokens: int
    chunk_bytes: int
    tiers: tuple[Tier, ...]
    queued_bytes: Mapping[Tier, int] = field(default_factory=dict)
    wait_seconds: float = 0.0
    step_seconds: float | None = None
    num_waiting: int = 1
    ends: Sequence[int] = ()
    other_bytes: Callable[[int], Mapping[Tier, int]] | None = None
    num_firm: int = 0
    in_step_seconds: float = 0.0

    def end_up_to(self, num_chunks: int) -> int:
        """The largest permitted end up to ``num_chunks``; 0 if there is none."""
        if not self.ends:
            return num_chunks
        at = bisect_right(self.ends, num_chunks)
        return self.ends[at - 1] if at else 0

    def end_after(self, num_chunks: int) -> int:
        """The next permitted end after ``num_chunks``."""
        return self.ends[bisect_right(self.ends, num_chunks)] if self.ends else num_chunks + 1

    def bytes_of(self, num_chunks: int) -> dict[Tier, int]:
        """Bytes that a load of ``num_chunks`` reads from each tier."""
        others = self.other_bytes(num_chunks) if self.other_bytes and num_chunks else {}
        chunks = self.tiers[:num_chunks]
        return {t: chunks.count(t) * self.chunk_bytes + others.get(t, 0) for t in Tier}

    def tokens_after(self, num_chunks: int) -> int:
        """Tokens computed or loaded after ``num_chunks``; the last token is always computed."""
        end = (self.context_tokens // self.chunk_tokens + num_chunks) * self.chunk_tokens
        return min(max(end, self.context_tokens), self.prompt_tokens - 1)


@dataclass(frozen=True, slots=True)
class LoadDecision:
    """Load the first ``num_chunks`` of ``num_hit_chunks``, and wait ``deadline_seconds`` for them.

    ``predicted_load_seconds`` is for these chunks, or for the whole hit if nothing is loaded;
    ``predicted_compute_seconds`` is for recompute alone. Both are 0 if unknown.
    """

    num_chunks: int
    num_hit_chunks: int
    deadline_seconds: float
    predicted_load_seconds: float
    predicted_compute_seconds: float
    reason: Reason

    def __str__(self) -> str:
        return (
            f"load {self.num_chunks} of {self.num_hit_chunks} chunks ({self.reason.value}): "
            f"load {self.predicted_load_seconds:.4f} s, "
            f"recompute {self.predicted_compute_seconds:.4f} s, "
            f"deadline {self.deadline_seconds:.4f} s"
        )


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prefix of the hit, and what is known of loading it."""

    num_chunks: int = 0
    load_seconds: float = 0.0
    risky_seconds: float = 0.0
    """``load_seconds`` with a margin for mispredicted speeds of the tiers."""
    own_seconds: float = 0.0
    """The part of ``risky_seconds`` without queueing: other waiting requests lose this time too."""
    rest_seconds: float = 0.0
    failure_rate: float = 0.0
    all_known: bool = True
