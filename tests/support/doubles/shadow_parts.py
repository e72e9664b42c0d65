"""Stand-ins for parts of a shadow engine's scheduler side: for what identifies requests, and for
lookups in Redis, which are answered after a random number of questions."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from vllm.v1.request import Request

from lmcache_connector.keys.request_keys import MultimodalSpan, RequestIdentity
from lmcache_connector.lookup.background_lookup import BackgroundLookup, Places
from lmcache_connector.lookup.hit_finder import HitFinder
from lmcache_connector.metrics.samples import Tally
from lmcache_connector.plans import Tier
from lmcache_connector.scheduler.scheduler import Scheduler
from lmcache_connector.threads import StepWait
from tests.support.doubles.shadow_memory import Source
from tests.support.doubles.shadow_worker import ShadowRank


class ShadowAdapters:
    def may_compute(self, request: Request, lora: str | None) -> bool:
        return True


class ShadowEncoders:
    """There is no encoder cache: a request's own images are what its KV is computed with."""

    def vouches(self, *_: Any) -> bool:
        return True

    def next_step(self, *_: Any) -> None:
        """Nothing is encoded."""

    def clear(self) -> None:
        """Nothing is held."""


class ShadowIdentifier:
    """Stands for ``RequestIdentifier``. ``source_of(request_id)``: the truth."""

    def __init__(self, source_of: Callable[[str], Source]) -> None:
        self._source_of = source_of
        self.adapters = ShadowAdapters()

    def identify(self, request: Request, wait: StepWait | None = None) -> RequestIdentity | None:
        source = self._source_of(request.request_id)
        if source.is_hidden:
            return None
        return RequestIdentity(
            cache_salt=source.salt,
            lora=f"{source.adapter}/{source.adapter_version}" if source.adapter else None,
            multimodal=tuple(MultimodalSpan(i.content, i.start, i.end) for i in source.images),
        )

    def is_current(self, request: Request, wait: StepWait | None = None) -> bool:
        return True

    def multimodal(self, request_id: str) -> None:
        return None

    def give_up(self, request_id: str) -> None:
        """Nothing is being read."""

    def forget(self, request: Request) -> None:
        """Nothing is remembered."""

    def forget_all(self) -> None:
        """Nothing is remembered."""

    def close(self) -> None:
        """Nothing runs."""


class SteppedLookup(BackgroundLookup):
    """Redis lookups that are answered after a random number of questions."""

    def __init__(self, ranks: Sequence[ShadowRank], chance: random.Random) -> None:
        # Not the real one's: it starts a thread.
        self.expected_seconds, self.found_share = {}, 0.5
        self._ranks = ranks
        self._chance = chance

    def held(self, keys: Sequence[bytes]) -> frozenset[bytes]:
        return frozenset(k for k in keys if all(k in rank.remote for rank in self._ranks))

    def submit(self, keys: Sequence[bytes]) -> SteppedAnswer:  # type: ignore[override]
        held = self.held(keys)
        absent = next((key for key in keys if key not in held), None)
        return SteppedAnswer(held, self._chance.choice([0, 0, 1, 3]), absent)

    def report(self, tally: Tally) -> None:
        """Nobody reads how long it took."""

    def close(self) -> None:
        """Nothing is held."""


class SteppedAnswer:
    """Comes when it was waited for ``delay`` times."""

    def __init__(self, found: frozenset[bytes], delay: int, absent: bytes | None = None) -> None:
        self._found = dict.fromkeys(found, Tier.REDIS)
        self.absent = absent
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
