"""Looks chunks up in all remote tiers at once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import compress

from lmcache_connector.net.deadline import Deadline
from lmcache_connector.peers.lookup import enough
from lmcache_connector.plans import Tier
from lmcache_connector.storage.geometry import PartGeometries
from lmcache_connector.storage.redis.client.circuit_breaker import CircuitState
from lmcache_connector.storage.redis.lookup import RedisLookup, await_answers


class AnyLookup:
    """``lookups`` is in the order in which loads try the tiers. One thread finds, maintains and
    closes; the other methods are thread-safe."""

    def __init__(self, lookups: Mapping[Tier, RedisLookup], clock: Callable[[], float]) -> None:
        self._lookups = lookups
        self._clock = clock
        self.last_seconds: Mapping[Tier, float] = {}
        """Duration of the last lookup in each tier with servers, answered or not."""
        self.answered: Collection[Tier] = ()
        """The tiers that were asked in the last lookup, and answered in time."""
        self.absent: bytes | None = None
        """The first key of the last lookup that Redis has answered it does not have whole."""

    @property
    def has_servers(self) -> bool:
        """Whether there is a server to ask. Never blocks."""
        return any(lookup.has_servers for lookup in self._lookups.values())

    def learn_geometries(self, geometries: Sequence[PartGeometries]) -> None:
        for lookup in self._lookups.values():
            lookup.learn_geometries(geometries)

    def find(
        self, keys: Sequence[bytes], deadline: float, gives_way: Callable[[], bool] | None = None
    ) -> dict[bytes, Tier]:
        """The first tier that holds each key, as far as known by ``deadline`` on the clock.

        ``gives_way``: given for a trial, which no request waits for. The trial ends once it returns
        true, unless a server's answer is late: it would then delay the next lookup, too."""
        self.absent = None
        if not keys:
            return {}
        limit, started = Deadline(deadline, self._clock), self._clock()
        asked, asked_at = {}, {}
        for tier, lookup in self._lookups.items():
            asked[tier] = lookup.ask(keys, limit)
            asked_at[tier] = self._clock()
        node_lookups = [node_lookup for each in asked.values() for node_lookup in each]
        lookups = list(self._lookups.values())
        if gives_way is not None:
            for node_lookup in node_lookups:
                node_lookup.is_trial = True
            limit = replace(
                limit, cancelled=lambda: gives_way() and not any(q.is_late() for q in node_lookups)
            )
        await_answers(node_lookups, limit, enough(lookups, keys, node_lookups))
        now = self._clock()
        self.last_seconds = {
            tier: max((q.answered_at or now for q in each), default=asked_at[tier]) - started
            for tier, each in asked.items()
            if self._lookups[tier].has_servers
        }
        self.answered = [t for t, qs in asked.items() if qs and all(q.answered_at for q in qs)]
        places = dict[bytes, Tier]()
        for tier in reversed(list(asked)):
            are_held = self._lookups[tier].found(keys, asked[tier])
            places |= dict.fromkeys(compress(keys, are_held), tier)
            if tier is Tier.REDIS:
                answered = sorted(i for q in asked[tier] for i in q.counts)
                self.absent = next((keys[i] for i in answered if not are_held[i]), None)
        return places

    def maintain(self) -> None:
        """Connect ahead of need; called while there is nothing to look up."""
        for lookup in self._lookups.values():
            lookup.maintain()

    def close(self) -> None:
        for lookup in self._lookups.values():
            lookup.close()

    def servers(self) -> tuple[tuple[str, CircuitState], ...]:
        return tuple(server for lookup in self._lookups.values() for server in lookup.servers())
