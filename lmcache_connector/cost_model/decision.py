"""What the cost model is asked, and what it answers: plain values."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from lmcache_connector.plans import Tier


class Reason(Enum):
    """Why a decision is as it is; a metrics label."""

    NO_HIT = "no_hit"
    ALWAYS = "always"
    UNMEASURED = "unmeasured"
    LOAD_FASTER = "load_faster"
    COMPUTE_FASTER = "compute_faster"
    SOURCE_STALLED = "source_stalled"


@dataclass(frozen=True, slots=True)
class LoadOffer:
    """A hit to decide on. Raises ``ValueError`` for one that cannot be.

    ``context_tokens`` of ``prompt_tokens`` are computed already; ``tiers`` names, in prompt order,
    where each hit chunk from there on lies. The first may be computed in part. ``chunk_bytes`` is
    what the rank with the largest part moves per chunk. ``queued_bytes`` waits ahead of this job
    per tier, and a load can begin after ``wait_seconds``. ``running_requests`` are the others; the
    steps to come last ``step_seconds``, ``None`` if none runs. ``waiting_requests`` others have no
    token yet, and nothing of them is being computed: their prompts have ``waiting_tokens``.

    A load may end after so many chunks as ``ends`` lists, which ascend; empty: after any number.
    Besides the chunks before, one that ends after ``n`` needs ``other_bytes(n)`` of each tier.
    """

    context_tokens: int
    prompt_tokens: int
    chunk_tokens: int
    chunk_bytes: int
    tiers: tuple[Tier, ...]
    queued_bytes: Mapping[Tier, int] = field(default_factory=dict)
    running_requests: int = 0
    wait_seconds: float = 0.0
    step_seconds: float | None = None
    waiting_requests: int = 0
    waiting_tokens: int = 0
    ends: Sequence[int] = ()
    other_bytes: Callable[[int], Mapping[Tier, int]] | None = None

    def __post_init__(self) -> None:
        if self.chunk_tokens <= 0 or self.chunk_bytes < (self.other_bytes is None):
            raise ValueError("chunks have tokens and bytes")
        if not 0 <= self.context_tokens < self.prompt_tokens:
            raise ValueError("at least one token of the prompt must be left to compute")

    def end_up_to(self, num_chunks: int) -> int:
        """The largest number of chunks a load may end after, of those up to ``num_chunks``; 0 if
        there is none."""
        if not self.ends:
            return num_chunks
        at = bisect_right(self.ends, num_chunks)
        return self.ends[at - 1] if at else 0

    def end_after(self, num_chunks: int) -> int:
        """The next such number after ``num_chunks``."""
        return self.ends[bisect_right(self.ends, num_chunks)] if self.ends else num_chunks + 1

    def num_bytes(self, tier: Tier, num_chunks: int) -> int:
        """What a load of so many chunks takes from a tier."""
        others = self.other_bytes(num_chunks) if self.other_bytes and num_chunks else {}
        own = self.tiers[:num_chunks].count(tier) * self.chunk_bytes
        return own + others.get(tier, 0)

    def tokens_after(self, num_chunks: int) -> int:
        """Tokens computed or loaded after that many chunks; the last one is always computed."""
        end = (self.context_tokens // self.chunk_tokens + num_chunks) * self.chunk_tokens
        return min(max(end, self.context_tokens), self.prompt_tokens - 1)


@dataclass(frozen=True, slots=True)
class LoadDecision:
    """Load the first ``num_chunks`` of ``num_hit_chunks``, and wait ``deadline_seconds`` for them.

    ``predicted_load_seconds`` is that load's; ``predicted_compute_seconds`` is recompute alone,
    with nothing loaded. Both are 0 where nothing is known.
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
