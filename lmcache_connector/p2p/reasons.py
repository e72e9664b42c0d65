"""Why hand-overs and loads end early: a word for metrics, beside the sentence for a person."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

MAX_WIRE_CHARACTERS = 1024


class Reason(StrEnum):
    """The values are labels on ``/metrics`` and words on the wire."""

    CANCELLED = "cancelled"
    TAKEN = "taken"
    DEADLINE = "deadline"
    BAD_CHECKSUM = "bad_checksum"
    COPY_FAILED = "copy_failed"
    OTHER_PROMPT = "other_prompt"
    BUFFER_FULL = "buffer_full"
    ABORTED = "aborted"
    RESET = "reset"
    EXPIRED = "expired"
    PREEMPTED = "preempted"
    NOT_NEEDED = "not_needed"
    GAVE_UP = "gave_up"
    SHUTDOWN = "shutdown"
    UNKNOWN = "unknown"
    NOT_ARRIVED = "not_arrived"
    LOST = "lost"
    NO_ANSWER = "no_answer"
    UNREACHABLE = "unreachable"
    MISMATCH = "mismatch"
    REFUSED = "refused"
    PROTOCOL = "protocol"
    OTHER = "other"


UNSENT_REASONS = (
    Reason.BUFFER_FULL,
    Reason.ABORTED,
    Reason.RESET,
    Reason.EXPIRED,
    Reason.PREEMPTED,
    Reason.COPY_FAILED,
    Reason.NOT_NEEDED,
    Reason.GAVE_UP,
    Reason.LOST,
    Reason.SHUTDOWN,
    Reason.OTHER,
)
"""What becomes of a hand-over at its producer. The other reasons are found out by a consumer."""


@dataclass(frozen=True, slots=True)
class Cause:
    """``text`` is one clause for a log line and holds no secret."""

    reason: Reason
    text: str

    def to_wire(self) -> str:
        """``WORD: TEXT``, which a peer that knows no words reads as text."""
        return f"{self.reason}: {self.text}"[:MAX_WIRE_CHARACTERS]

    @classmethod
    def from_wire(cls, said: str, default: Reason = Reason.OTHER) -> Cause:
        """What a peer says. A word that is no :class:`Reason` counts as ``default``."""
        word, _, text = said.partition(": ")
        try:
            return cls(Reason(word), text)
        except ValueError:
            return cls(default, said)
