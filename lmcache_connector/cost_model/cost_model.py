"""Compute or load: how much of a hit to load, and how long to wait for it.

The choice. A request waits for its load, so loading the first ``k`` hit chunks costs
``wait(load(k)) + compute(the rest)``, against ``compute(everything)``. ``wait`` counts in steps:
see :mod:`lmcache_connector.cost_model.steps`. Compute of the rest is concave in ``k``, because the
last tokens attend to the most, and load time is linear in bytes. So the minimum lies at the end of
a run of chunks from one tier: only these prefixes are compared, and the longest one that the
deadline cap allows. A load counts as 1.3 times its prediction, plus the deadline times the share of
failed loads, and must cost 5 % less than the compute that it saves. Lost steps and queueing delay
one request, but compute delays every request that waits for its first token: so these two costs are
divided by the number of requests that wait, this one included.

The deadline, counted from the decision. Let ``C`` be the time to compute everything, ``R`` the
compute left after the load, ``p`` the predicted load, and ``S = 5 % of C``: a load that delivers
nothing until ``S`` leaves the request within 1.05 of ``C``, however slow the tier.

- An unknown tier gets ``S``: chunks that arrive by then are used and measure the tier.
- A tier known to be slow, or stalled, is not loaded from.
- A tier known to win gets ``3*p``, but at most ``C - R + S`` less the steps that any load costs
  (later, even a whole load comes too late), and at least ``S``. ``C - R`` counts once per waiting
  request. If such a tier suddenly stalls, each open load loses up to its deadline; once the
  first one is reported, no load uses the tier.

Until a prefill has been measured, ``C`` is unknown: the model loads as much as should take 250 ms,
with a deadline of 750 ms or more.

The way back. A tier that looks slow is not loaded from, and so not measured. After a minute without
news of it, one request loads a few chunks on trial, as if the tier were unknown. If the trial is
slow or never reported, the tier is avoided for another minute; after its very first loads only for
some seconds, because these may have met a hiccup. Probes of Redis, made while requests would use
it, end its stalls. Peers are not probed: their stalls end by a trial.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import takewhile
from math import ceil, inf
from typing import Literal

from lmcache_connector.cost_model.decision import LoadDecision, LoadOffer, Prefix, Reason
from lmcache_connector.cost_model.prefill import PrefillSpeed
from lmcache_connector.cost_model.steps import StepTime
from lmcache_connector.cost_model.tiers import TierSpeed
from lmcache_connector.plans import Tier

STALL_SHARE = 0.05
"""Share of recompute that a load from an unproven tier may waste."""
MIN_DEADLINE_SECONDS = 0.010
"""Below this, thread wake-ups take longer than the tier."""
UNMEASURED_LOAD_SECONDS = 0.250
"""The longest predicted load while the time to compute is unknown; the deadline is then at least
three times as long."""
MIN_GAIN_SHARE = 0.05
"""Predictions are no more exact than this; compute is the safe choice."""
_MIN_PREFILL_SHARE = 0.25
"""Share of a decode step: a prefill that adds less is lost in the step's noise. Without this, ten
hits whose last 50 tokens a GPU computes within a decode step of 10 ms lower the prediction for
8,192 tokens to 0.04 of the truth."""
_MAX_BORDERS, _MAX_ENDS = 8, 16
"""Bounds the time of a decision: only the first borders between tiers and the last ends count."""
_CAUTION = 1.3
"""A load counts as this many times slower than predicted: a load that disappoints costs the user
more than a load not made."""
_MULTIPLE = 3.0
"""Deadline over prediction. Cutting off a load that would have arrived costs the wait and the
recompute, so the deadline must lie outside the noise."""


class CostModel:
    """Decides for each request how much to load, by the speeds of ``tiers``, prefill and ``steps``.

    Not thread-safe: the scheduler side calls it. ``clock`` is monotonic, in seconds. Up to
    ``num_batches`` steps are in flight at once, of ``max_step_tokens`` tokens at most.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        max_deadline_seconds: float,
        mode: Literal["auto", "always"] = "auto",
        num_batches: int = 1,
        max_step_tokens: int = 1 << 30,
    ) -> None:
        self._clock = clock
        self._max_deadline_seconds = max_deadline_seconds
        self.mode = mode
        self.tiers = {tier: TierSpeed(probed=tier is not Tier.PEER) for tier in Tier}
        self._prefill = PrefillSpeed()
        self.max_step_tokens = max_step_tokens
        self.steps = StepTime(num_batches)

    # -- measurements --------------------------------------------------------------------------

    def observe_prefill(self, num_tokens: int, context_tokens: int, seconds: float) -> None:
        """One step computed ``num_tokens`` of a prompt after ``context_tokens``.

        Several prompts count as one that reads as much KV: see :class:`PrefillWork`.
        """
        least = self.steps.decode_seconds
        if self._prefill.known and seconds < (1 + _MIN_PREFILL_SHARE) * least:
            return
        added = max(0.0, seconds - least)
        self._prefill.observe(self._clock(), num_tokens, context_tokens, added)

    # -- answers -------------------------------------------------------------------------------

    def compute_seconds(self, context_tokens: int, prompt_tokens: int) -> float | None:
        """Predicted seconds to compute the rest of a prompt; ``None`` if unmeasured."""
        if not self._prefill.known:
            return None
        added = self._prefill.seconds(context_tokens, prompt_tokens)
        num_steps = ceil((prompt_tokens - context_tokens) / self.max_step_tokens)
        return num_steps * self.steps.decode_seconds + added

    def step_seconds(self, num_tokens: int) -> float:
        """Predicted length of a step that computes ``num_tokens`` of prompts."""
        return self.steps.decode_seconds + self._prefill.seconds(0, num_tokens)

    def load_seconds(self, tier: Tier, num_bytes: int) -> float:
        """Predicted time of a load without a queue; infinite if unknown."""
        speed = self.tiers[tier]
        return speed.seconds(num_bytes) if speed.known else inf

    def is_stalled(self, tier: Tier) -> bool:
        """Whether the tier's last load hung or broke, and that is not outdated."""
        speed = self.tiers[tier]
        return speed.stalled and not speed.is_outdated(self._clock())

    def decide(self, offer: LoadOffer) -> LoadDecision:
        """Decide how much of one hit to load. Has an effect: it may put a tier on trial."""
        compute_seconds = self.compute_seconds(offer.context_tokens, offer.prompt_tokens) or 0.0
        if self.mode == "always" or not self._prefill.known:
            *_, prefix = (Prefix(), *self._to_compare(offer))  # the longest, or none
            reason = Reason.ALWAYS if self.mode == "always" else Reason.UNMEASURED
        else:
            prefix = self._best_with_trial(offer, compute_seconds)
            if prefix.num_chunks:
                reason = Reason.LOAD_FASTER if prefix.all_known else Reason.UNMEASURED
            elif self.tiers[offer.tiers[0]].stalled:
                reason = Reason.SOURCE_STALLED
            else:
                reason = Reason.COMPUTE_FASTER
        num_chunks, deadline_seconds = prefix.num_chunks, 0.0
        if num_chunks:
            deadline_seconds = self._deadline_seconds(offer, prefix, compute_seconds)
        else:
            prefix = self._prefix(offer, len(offer.tiers))
        if reason is Reason.ALWAYS:
            num_chunks, deadline_seconds = len(offer.tiers), self._max_deadline_seconds
        return LoadDecision(
            num_chunks=num_chunks,
            num_hit_chunks=len(offer.tiers),
            deadline_seconds=deadline_seconds,
            predicted_load_seconds=prefix.load_seconds,
            predicted_compute_seconds=compute_seconds,
            reason=reason,
        )

    # -- the choice ----------------------------------------------------------------------------

    def _best_with_trial(self, offer: LoadOffer, compute_seconds: float) -> Prefix:
        """The best prefix. If it leaves out a tier without recent news, chunks of that tier are
        added on trial, as if the tier were unknown. The trial's prediction must be short too,
        because copies from memory go on after their deadline."""
        best = self._best(offer, compute_seconds)
        if best.num_chunks == len(offer.tiers):
            return best
        now, left_out = self._clock(), offer.tiers[best.num_chunks]
        learned = self.tiers[left_out]
        if not learned.is_outdated(now) or left_out in offer.tiers[: best.num_chunks]:
            return best
        end = self._end_of_trial(offer, best, compute_seconds)
        self.tiers[left_out] = learned.untried()
        trial = self._prefix(offer, end)
        # The whole hit may pay where the trial does not.
        pays = self._best(offer, compute_seconds).num_chunks > best.num_chunks
        self.tiers[left_out] = learned
        trial_seconds = self.steps.wait_seconds(trial.load_seconds, offer.step_seconds)
        is_safe = trial_seconds + trial.rest_seconds <= compute_seconds * (1 + STALL_SHARE)
        if not (pays and is_safe):
            return best  # a later request may try the tier
        learned.tried(now)
        return trial

    def _end_of_trial(self, offer: LoadOffer, best: Prefix, compute_seconds: float) -> int:
        """The most chunks that waste at most 5 % of recompute at the last load's speed, and are at
        most about twice its bytes, as the tier may be far slower now; the first end at least. A
        single chunk would always look slow where latency dominates."""
        start, first = best.num_chunks, offer.end_after(best.num_chunks)
        tier, longest = offer.tiers[start], best.rest_seconds + STALL_SHARE * compute_seconds
        last_bytes, last_seconds = self.tiers[tier].last_load
        run = takewhile(lambda each: each is tier, offer.tiers[start:])
        most = 2 * last_bytes // max(1, offer.chunk_bytes)  # 0 B: only windows
        end = offer.end_up_to(start + min(len(list(run)), most))
        while end > first:
            load_seconds = offer.bytes_of(end)[tier] * last_seconds / last_bytes
            rest_seconds = self.compute_seconds(offer.tokens_after(end), offer.prompt_tokens)
            if load_seconds + (rest_seconds or 0.0) <= longest:
                return end
            end = offer.end_up_to((start + end) // 2)
        return first

    def _best(self, offer: LoadOffer, compute_seconds: float) -> Prefix:
        """The cheapest prefix; the empty one if recompute is as good."""
        best, best_gain = Prefix(rest_seconds=compute_seconds), 0.0
        for prefix in self._to_compare(offer):
            deadline = self._deadline_seconds(offer, prefix, compute_seconds)
            stall_seconds = prefix.failure_rate * deadline
            price_seconds = self._price_seconds(offer, prefix, stall_seconds)
            saved_seconds = compute_seconds - prefix.rest_seconds
            if price_seconds > saved_seconds * (1 - MIN_GAIN_SHARE):
                continue
            if saved_seconds - price_seconds > best_gain:
                best, best_gain = prefix, saved_seconds - price_seconds
        return best

    def _to_compare(self, offer: LoadOffer) -> Iterator[Prefix]:
        """Prefixes worth comparing, shortest first, up to a tier that stalls. The last one is cut
        short if its load would take too long."""
        last_end, longest_seconds = 0, self._max_deadline_seconds / _MULTIPLE
        if not self._prefill.known:
            longest_seconds = min(longest_seconds, UNMEASURED_LOAD_SECONDS)
        for end in self._ends(offer):
            prefix = self._prefix(offer, end)
            excess_seconds = prefix.load_seconds - longest_seconds
            if excess_seconds > 0:
                speed = self.tiers[offer.tiers[end - 1]]
                chunk_seconds = offer.chunk_bytes * speed.seconds_per_byte
                if chunk_seconds and offer.other_bytes is None:
                    cut = offer.end_up_to(end - ceil(excess_seconds / chunk_seconds))
                    if cut > last_end:
                        yield self._prefix(offer, cut)
                return
            yield prefix
            last_end = end

    def _prefix(self, offer: LoadOffer, num_chunks: int) -> Prefix:
        """The prefix of ``num_chunks``; assumes that tiers load one after the other."""
        load_seconds = risky_seconds = offer.wait_seconds
        own_seconds = 0.0
        failure_rate, all_known = 0.0, True
        for tier, num_bytes in offer.bytes_of(num_chunks).items():
            if num_bytes == 0:
                continue
            speed = self.tiers[tier]
            queue_seconds = offer.queued_bytes.get(tier, 0) * speed.seconds_per_byte
            load_seconds += queue_seconds + speed.seconds(num_bytes)
            risky_seconds += (queue_seconds + speed.seconds(num_bytes)) * _CAUTION
            own_seconds += speed.seconds(num_bytes) * _CAUTION
            failure_rate = max(failure_rate, speed.failure_rate)
            all_known = all_known and speed.known
        rest_seconds = self.compute_seconds(offer.tokens_after(num_chunks), offer.prompt_tokens)
        times = (load_seconds, risky_seconds, own_seconds, rest_seconds or 0.0)
        return Prefix(num_chunks, *times, failure_rate, all_known)

    def _ends(self, offer: LoadOffer) -> list[int]:
        """Ends of runs from one tier, up to the first stalled tier. If loads need windows or
        states, also the last ends whose windows and states usable tiers have."""
        tiers = offer.tiers
        usable = {tier for tier, speed in self.tiers.items() if not speed.stalled}
        last = next((i for i, tier in enumerate(tiers) if tier not in usable), len(tiers))
        borders = [i for i in range(1, last) if tiers[i] is not tiers[i - 1]]
        found = {offer.end_up_to(border) for border in (*borders[:_MAX_BORDERS], last)} - {0}
        if offer.other_bytes is not None:
            found |= {*[end for end in offer.ends if end <= last][-_MAX_ENDS:]}
            needed = {end: offer.other_bytes(end).items() for end in found}
            found = {end for end in found if {t for t, count in needed[end] if count} <= usable}
        return sorted(found)

    def _price_seconds(self, offer: LoadOffer, prefix: Prefix, stall_seconds: float) -> float:
        """The cost of a load, as compared with the compute that it saves."""
        load_seconds = prefix.risky_seconds + stall_seconds
        own_seconds = prefix.own_seconds + stall_seconds
        if prefix.num_chunks <= offer.num_firm:
            num_bytes = offer.bytes_of(prefix.num_chunks)[Tier.CPU]
            if self.load_seconds(Tier.CPU, num_bytes) <= offer.in_step_seconds:
                return own_seconds
        wait_seconds = self.steps.wait_seconds(load_seconds, offer.step_seconds)
        return own_seconds + (wait_seconds - own_seconds) / offer.num_waiting

    def _deadline_seconds(self, offer: LoadOffer, prefix: Prefix, compute_seconds: float) -> float:
        """See "The deadline" in the module's docstring."""
        trusted = _MULTIPLE * prefix.load_seconds
        if not self._prefill.known:
            deadline = max(trusted, _MULTIPLE * UNMEASURED_LOAD_SECONDS)
        else:
            stall_safe = STALL_SHARE * compute_seconds
            lost = self.steps.lost_seconds(offer.step_seconds)
            saved = compute_seconds - prefix.rest_seconds
            too_late = saved * offer.num_waiting + stall_safe - lost
            deadline = max(stall_safe, min(trusted, too_late))
        return min(max(deadline, MIN_DEADLINE_SECONDS), self._max_deadline_seconds)
