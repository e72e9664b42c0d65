"""The prefixes of a hit that may be loaded, and what is known of loading each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import ceil

from lmcache_connector.cost_model.decision import LoadOffer
from lmcache_connector.cost_model.tier_speed import TierSpeed
from lmcache_connector.plans import Tier

_MAX_BORDERS = 8
"""Scattered hits are compared at their first borders and their end only: it bounds the time."""
_MAX_ENDS = 16
"""Of those a hit may have, so many are looked at before one is given up."""
_CAUTION = 2.0
"""A load counts as slower than predicted by this many times the usual error: a lost bet costs the
user more than a bet not made."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prefix of the hit that could be loaded, and what is known of loading it."""

    num_chunks: int = 0
    load_seconds: float = 0.0
    risky_seconds: float = 0.0
    """The load as it is judged for a bet: slower than predicted by what has gone wrong before."""
    own_seconds: float = 0.0
    """Of those, what is not waiting for its turn: the others that wait lose them too."""
    rest_seconds: float = 0.0
    failure_rate: float = 0.0
    all_known: bool = True


@dataclass(frozen=True, slots=True)
class LoadPrefixes:
    """Those of ``offer``. After so many chunks, ``rest_seconds`` are left to compute; no load shall
    take longer than ``longest_seconds``. Looks at ``tiers`` as they are when it is asked."""

    offer: LoadOffer
    tiers: Mapping[Tier, TierSpeed]
    rest_seconds: Callable[[int], float]
    longest_seconds: float

    def to_compare(self) -> Iterator[Prefix]:
        """Those worth comparing, shorter first, up to a tier that stalls or is on trial.

        The last one is cut where its load would take too long.
        """
        start = last_end = 0
        for border in self._borders():
            speed = self.tiers[self.offer.tiers[start]]
            if speed.on_trial:
                return
            start = border
            for end in self._ends_up_to(border):
                if end <= last_end:
                    continue
                prefix = self.of(end)
                excess_seconds = prefix.load_seconds - self.longest_seconds
                if excess_seconds > 0:
                    chunk_seconds = self.offer.chunk_bytes * speed.seconds_per_byte
                    cut = ceil(excess_seconds / chunk_seconds) if chunk_seconds else end
                    yield from self._longest(last_end, end - cut)
                    return
                yield prefix
                last_end = end

    def of(self, num_chunks: int) -> Prefix:
        """Tiers are taken to load one after the other."""
        offer = self.offer
        load_seconds = risky_seconds = offer.wait_seconds
        own_seconds = 0.0
        failure_rate, all_known = 0.0, True
        for tier, speed in self.tiers.items():
            num_bytes = offer.num_bytes(tier, num_chunks)
            if num_bytes == 0:
                continue
            queue_seconds = offer.queued_bytes.get(tier, 0) * speed.seconds_per_byte
            load_seconds += queue_seconds + speed.seconds(num_bytes)
            caution, worst_seconds = 1 + _CAUTION * speed.spread, speed.seconds_at_worst(num_bytes)
            risky_seconds += (queue_seconds + worst_seconds) * caution
            own_seconds += worst_seconds * caution
            failure_rate = max(failure_rate, speed.failure_rate)
            all_known = all_known and speed.known
        return Prefix(
            num_chunks,
            load_seconds,
            risky_seconds,
            own_seconds,
            self.rest_seconds(num_chunks),
            failure_rate,
            all_known,
        )

    def _borders(self) -> Iterator[int]:
        """Ends of runs of one tier, up to the first tier that does not load."""
        tiers, start = self.offer.tiers, 0
        for count in range(len(tiers)):
            if start == len(tiers) or not self._loads(tiers[start]):
                return
            if count == _MAX_BORDERS:
                yield next((i for i, t in enumerate(tiers) if not self._loads(t)), len(tiers))
                return
            tier = tiers[start]
            while start < len(tiers) and tiers[start] is tier:
                start += 1
            yield start

    def _loads(self, tier: Tier) -> bool:
        return not self.tiers[tier].stalled

    def _longest(self, after: int, num_chunks: int) -> Iterator[Prefix]:
        """The prefix that ends last, after one and before the other, if there is one."""
        end = self._ends_up_to(num_chunks)[-1]
        if end > after:
            yield self.of(end)

    def _ends_up_to(self, num_chunks: int) -> list[int]:
        """The largest end up to there; where more is needed than the chunks before, the largest for
        which memory has it, and the largest for which any tier has it that loads. 0 for none."""
        offer = self.offer
        if offer.other_bytes is None:
            return [offer.end_up_to(num_chunks)]
        usable = {t for t in Tier if self._loads(t) and not self.tiers[t].on_trial}
        found = {0}
        for tiers in (usable - {Tier.REDIS}, usable):
            end = offer.end_up_to(num_chunks)
            for _ in range(_MAX_ENDS):
                if end == 0:
                    break
                needed = {tier for tier, count in offer.other_bytes(end).items() if count}
                if needed <= tiers:
                    break
                end = offer.end_up_to(end - 1)
            else:
                end = 0
            found.add(end)
        return sorted(found)
