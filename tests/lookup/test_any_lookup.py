"""How long a lookup took, and who has answered it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from math import inf

import pytest

from lmcache_connector.kv_parts.owners import Share
from lmcache_connector.lookup.any_lookup import AnyLookup
from lmcache_connector.lookup.background_lookup import BackgroundLookup
from lmcache_connector.peers.commands import Greeting
from lmcache_connector.peers.lookup import PeerLookup
from lmcache_connector.peers.topology import PeerTopology
from lmcache_connector.plans import Tier
from lmcache_connector.storage.redis.client.circuit_breaker import CircuitState
from lmcache_connector.storage.redis.lookup import RedisLookup
from tests.support.clock import within
from tests.support.redis.chunks import PARTS, chunk_key, config, open_tier, put_all
from tests.support.redis.server_groups import running_cluster
from tests.support.redis.servers import Server
from tests.support.redis.slow_proxy import SlowLink, proxy_process


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


def expected(remote: BackgroundLookup) -> float:
    """Redis' time; it is the only tier with servers."""
    assert set(remote.expected_seconds) == {Tier.REDIS}
    return remote.expected_seconds[Tier.REDIS]


def measured(remote: BackgroundLookup) -> float:
    """Redis' time after a lookup."""
    assert remote.submit([chunk_key(0)]).wait(30.0)
    return expected(remote)


def test_a_redis_that_answered_too_late_is_not_quick_until_it_answers_in_time(
    valkey: Server,
) -> None:
    with closing(BackgroundLookup(lookup_in(valkey.url), 0.5, time.monotonic)) as remote:
        assert within(30.0, lambda: 0.0 < measured(remote) < inf)
        with valkey.silent():
            assert measured(remote) == inf
            assert measured(remote) == inf, "a late server is not asked, and not quick"
        assert within(30.0, lambda: expected(remote) < inf), "asked again without a request"


@pytest.fixture
def far(valkey: Server) -> Iterator[BackgroundLookup]:
    """Lookups of 1.5 s at most, in a Redis that has chunk 0 and answers after 0.8 s."""
    with open_tier(valkey.url) as tier:
        assert put_all(tier, range(1)) == [True]
    link = SlowLink()
    with (
        proxy_process(valkey.port, link) as port,
        closing(
            BackgroundLookup(lookup_in(f"redis://127.0.0.1:{port}"), 1.5, time.monotonic)
        ) as remote,
    ):
        assert within(30.0, lambda: 0.0 < measured(remote) < inf)
        link.set(latency_seconds=0.8)
        assert within(30.0, lambda: 0.7 < measured(remote) < inf)
        yield remote


HELD = {chunk_key(0): Tier.REDIS}


def test_a_lookup_with_too_little_time_changes_nothing_for_the_next(far: BackgroundLookup) -> None:
    """Of two lookups at once, the second has the time that the first leaves."""
    for _ in range(2):
        asked, late = far.submit([chunk_key(0)]), far.submit([chunk_key(1)])
        assert late.wait(30.0)
        assert asked.value == HELD
        assert 0.7 < expected(far) < inf


@pytest.fixture
def slow(valkey: Server) -> Iterator[tuple[AnyLookup, SlowLink]]:
    """A Redis that has chunk 0 and answers after 0.3 s, over a new connection."""
    with open_tier(valkey.url) as tier:
        assert put_all(tier, range(1)) == [True]
    link = SlowLink()
    with (
        proxy_process(valkey.port, link) as port,
        closing(lookup_in(f"redis://127.0.0.1:{port}")) as lookup,
    ):

        def is_connected() -> bool:
            lookup.maintain()
            return lookup.servers() == ((f"127.0.0.1:{port}", CircuitState.CLOSED),)

        assert within(30.0, is_connected)
        assert within(30.0, lambda: bool(find_held(lookup)))
        link.set(latency_seconds=0.3)
        yield lookup, link


def find_held(lookup: AnyLookup) -> dict[bytes, Tier]:
    return lookup.find([chunk_key(0)], time.monotonic() + 2.0)


def try_for(lookup: AnyLookup, seconds: float) -> None:
    """A trial that another lookup ends after so long."""
    now = time.monotonic()
    lookup.find([chunk_key(1)], now + 2.0, lambda: time.monotonic() > now + seconds)


def test_a_trial_delays_no_lookup(slow: tuple[AnyLookup, SlowLink]) -> None:
    """It gives way unless its answer is late: a late server would not be asked by the next lookup.
    Waiting then teaches how long its answers take."""
    lookup, link = slow
    try_for(lookup, 0.1)
    assert lookup.answered == [Tier.REDIS], "no answer took as long before"
    assert find_held(lookup) == HELD
    link.set(latency_seconds=0.9)
    try_for(lookup, 0.0)
    assert not lookup.answered
    assert find_held(lookup) == HELD, "the trial has been sent, and its answer comes first"


def test_a_cluster_has_answered_once_all_its_nodes_have(valkey_path: str) -> None:
    keys = [chunk_key(i) for i in range(32)]
    with running_cluster(valkey_path) as cluster:
        redis = RedisLookup(config(cluster.url), [PARTS])
        with closing(AnyLookup({Tier.REDIS: redis}, time.monotonic)) as lookup:

            def has_answered() -> bool:
                lookup.find(keys, time.monotonic() + 1.0)
                return Tier.REDIS in lookup.answered

            assert within(30.0, has_answered)
            with cluster.masters[0].silent():
                assert not has_answered()
