"""Why a hand-over did not succeed, in one word: what is said in a log as a label of a metric.

The texts name addresses and numbers, and some come from the peer; the words are these and no
others, so that nobody can make a metric grow.
"""

from __future__ import annotations

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
