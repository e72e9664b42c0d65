"""What memory holds and Redis lacks comes back: over the real worker side, LMCache and Valkey."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from lmcache_connector.plans import Claim, PrefixUse, StepPlan
from lmcache_connector.worker.redis_writes import Offers, Pace, RedisWrites
from tests.support.clock import wait_until
from tests.support.jobs import store_job
from tests.support.redis.servers import Server, running_valkey, value_names
from tests.support.workers import SteppedWorker
from tests.worker.test_adapter import KEYS, LONG, make_instance

KEY = random.Random(0).randbytes(32)
PACE = Pace(granted_seconds=30.0, retry_seconds=6.0, max_retry_seconds=60.0)
QUICK = Pace(0.2, retry_seconds=0.2, max_retry_seconds=0.5, max_unused_retry_seconds=0.5)
NUM_CHUNKS = 8
NUM_VALUES = NUM_CHUNKS * 2  # one per KV head
USE = PrefixUse(Claim(), tuple(KEYS[:NUM_CHUNKS]), may_write=True)


class TestOffers:
    def test_a_wanted_chunk_is_offered_once_in_a_while(self) -> None:
        offers = Offers(PACE)
        for _ in range(3):
            offers.want(KEY, 100.0)
        assert offers.take(100.0, 9) == [KEY]
        offers.want(KEY, 100.5)
        assert offers.take(100.5, 9) == [], "its write is under way"
        offers.ended(KEY, True, 101.0)
        offers.want(KEY, 130.9)
        assert offers.take(130.9, 9) == []
        offers.want(KEY, 131.1)
        assert offers.take(131.1, 9) == [KEY]

    def test_a_failed_write_is_tried_again_less_and_less_often(self) -> None:
        offers, now, waits = Offers(PACE), 0.0, []
        for _ in range(9):
            offers.ended(KEY, False, now)
            begun = now
            while not offers.take(now, 1):
                now += 0.5
                assert now - begun < 1000.0
            waits.append(now - begun)
        assert waits == [6.0, 12.0, 24.0, 48.0, 96.0, 192.0, 384.0, 600.0, 600.0]

    def test_a_chunk_that_no_request_uses_comes_back_after_a_long_outage(self) -> None:
        offers, day = Offers(PACE), 86_400
        offers.ended(KEY, False, 0.0)
        for now in range(day):
            if offers.take(now, 1):
                offers.ended(KEY, False, now)
        assert any(offers.take(now, 1) for now in range(day, day + 601))

    def test_a_chunk_that_requests_use_is_tried_again_within_a_minute(self) -> None:
        offers = Offers(PACE)
        for _ in range(9):
            offers.ended(KEY, False, 0.0)
        for now in range(60):
            offers.want(KEY, now)
            assert offers.take(now, 1) == []
        assert offers.take(60.0, 1) == [KEY]

    @pytest.mark.parametrize(
        ("lifetime", "granted"), [(None, 30.0), (6.0, 2.0), (90.0, 30.0), (3600.0, 30.0)]
    )
    def test_values_count_as_present_for_a_third_of_their_lifetime_at_most(
        self, lifetime: float | None, granted: float
    ) -> None:
        assert Pace.for_lifetime(lifetime).granted_seconds == granted


def keys(name: bytes, count: int) -> list[bytes]:
    return [name + i.to_bytes(31, "big") for i in range(count)]


class Offering:
    """Offers to nodes while they have room. The first byte of a key names its node."""

    def __init__(self) -> None:
        self.now = 0.0
        self.offered: list[bytes] = []
        self.room = {ord("s"): 0, ord("q"): 1 << 20}
        here: Any = SimpleNamespace(
            put=lambda key, *_: self.offer(key),
            has_room=lambda key, _: self.room[key[0]] > 0,
            settle=lambda: None,
            get=lambda key: SimpleNamespace(ref_count_down=lambda: None),
            value=lambda key, memory: memoryview(b""),
        )
        self.offers = RedisWrites(here, here, PACE, lambda: self.now, report=False)

    def offer(self, key: bytes) -> None:
        self.room[key[0]] -= 1
        self.offered.append(key)

    def ticks(self, count: int) -> None:
        for _ in range(count):
            self.offers.offer_due()
            self.now += 0.1


def test_offers_leave_room_for_fresh_writes() -> None:
    offering = Offering()
    offering.room[ord("q")] = 3
    offering.offers.want(keys(b"q", 50))
    offering.ticks(5)
    assert len(offering.offered) == 3
    offering.room[ord("q")] = 3
    offering.ticks(12)
    assert len(offering.offered) == 6


def test_while_a_node_is_slow_its_own_chunks_wait() -> None:
    offering = Offering()
    slow, quick = keys(b"s", 1500), keys(b"q", 30)
    offering.offers.want(slow)
    offering.now += 0.1
    offering.offers.want(quick)
    offering.ticks(8)
    assert sorted(offering.offered) == quick
    offering.room[ord("s")] = 1 << 20
    offering.ticks(150)
    assert sorted(offering.offered) == sorted([*quick, *slow])


@pytest.fixture
def own_server() -> Iterator[Server]:
    with running_valkey() as server:
        yield server


@pytest.fixture
def instance(own_server: Server) -> Iterator[SteppedWorker]:
    with make_instance(own_server.port, pace=QUICK) as made:
        yield made


def store(instance: SteppedWorker) -> None:
    block_ids = tuple(range(2 * NUM_CHUNKS))
    keys = KEYS[:NUM_CHUNKS]
    job = store_job(1, "r", keys, (block_ids,))
    instance.run(StepPlan(stores=(job,)))
    instance.wait_for(1)


def wait_for_all(server: Server, instance: SteppedWorker, wanted: bool) -> None:
    """Until all values are there; with ``wanted``, while requests want them."""

    def are_there() -> bool:
        if wanted:
            instance.run(StepPlan(idle=True, uses=(USE,)))
        return len(value_names(server)) == NUM_VALUES

    wait_until(are_there, "the values did not come back")


def test_a_purge_or_a_restart_is_made_good(own_server: Server, instance: SteppedWorker) -> None:
    store(instance)
    wait_for_all(own_server, instance, wanted=False)
    with own_server.client() as client:
        client.flushall()
    wait_for_all(own_server, instance, wanted=True)
    own_server.kill()
    own_server.start()
    assert value_names(own_server) == []
    wait_for_all(own_server, instance, wanted=True)


def test_offers_wait_for_room_in_a_small_queue(own_server: Server) -> None:
    """Without room they would fail, and not be tried again for long."""
    pace = Pace(0.2, retry_seconds=1e3, max_retry_seconds=1e3, max_unused_retry_seconds=1e3)
    with make_instance(own_server.port, pace=pace, write_queue_bytes=2 * (32 << 10)) as instance:
        for first in range(0, NUM_CHUNKS, 2):
            blocks = tuple(range(2 * first, 2 * first + 4))
            job = store_job(first + 1, "r", KEYS[first : first + 2], (blocks,))
            instance.run(StepPlan(stores=(job,)))
            instance.wait_for(first + 1)
            tier = instance.worker._tiers.redis
            assert tier is not None
            assert tier.flush(LONG)
            assert len(value_names(own_server)) == 2 * (first + 2)
        with own_server.client() as client:
            client.flushall()
        wait_for_all(own_server, instance, wanted=True)


def test_hits_from_memory_renew_the_lifetime(own_server: Server) -> None:
    lifetime: dict[str, Any] = {"ttl_seconds": 100.0, "refresh_ttl": True}
    with make_instance(own_server.port, pace=QUICK, **lifetime) as instance:
        store(instance)
        wait_for_all(own_server, instance, wanted=False)
        with own_server.client() as client:
            names = value_names(own_server)
            for name in names:
                client.pexpire(name, 50_000)

            def all_renewed() -> bool:
                instance.run(StepPlan(idle=True, uses=(USE,)))
                return all(client.pttl(name) > 90_000 for name in names)

            wait_until(all_renewed, "the lifetimes were not renewed")
