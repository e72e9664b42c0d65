"""How long a lookup took tells whether the next one is worth a wait."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from math import inf

from lmcache_connector.kv_parts.owners import Share
from lmcache_connector.lookup.any_lookup import AnyLookup
from lmcache_connector.peers.commands import Greeting
from lmcache_connector.peers.lookup import PeerLookup
from lmcache_connector.peers.topology import PeerTopology
from lmcache_connector.plans import Tier
from lmcache_connector.storage.redis.lookup import RedisLookup
from tests.support.clock import within
from tests.support.redis.chunks import PARTS, chunk_key, config
from tests.support.redis.servers import Server

KEYS = [chunk_key(0)]


@contextmanager
def looking(url: str) -> Iterator[AnyLookup]:
    """In Redis, and at peers of which there are none."""
    redis, peers = config(url), config("redis://peers")
    topology = PeerTopology(peers, [], Greeting(1, "the-reader"), Share(0), time.monotonic)
    lookups = {
        Tier.PEER: PeerLookup(peers, [PARTS], topology),
        Tier.REDIS: RedisLookup(redis, [PARTS]),
    }
    with closing(AnyLookup(lookups, time.monotonic)) as lookup:
        yield lookup


def seconds_of(lookup: AnyLookup, seconds: float) -> float:
    """Redis' time in a lookup that may take ``seconds``; it is the only tier with servers."""
    lookup.find(KEYS, time.monotonic() + seconds)
    assert set(lookup.last_seconds) == {Tier.REDIS}
    return lookup.last_seconds[Tier.REDIS]


def test_a_redis_that_answered_too_late_is_not_quick_until_it_answers_in_time(
    valkey: Server,
) -> None:
    with looking(valkey.url) as lookup:
        assert 0.0 < seconds_of(lookup, 5.0) < 5.0
        with valkey.silent():
            assert seconds_of(lookup, 0.1) == inf
            assert seconds_of(lookup, 0.1) == inf, "a late server is not asked, and not quick"
        assert within(30.0, lambda: seconds_of(lookup, 5.0) < inf)
