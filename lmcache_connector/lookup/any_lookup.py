"""Asks all tiers behind the CPU tier at once which chunks they hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from lmcache_connector.net.deadline import Deadline
from lmcache_connector.peers.lookup import enough
from lmcache_connector.plans import Tier
from lmcache_connector.storage.geometry import PartGeometries
from lmcache_connector.storage.redis.client.circuit_breaker import CircuitState
from lmcache_connector.storage.redis.lookup import RedisLookup, await_answers


class AnyLookup:
    """``lookups``: in the order in which a load asks the tiers. One thread owns it, but for
    `servers`."""

    def __init__(self, lookups: Mapping[Tier, RedisLookup], clock: Callable[[], float]) -> None:
        self._lookups = lookups
        self._clock = clock
        self.last_seconds: Mapping[Tier, float] = {}
        """How long each tier's part of the last question was on its way, answered or not."""

    @property
    def has_servers(self) -> bool:
        """Whether there is anybody to ask. From any thread, and at once."""
        return any(lookup.has_servers for lookup in self._lookups.values())

    def learn_geometries(self, geometries: Sequence[PartGeometries]) -> None:
        for lookup in self._lookups.values():
            lookup.learn_geometries(geometries)

    def find(self, keys: Sequence[bytes], deadline: float) -> list[Tier | None]:
        """The first tier that holds each of the ``keys``, as far as is known by ``deadline``, a
        reading of the clock."""
        if not keys:
            return []
        limit, started = Deadline(deadline, self._clock), self._clock()
        asked, asked_at = {}, {}
        for tier, lookup in self._lookups.items():
            asked[tier] = lookup.ask(keys, limit)
            asked_at[tier] = self._clock()
        questions = [question for each in asked.values() for question in each]
        lookups = list(self._lookups.values())
        await_answers(questions, limit, enough(lookups, keys, questions))
        now = self._clock()
        self.last_seconds = {
            tier: max((q.answered_at or now for q in each), default=asked_at[tier]) - started
            for tier, each in asked.items()
        }
        places: list[Tier | None] = [None] * len(keys)
        for tier in reversed(list(asked)):
            for index, is_held in enumerate(self._lookups[tier].found(keys, asked[tier])):
                places[index] = tier if is_held else places[index]
        return places

    def tend(self) -> None:
        """Called when there is nothing to ask: connect ahead of need."""
        for lookup in self._lookups.values():
            lookup.tend()

    def close(self) -> None:
        for lookup in self._lookups.values():
            lookup.close()

    def servers(self) -> tuple[tuple[str, CircuitState], ...]:
        return tuple(server for lookup in self._lookups.values() for server in lookup.servers())
