"""How long a lookup took, and who has answered it."""

from __future__ import annotations

import time
from contextlib import closing
from math import inf

from lmcache_connector.kv_parts.owners import Share
from lmcache_connector.lookup.any_lookup import AnyLookup
from lmcache_connector.lookup.background_lookup import BackgroundLookup
from lmcache_connector.peers.commands import Greeting
from lmcache_connector.peers.lookup import PeerLookup
from lmcache_connector.peers.topology import PeerTopology
from lmcache_connector.plans import Tier
from lmcache_connector.storage.redis.lookup import RedisLookup
from tests.support.clock import within
from tests.support.redis.chunks import PARTS, chunk_key, config
from tests.support.redis.servers import Server


def lookup_in(url: str) -> AnyLookup:
    """In Redis, and at peers of which there are none."""
    peers = config("redis://peers")
    topology = PeerTopology(peers, [], Greeting(1, "the-reader"), Share(0), time.monotonic)
    return AnyLookup(
        {
            Tier.PEER: PeerLookup(peers, [PARTS], topology),
            Tier.REDIS: RedisLookup(config(url), [PARTS]),
        },
        time.monotonic,
    )


def test_a_redis_that_answered_too_late_is_not_quick_until_it_answers_in_time(
    valkey: Server,
) -> None:
    with closing(BackgroundLookup(lookup_in(valkey.url), 0.5, time.monotonic)) as remote:

        def seconds() -> float:
            """Redis' time in a lookup; it is the only tier with servers."""
            asked = remote.submit([chunk_key(0)])
            assert asked.wait(30.0)
            assert set(remote.expected_seconds) == {Tier.REDIS}
            return remote.expected_seconds[Tier.REDIS]

        assert within(30.0, lambda: 0.0 < seconds() < inf)
        with valkey.silent():
            assert seconds() == inf
            assert seconds() == inf, "a late server is not asked, and not quick"
        assert within(30.0, lambda: seconds() < inf)
