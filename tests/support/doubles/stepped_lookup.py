"""Redis look-ups of a shadow engine, answered in as many steps as chance says."""

from __future__ import annotations

import random
from collections.abc import Sequence

from lmcache_connector.lookup.background_lookup import BackgroundLookup, Places
from lmcache_connector.lookup.hit_finder import HitFinder
from lmcache_connector.metrics.samples import Tally
from lmcache_connector.plans import Tier
from lmcache_connector.scheduler.scheduler import Scheduler
from tests.support.doubles.shadow_worker import ShadowRank


class SteppedLookup(BackgroundLookup):
    """Redis look-ups that are answered after a random number of questions."""

    def __init__(self, ranks: Sequence[ShadowRank], chance: random.Random) -> None:
        # Not the real one's: it starts a thread.
        self.last_seconds, self.found_share = {}, 0.5
        self._ranks = ranks
        self._chance = chance

    def held(self, keys: Sequence[bytes]) -> frozenset[bytes]:
        return frozenset(k for k in keys if all(k in rank.remote for rank in self._ranks))

    def submit(self, keys: Sequence[bytes]) -> SteppedAnswer:  # type: ignore[override]
        return SteppedAnswer(self.held(keys), self._chance.choice([0, 0, 1, 3]))

    def report(self, tally: Tally) -> None:
        """Nobody reads how long it took."""

    def close(self) -> None:
        """Nothing is held."""


class SteppedAnswer:
    """Comes when it was waited for ``delay`` times."""

    def __init__(self, found: frozenset[bytes], delay: int) -> None:
        self._found = dict.fromkeys(found, Tier.REDIS)
        self._delay = delay

    @property
    def is_done(self) -> bool:
        return self._delay <= 0

    @property
    def value(self) -> Places | None:
        return self._found if self.is_done else None

    def answer(self, seconds: float) -> Places | None:
        self._delay -= 1
        return self._found if self._delay < 0 else None

    def cancel(self) -> None:
        """Nothing runs."""


def finding_in_redis(adapter: Scheduler, lookup: BackgroundLookup) -> HitFinder:
    adapter.policy.remote_tiers = (Tier.REDIS,)  # it was built without any
    return HitFinder(
        adapter.settings.parts,
        adapter.settings.chunk_size,
        adapter.index,
        adapter.tally,
        adapter.policy,
        adapter.kv_events,
        lookup,
    )
