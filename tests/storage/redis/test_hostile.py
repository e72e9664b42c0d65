"""Whatever a server sends, the engine's side stays within bounds of memory, threads and time.

The bounds: 192 MiB; one thread for each reader, writer and connection being made; each call's own
deadline, with a grace for a busy machine.
"""

from __future__ import annotations

import contextlib
import logging
import random
import resource
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pytest

from lmcache_connector.storage.redis.admin import RedisAdmin, RedisAdminError
from lmcache_connector.storage.redis.client.dial import CONNECTION_ERRORS, Client
from lmcache_connector.storage.redis.config import RedisTierConfig
from lmcache_connector.storage.redis.connections import Servers, warn_if_unbounded
from lmcache_connector.storage.redis.lookup import RedisLookup
from lmcache_connector.storage.redis.tier import RedisTier
from lmcache_connector.storage.redis.topology import make_topology
from tests.support.redis.chunks import (
    PARTS,
    Ends,
    chunk_data,
    chunk_key,
    config,
    get_all,
    put_all,
)
from tests.support.redis.hostile_server import HostileServer, hostile_server
from tests.support.redis.servers import Server
from tests.support.waits import wait_until

MAX_MIB = 192
GRACE_SECONDS = 10.0
TIMEOUT_SECONDS = 0.05
CONNECT_SECONDS = 0.25
NUM_CALLERS = 6
# A tier has five threads (two readers, at most two writers, and its caller); a tier or a look-up
# has at most 16 that connect.
MAX_THREADS = NUM_CALLERS * (5 + 16)
FORMS = (
    "redis://127.0.0.1:{}",
    "redis://user:password@127.0.0.1:{}/3",
    "redis+cluster://127.0.0.1:{}",
    "redis+sentinel://127.0.0.1:{}/cache",
)


def settings(url: str) -> RedisTierConfig:
    return config(
        url,
        connect_timeout_seconds=CONNECT_SECONDS,
        read_timeout_seconds=TIMEOUT_SECONDS,
        write_timeout_seconds=TIMEOUT_SECONDS,
        backoff_min_seconds=0.001,
        backoff_max_seconds=0.002,
    )


@dataclass
class Caller:
    """One thread of an engine that calls the hostile server in random ways."""

    url: str
    random: random.Random

    def turn(self) -> None:
        call = self.random.choice(
            [self.connect, self.learn, self.look_up, self.use, self.administer]
        )
        begun = time.monotonic()
        call()
        assert time.monotonic() - begun < GRACE_SECONDS

    def connect(self) -> None:
        config = settings(self.url)
        topology = make_topology(config, time.monotonic)
        servers = Servers(config, topology, time.monotonic, random.random, self.greet)
        with contextlib.suppress(*CONNECTION_ERRORS):
            topology.prepare()
            for node in islice(topology.nodes(), 3):
                servers.connect(node).close()

    def greet(self, client: Client) -> None:
        warn_if_unbounded(client)

    def learn(self) -> None:
        topology = make_topology(settings(self.url), time.monotonic)
        with contextlib.suppress(*CONNECTION_ERRORS):
            topology.prepare()
        assert len(topology.nodes()) <= 1000

    def look_up(self) -> None:
        lookup = RedisLookup(settings(self.url), [PARTS])
        keys = [chunk_key(i) for i in range(8)]
        for _ in range(4):
            assert 0 <= lookup.exists_prefix(keys, time.monotonic() + TIMEOUT_SECONDS) <= len(keys)
            lookup.maintain()
        lookup.close()

    def use(self) -> None:
        tier, ends = RedisTier(settings(self.url), PARTS), Ends()
        for index in range(4):
            tier.put(chunk_key(index), memoryview(chunk_data(index)), ends, index)
            hits, data = get_all(tier, [index], seconds=2 * TIMEOUT_SECONDS)
            assert not hits[0] or data[0] == chunk_data(index)
        names = {thread.name for thread in threading.enumerate()}
        assert {"lmc-redis-read-0", "lmc-redis-writers"} <= names
        tier.close(0.2)
        ends.wait(4)

    def administer(self) -> None:
        with contextlib.suppress(RedisAdminError), RedisAdmin(settings(self.url)) as admin:
            for node in islice(admin.nodes(), 3):
                admin.facts(node)
            for _ in islice(admin.payloads(None), 20):
                pass


@dataclass
class Crowd:
    """Callers at work until ``num_conversations`` have begun."""

    server: HostileServer
    seed: int

    def __post_init__(self) -> None:
        self.failures: list[BaseException] = []
        self.most_threads = 0

    def run(self, num_conversations: int) -> None:
        threads = [
            threading.Thread(target=self._work, args=(number, num_conversations))
            for number in range(NUM_CALLERS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _work(self, number: int, num_conversations: int) -> None:
        chance = random.Random(f"{self.seed}/{number}")
        try:
            while self.server.num_conversations < num_conversations and not self.failures:
                Caller(chance.choice(FORMS).format(self.server.port), chance).turn()
                self.most_threads = max(self.most_threads, threading.active_count())
        except BaseException as error:  # noqa: BLE001 - shown by the test
            self.failures.append(error)


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _converse(
    valkey: Server, caplog: pytest.LogCaptureFixture, seed: int, num_conversations: int
) -> None:
    threads, before = threading.active_count(), peak_mib()
    with hostile_server(seed, valkey.port) as server:
        crowd = Crowd(server, seed)
        crowd.run(num_conversations)
        assert crowd.failures == []
        assert server.num_conversations >= num_conversations
        assert crowd.most_threads - threads <= MAX_THREADS
        assert peak_mib() - before <= MAX_MIB
        # No reply raised an error that the code does not expect.
        assert [r for r in caplog.records if r.levelno >= logging.ERROR] == []
        wait_until(lambda: threading.active_count() == threads, "a thread leaked")


def test_a_hostile_server_costs_misses_only(
    valkey: Server, caplog: pytest.LogCaptureFixture
) -> None:
    _converse(valkey, caplog, seed=1, num_conversations=1200)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(2, 12))
def test_many_hostile_conversations(
    valkey: Server, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    _converse(valkey, caplog, seed, num_conversations=2500)


@pytest.fixture(params=range(3))
def long_lived(request: pytest.FixtureRequest, valkey: Server) -> Iterator[Any]:
    with hostile_server(100 + request.param, valkey.port) as server:
        yield server


def test_a_tier_recovers_once_a_hostile_server_is_honest(long_lived: HostileServer) -> None:
    url = f"redis://127.0.0.1:{long_lived.port}"
    tier, lookup = RedisTier(settings(url), PARTS), RedisLookup(settings(url), [PARTS])
    keys = [chunk_key(i) for i in range(4)]

    def ask() -> int:
        lookup.maintain()
        return lookup.exists_prefix(keys, time.monotonic() + 1.0)

    while long_lived.num_conversations < 60:
        put_all(tier, range(4))
        get_all(tier, range(4), seconds=TIMEOUT_SECONDS)
        ask()
    long_lived.be_honest()
    wait_until(lambda: all(put_all(tier, range(4))), "no writes")
    wait_until(lambda: get_all(tier, range(4)) == ([True] * 4, [chunk_data(i) for i in range(4)]),
               "no reads")  # fmt: skip
    wait_until(lambda: ask() == 4, "no look-ups")
    lookup.close()
    assert tier.close(2.0)
