"""Totals of a hand-over's scheduler side."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from lmcache_connector.p2p.plans import HandoverResult


@dataclass(slots=True)
class P2PCounters:
    """Totals since the start. ``wire_*``: of hand-overs received, over all ranks. ``failed_loads``
    and ``unsent`` by :func:`reason_word`."""

    remote_hit_tokens: int = 0
    local_hit_tokens: int = 0
    recomputed_tokens: int = 0
    handovers: int = 0
    loads: int = 0
    malformed: int = 0
    declined: int = 0
    failed_loads: dict[str, int] = field(default_factory=dict)
    unsent: dict[str, int] = field(default_factory=dict)
    load_seconds: float = 0.0
    wire_bytes: int = 0
    wire_seconds: float = 0.0

    def count_load(self, result: HandoverResult) -> None:
        """One rank's part of a load."""
        self.wire_bytes += result.wire_bytes
        self.wire_seconds += result.wire_seconds
        self.load_seconds += result.seconds
        if result.reason:
            _count(self.failed_loads, [result.reason])

    def count_unsent(self, reasons: Iterable[str]) -> None:
        """Transfers that did not reach their consumer."""
        _count(self.unsent, reasons)


def _count(totals: dict[str, int], reasons: Iterable[str]) -> None:
    for reason in reasons:
        word = reason_word(reason)
        totals[word] = totals.get(word, 0) + 1


# The first that has a phrase in the text counts.
_PHRASES: dict[str, tuple[str, ...]] = {
    "cancelled": ("the load was cancelled",),
    "taken": ("another request has taken",),
    "deadline": ("did not come within",),
    "bad_checksum": ("damaged on the way",),
    "copy_failed": ("copy into the KV cache failed", "copy out of the KV cache failed"),
    "other_prompt": ("another prompt", "the prompt there was another one"),
    "buffer_full": ("buffer is full",),
    "aborted": ("its request was aborted",),
    "reset": ("the cache was reset",),
    "expired": ("nobody fetched it in time",),
    "preempted": ("its blocks were taken back", "begun anew"),
    "not_needed": ("nobody needs it any more",),
    "gave_up": ("the consumer gave up",),
    "shutdown": ("is shutting down",),
    "unknown": ("has never heard of it",),
    "not_arrived": ("but it did not arrive",),
    "lost": ("the producer was lost", "has ended the session"),
    "no_answer": ("gave no answer within",),
    "unreachable": ("cannot be reached",),
    "mismatch": ("do not fit", "the models differ", "there is no rank"),
    "refused": ("refused: ", "not among the peers", "the shared secret"),
    "protocol": (
        "packet",
        "the protocol",
        "this protocol",
        "a message cannot",
        "handshake",
        "hello",
    ),
}
OTHER = "other"
REASONS = (*_PHRASES, OTHER)
# What becomes of a hand-over at its producer; the rest is a consumer's to find out.
UNSENT_REASONS = (
    *("aborted", "reset", "expired", "preempted", "copy_failed"),
    *("not_needed", "gave_up", "shutdown", OTHER),
)


def reason_word(text: str) -> str:
    """One of ``REASONS``."""
    return next(
        (word for word, phrases in _PHRASES.items() if any(phrase in text for phrase in phrases)),
        OTHER,
    )
