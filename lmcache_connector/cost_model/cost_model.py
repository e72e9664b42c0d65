"""Compute or load: how much of a hit is worth loading, and how long to wait for it.

The choice. Loads are asynchronous and a request waits for its own, so loading the first ``k`` hit
chunks costs ``load(k) + compute(the rest)`` against ``compute(everything)``. ``load`` is a latency
per source and a line in bytes; ``compute`` of the rest is concave in ``k``, because the last tokens
attend to the most. Their sum is concave wherever the source does not change, so its minimum lies
where a run of chunks from one source ends: only those prefixes are compared (and the longest one
the deadline cap lets through). A prefix costs what the figures predict, plus twice the
error predictions have had lately (``spread``), plus the deadline times the share of loads that
failed; loads larger than any seen are taken to last in proportion to the largest. It must beat
the compute it saves by 5 % and a millisecond.

The deadline, counted from the decision. Let ``C`` be recompute alone, ``R`` the compute left after
the load, ``p`` the predicted load, and ``S = 5 % of C``. A load that brings nothing until a
deadline of ``S`` leaves the request within 1.05 of recompute, whatever the link does. So:

- A source nothing is known about gets ``S``: what arrives by then is used and measures the link.
- A source known to be slow (or stalled) is not loaded from, except to explore.
- A source known to win gets ``3*p``, at most ``1.05*C - R``, where even all bytes together would
  come too late, and at least ``S``. If such a source stalls out of the blue, the loads under way
  lose up to that; from the first of them reported on, nothing loads from it.

All deadlines lie between a floor of 10 ms (below it, thread wake-ups decide, not the link) and
``max_deadline_seconds``. Before any prefill was measured ``C`` is unknown: as much as is predicted
to load within 250 ms is, with ``3*p`` but at least 250 ms to wait.

Exploring. Every decision that leaves a source out puts 2 % of its ``C`` aside for that source. Once
that pays for a patience of ``S``, a small load (one chunk) is tried with this patience on top;
after failures with ``2S``, ``4S``, ``8S`` and from the start. While tries arrive but the source
does not look worth it yet, the next ones load 4 and 16 chunks, which tells latency from bandwidth.
Once all four steps have failed in a row, 0.5 % is put aside instead. So requests lose at most 2 %
to exploring taken together, a single one at most 40 % of ``C`` (or the floor). A tier that
recovered is tried with enough patience within ``15S / 2 % = 38`` decisions, or 150 once it was
lost, times the jitter (at most 1.25) that keeps instances from exploring in step. A wide gain
shows in the first tries that arrive, a narrow one takes some dozens of decisions more.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil
from typing import Literal

from lmcache_connector.cost_model.decision import (
    CostFigures,
    LinkFigures,
    LoadDecision,
    LoadOffer,
    Reason,
)
from lmcache_connector.cost_model.exploration import MIN_DEADLINE_SECONDS, STALL_SHARE, Exploration
from lmcache_connector.cost_model.prefill_speed import PrefillSpeed
from lmcache_connector.cost_model.tier_speed import TierSpeed
from lmcache_connector.plans import Tier

__all__ = [
    "CostFigures",
    "CostModel",
    "LinkFigures",
    "LoadDecision",
    "LoadOffer",
    "Reason",
    "Tier",
]

UNMEASURED_LOAD_SECONDS = 0.250
"""Predicted loads may last this long while nothing says what recompute would cost; so may the wait
for a source nothing is known about."""
_MIN_GAIN_SHARE = 0.05
"""Closer than this the figures cannot tell, and compute is the safe side."""
_MIN_GAIN_SECONDS = 0.001
"""An asynchronous load costs about one more scheduling step."""
_MAX_BORDERS = 8
"""Scattered hits are compared at their first borders and their end only: it bounds the time."""
_CAUTION = 2.0
"""A load counts as slower than predicted by this many times the usual error: a lost bet costs the
user more than a bet not made."""
_MULTIPLE = 3.0
"""Deadline over prediction. Giving up on a load that would have come is the dearer mistake: it
costs the wait and the recompute, so a deadline must lie outside the noise."""


@dataclass(frozen=True, slots=True)
class _Prefix:
    """A prefix of the hit that could be loaded, and what is known of loading it."""

    num_chunks: int = 0
    load_seconds: float = 0.0
    risky_seconds: float = 0.0
    """The load as it is judged for a bet: slower than predicted by what has gone wrong before."""
    rest_seconds: float = 0.0
    failure_rate: float = 0.0
    all_known: bool = True


class CostModel:
    """Learns from what loads and prefills took, and decides for each request what to load.

    Not thread-safe: the scheduler side calls it. ``clock`` gives seconds, monotonic. Requests try
    only the sources in ``explores``; figures of the others must come from somebody who measures
    them now and then.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        rng: random.Random,
        max_deadline_seconds: float,
        mode: Literal["auto", "always"] = "auto",
        explores: frozenset[Tier] = frozenset(Tier),
    ) -> None:
        if max_deadline_seconds <= 0:
            raise ValueError(f"max_deadline_seconds must be positive, not {max_deadline_seconds}")
        self._clock = clock
        self._rng = rng
        self._max_deadline_seconds = max_deadline_seconds
        self.mode = mode
        self._explores = explores
        self._links = {source: TierSpeed() for source in Tier}
        self._explorations = {source: Exploration() for source in Tier}
        self._prefill = PrefillSpeed()
        self._decisions: Counter[Reason] = Counter()

    def calibrate(self, source: Tier, bytes_per_second: float, latency_seconds: float) -> None:
        """Take over measured figures, as from the self-test; what was learned is dropped."""
        self._links[source].calibrate(self._clock(), bytes_per_second, latency_seconds)

    def observe_load(self, source: Tier, num_bytes: int, seconds: float) -> None:
        """A load brought all it asked this source for.

        ``num_bytes`` are those that moved over the link for one rank (not what a shared fetch
        brought anyway), ``seconds`` from the start of its service, without the queue ahead of it.
        """
        self._links[source].arrived(self._clock(), num_bytes, seconds)
        self._explorations[source].result(arrived=True)

    def observe_load_failed(self, source: Tier, seconds: float, arrived_bytes: int = 0) -> None:
        """A load ended early after ``seconds``: its deadline passed or the tier failed.

        ``seconds`` and ``arrived_bytes`` count from the start of its service, as above. Not for a
        load that never got its turn, nor for chunks that turned out to be missing: neither says
        anything about the source's speed.
        """
        self._links[source].cut_off(self._clock(), arrived_bytes, seconds)
        self._explorations[source].result(arrived=not self._links[source].stalled)

    def observe_prefill(
        self, num_tokens: int, context_tokens: int, seconds: float, running_requests: int = 0
    ) -> None:
        """One step computed ``num_tokens`` of a prompt after ``context_tokens``.

        A step with several prompts is observed as one: the sum of their tokens and the mean of
        their contexts. ``running_requests`` decoded beside it.
        """
        self._prefill.observe(self._clock(), num_tokens, context_tokens, seconds, running_requests)

    def compute_seconds(
        self, context_tokens: int, prompt_tokens: int, running_requests: int = 0
    ) -> float | None:
        """What computing the rest of a prompt would last; ``None`` before any was measured."""
        if not self._prefill.known:
            return None
        return self._prefill.seconds(context_tokens, prompt_tokens, running_requests)

    def is_stalled(self, source: Tier) -> bool:
        """Nothing came from it lately."""
        return self._links[source].stalled

    def decide(self, offer: LoadOffer) -> LoadDecision:
        """Decide one request, once: each call counts towards exploring."""
        decision = self._decide(offer)
        self._decisions[decision.reason] += 1
        return decision

    def snapshot(self) -> CostFigures:
        return CostFigures(
            links={
                source: LinkFigures(
                    known=link.known,
                    stalled=link.stalled,
                    latency_seconds=link.latency_seconds,
                    bytes_per_second=link.bytes_per_second,
                    spread=link.spread,
                    failure_rate=link.failure_rate,
                )
                for source, link in self._links.items()
            },
            prefill_known=self._prefill.known,
            prefill_seconds_per_token=self._prefill.seconds_per_token,
            prefill_seconds_per_token_pair=self._prefill.seconds_per_token_pair,
            prefill_seconds_per_token_and_request=self._prefill.seconds_per_token_and_request,
            decisions=dict(self._decisions),
        )

    def _decide(self, offer: LoadOffer) -> LoadDecision:
        compute_seconds = self._rest_seconds(offer, 0)
        prefixes = list(self._prefixes(offer))
        if not offer.sources:
            return self._answer(offer, _Prefix(), compute_seconds, Reason.NO_HIT)
        if self.mode == "always":
            load_seconds = prefixes[-1].load_seconds if prefixes else 0.0
            return LoadDecision(
                num_chunks=len(offer.sources),
                num_hit_chunks=len(offer.sources),
                deadline_seconds=self._max_deadline_seconds,
                predicted_load_seconds=load_seconds,
                predicted_compute_seconds=compute_seconds,
                reason=Reason.ALWAYS,
            )
        if not self._prefill.known:
            longest = prefixes[-1] if prefixes else _Prefix()
            return self._answer(offer, longest, compute_seconds, Reason.UNMEASURED)
        best = self._best(prefixes, compute_seconds)
        explored = self._explore(offer, best, compute_seconds)
        if explored is not None:
            return explored
        if best.num_chunks:
            reason = Reason.LOAD_FASTER if best.all_known else Reason.UNMEASURED
        elif self._links[offer.sources[0]].stalled:
            reason = Reason.SOURCE_STALLED
        else:
            reason = Reason.COMPUTE_FASTER
        return self._answer(offer, best, compute_seconds, reason)

    def _prefixes(self, offer: LoadOffer) -> Iterator[_Prefix]:
        """The prefixes worth comparing, shorter first, as far as no source stalls.

        The last one is cut where its load would take longer than the deadline cap lets through.
        """
        longest_seconds = self._max_deadline_seconds / _MULTIPLE
        if not self._prefill.known:
            longest_seconds = min(longest_seconds, UNMEASURED_LOAD_SECONDS)
        start = 0
        for end in _borders(offer.sources, lambda source: not self._links[source].stalled):
            prefix = self._prefix(offer, end)
            excess_seconds = prefix.load_seconds - longest_seconds
            if excess_seconds <= 0:
                yield prefix
                start = end
                continue
            chunk_seconds = offer.chunk_bytes * self._links[offer.sources[start]].seconds_per_byte
            cut = ceil(excess_seconds / chunk_seconds) if chunk_seconds else end
            if end - cut > start:
                yield self._prefix(offer, end - cut)
            return

    def _prefix(self, offer: LoadOffer, num_chunks: int) -> _Prefix:
        """Sources are taken to load one after the other."""
        load_seconds, risky_seconds, failure_rate, all_known = 0.0, 0.0, 0.0, True
        sources = offer.sources[:num_chunks]
        for source, link in self._links.items():
            num_bytes = sources.count(source) * offer.chunk_bytes
            if num_bytes == 0:
                continue
            queue_seconds = offer.queued_bytes.get(source, 0) * link.seconds_per_byte
            load_seconds += queue_seconds + link.seconds(num_bytes)
            worst_seconds = queue_seconds + link.seconds_at_worst(num_bytes)
            risky_seconds += worst_seconds * (1 + _CAUTION * link.spread)
            failure_rate = max(failure_rate, link.failure_rate)
            all_known = all_known and link.known
        return _Prefix(
            num_chunks,
            load_seconds,
            risky_seconds,
            self._rest_seconds(offer, num_chunks),
            failure_rate,
            all_known,
        )

    def _best(self, prefixes: list[_Prefix], compute_seconds: float) -> _Prefix:
        """The cheapest prefix, or none where recompute is as good."""
        best, best_seconds = _Prefix(rest_seconds=compute_seconds), compute_seconds
        for prefix in prefixes:
            stall_seconds = prefix.failure_rate * self._deadline_seconds(prefix, compute_seconds)
            load_seconds = prefix.risky_seconds + stall_seconds
            saved_seconds = compute_seconds - prefix.rest_seconds
            if load_seconds > saved_seconds * (1 - _MIN_GAIN_SHARE) - _MIN_GAIN_SECONDS:
                continue
            if load_seconds + prefix.rest_seconds < best_seconds:
                best, best_seconds = prefix, load_seconds + prefix.rest_seconds
        return best

    def _explore(
        self, offer: LoadOffer, best: _Prefix, compute_seconds: float
    ) -> LoadDecision | None:
        """Try the first source left out, if enough has been put aside for it."""
        start = best.num_chunks
        loaded = offer.sources[:start]
        for used, exploration in self._explorations.items():
            if used in loaded:
                exploration.restart()
        if start == len(offer.sources):
            return None
        source = offer.sources[start]
        if source in loaded or source not in self._explores:
            return None
        exploration, link = self._explorations[source], self._links[source]
        num_chunks = min(exploration.num_chunks, _run_length(offer.sources, start))
        load_seconds = link.seconds(num_chunks * offer.chunk_bytes)
        patience = exploration.pay(
            compute_seconds, load_seconds, self._max_deadline_seconds, self._rng
        )
        if patience is None:
            return None
        deadline = patience + (self._deadline_seconds(best, compute_seconds) if start else 0.0)
        return LoadDecision(
            num_chunks=start + num_chunks,
            num_hit_chunks=len(offer.sources),
            deadline_seconds=min(deadline, self._max_deadline_seconds),
            predicted_load_seconds=best.load_seconds + load_seconds,
            predicted_compute_seconds=compute_seconds,
            reason=Reason.EXPLORE,
            exploring=True,
        )

    def _deadline_seconds(self, prefix: _Prefix, compute_seconds: float) -> float:
        """See the module's docstring."""
        trusted = _MULTIPLE * prefix.load_seconds
        if not self._prefill.known:
            deadline = max(trusted, UNMEASURED_LOAD_SECONDS)
        else:
            stall_safe = STALL_SHARE * compute_seconds
            too_late = compute_seconds + stall_safe - prefix.rest_seconds
            deadline = max(stall_safe, min(trusted, too_late))
        return min(max(deadline, MIN_DEADLINE_SECONDS), self._max_deadline_seconds)

    def _rest_seconds(self, offer: LoadOffer, num_chunks: int) -> float:
        start = offer.tokens_after(num_chunks) if num_chunks else offer.context_tokens
        return self._prefill.seconds(start, offer.prompt_tokens, offer.running_requests)

    def _answer(
        self, offer: LoadOffer, prefix: _Prefix, compute_seconds: float, reason: Reason
    ) -> LoadDecision:
        deadline = self._deadline_seconds(prefix, compute_seconds) if prefix.num_chunks else 0.0
        return LoadDecision(
            num_chunks=prefix.num_chunks,
            num_hit_chunks=len(offer.sources),
            deadline_seconds=deadline,
            predicted_load_seconds=prefix.load_seconds,
            predicted_compute_seconds=compute_seconds,
            reason=reason,
        )


def _borders(sources: tuple[Tier, ...], loads: Callable[[Tier], bool]) -> Iterator[int]:
    """Ends of runs of one source, up to the first source that does not load."""
    start = 0
    for count in range(len(sources)):
        if start == len(sources) or not loads(sources[start]):
            return
        if count == _MAX_BORDERS:
            yield next((i for i, s in enumerate(sources) if not loads(s)), len(sources))
            return
        start += _run_length(sources, start)
        yield start


def _run_length(sources: tuple[Tier, ...], start: int) -> int:
    """Chunks from ``start`` on that lie in the same source."""
    source = sources[start]
    end = start + 1
    while end < len(sources) and sources[end] is source:
        end += 1
    return end - start
