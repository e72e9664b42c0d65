"""When to try a source again that does not look worth loading from: rarely, small, and paid for.

The rules are written down in ``cost_model.py``.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

STALL_SHARE = 0.05
"""Share of recompute a load may waste when nothing at all arrives: the product's promise."""
_SHARE, _SHARE_WHEN_LOST = 0.02, 0.005
"""What each request puts aside, of recompute: less once all steps have failed in a row."""
_STEPS = 4
"""Patience is S, 2S, 4S, 8S: a link slower than 40 % of recompute has little to give."""
_GROWTH, _MAX_CHUNKS = 4, 16
_MAX_JITTER = 1.25
_MARGIN = 1.5
"""Patience over the time a larger load should take, once smaller ones arrive."""
MIN_DEADLINE_SECONDS = 0.010
"""Below this, thread wake-ups decide, not the link."""


@dataclass(slots=True)
class Exploration:
    """Where exploring one source stands.

    ``credit_seconds`` is what requests have put aside for it, ``num_chunks`` the size of the next
    try. ``trying`` is true from a try until the next result of its source, ``lost`` once every
    step has failed since the last load that arrived.
    """

    credit_seconds: float = 0.0
    step: int = 0
    num_chunks: int = 1
    jitter: float = 1.0
    trying: bool = False
    lost: bool = False

    def pay(
        self, compute_seconds: float, load_seconds: float, longest: float, rng: random.Random
    ) -> float | None:
        """One request puts its share aside; answers the patience of a try if that pays for one.

        ``load_seconds`` is what the try should take by the figures, ``longest`` caps its patience.
        """
        self._put_aside(compute_seconds)
        patience = self._patience_seconds(compute_seconds, load_seconds)
        patience = min(max(patience, MIN_DEADLINE_SECONDS), longest)
        if self.credit_seconds < patience * self.jitter:
            return None
        self.credit_seconds -= patience
        self.jitter = rng.uniform(1.0, _MAX_JITTER)
        self.trying = True
        return patience

    def result(self, arrived: bool) -> None:
        """The source's next load after a try arrived, or did not in time."""
        if not self.trying:
            return
        self.trying = False
        if arrived:
            self.num_chunks, self.lost = min(_GROWTH * self.num_chunks, _MAX_CHUNKS), False
        else:
            self.num_chunks, self.step = 1, (self.step + 1) % _STEPS
            self.lost = self.lost or self.step == 0

    def restart(self) -> None:
        """The source is loaded from again."""
        self.num_chunks, self.step, self.trying, self.lost = 1, 0, False, False

    def _put_aside(self, compute_seconds: float) -> None:
        """Keeps no more than the longest patience can cost."""
        most = STALL_SHARE * 2 ** (_STEPS - 1) * _MAX_JITTER * compute_seconds
        share = _SHARE_WHEN_LOST if self.lost else _SHARE
        credit = min(self.credit_seconds + share * compute_seconds, most)
        self.credit_seconds = max(self.credit_seconds, credit)

    def _patience_seconds(self, compute_seconds: float, load_seconds: float) -> float:
        """The step's, or a later step's that fits a larger load once smaller ones arrive."""
        step = self.step
        if self.num_chunks > 1:
            while (
                step + 1 < _STEPS and _step_seconds(step, compute_seconds) < _MARGIN * load_seconds
            ):
                step += 1
        return _step_seconds(step, compute_seconds)


def _step_seconds(step: int, compute_seconds: float) -> float:
    return STALL_SHARE * compute_seconds * (1 << step)
