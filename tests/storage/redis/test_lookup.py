from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager

from lmcache_connector.storage.geometry import ChunkGeometry, PartGeometries
from lmcache_connector.storage.redis.lookup import RedisLookup
from tests.support.clock import wait_until
from tests.support.redis.chunks import GEOMETRY, chunk_key, config, open_tier, put_all
from tests.support.redis.proxies import HeldReplies
from tests.support.redis.servers import Server
from tests.support.redis.slow_proxy import SlowLink, SlowProxy


@contextmanager
def open_lookup(
    url: str,
    ranks: Sequence[ChunkGeometry] = (GEOMETRY,),
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[RedisLookup]:
    geometries = [PartGeometries((rank,)) for rank in ranks]
    lookup = RedisLookup(config(url, read_timeout_seconds=2.0), geometries, clock=clock)
    try:
        yield lookup
    finally:
        lookup.close()


@contextmanager
def lookup_behind(
    proxy: SlowProxy | HeldReplies, server: Server, clock: Callable[[], float] = time.monotonic
) -> Iterator[RedisLookup]:
    """A lookup that has found the first chunk through ``proxy``."""
    with open_tier(server.url) as tier:
        put_all(tier, range(1))
    with proxy, open_lookup(proxy.url, clock=clock) as lookup:
        wait_until(lambda: ask(lookup, range(1)) == 1, "the proxy does not answer")
        yield lookup


def ask(lookup: RedisLookup, indices: range, seconds: float = 5.0) -> int:
    return lookup.exists_prefix([chunk_key(i) for i in indices], time.monotonic() + seconds)


def test_the_first_missing_chunk_ends_the_hit(valkey: Server) -> None:
    with open_tier(valkey.url) as tier, open_lookup(valkey.url) as lookup:
        assert ask(lookup, range(8)) == 0
        put_all(tier, [0, 1, 2, 4, 5])
        assert ask(lookup, range(8)) == 3
        assert ask(lookup, range(3, 8)) == 0
        assert ask(lookup, range(4, 6)) == 2
        assert ask(lookup, range(0)) == 0


def test_a_chunk_is_a_hit_with_all_values_of_all_ranks(valkey: Server) -> None:
    ranks = [ChunkGeometry(16, 0, (64,) * 4, (shard,), 2, "bfloat16") for shard in (0, 1)]
    with open_lookup(valkey.url, ranks) as lookup:
        with open_tier(valkey.url, ranks[0]) as tier:
            put_all(tier, range(3))
        assert ask(lookup, range(3)) == 0
        with open_tier(valkey.url, ranks[1]) as tier:
            put_all(tier, range(2))
        assert ask(lookup, range(3)) == 2
        with valkey.client() as client:
            client.delete(client.keys(f"*{chunk_key(1).hex()}*-*")[0])
        assert ask(lookup, range(3)) == 1


def test_a_whole_prompt_is_one_round_trip(valkey: Server) -> None:
    with open_tier(valkey.url) as tier, open_lookup(valkey.url) as lookup:
        put_all(tier, range(128))
        assert ask(lookup, range(128)) == 128
        with valkey.client() as client:
            before = client.info("stats"), client.info("commandstats")
            assert ask(lookup, range(128)) == 128
            after = client.info("stats"), client.info("commandstats")
    calls = [stats["cmdstat_exists"]["calls"] for _, stats in (before, after)]
    assert calls[1] - calls[0] == 128, "one command a chunk, however many values it has"
    reads = [stats["total_reads_processed"] for stats, _ in (before, after)]
    # Fewer reads than commands: they came together. (INFO costs some.)
    assert reads[1] - reads[0] < 20


def test_a_look_up_past_its_deadline_misses(valkey: Server) -> None:
    with open_tier(valkey.url) as tier, open_lookup(valkey.url) as lookup:
        put_all(tier, range(1))
        assert ask(lookup, range(1), seconds=-1.0) == 0


def test_no_look_up_outlasts_its_deadline(valkey: Server) -> None:
    link = SlowLink()
    with lookup_behind(SlowProxy(valkey.port, link), valkey) as lookup:
        link.set(stalled=True)
        talks_again = threading.Timer(8.0, link.set)
        talks_again.start()
        began = time.monotonic()
        assert ask(lookup, range(1), seconds=0.2) == 0
        assert time.monotonic() - began < 6.0
        talks_again.cancel()
        link.set()


def connections(server: Server, others: Set[str] = frozenset()) -> set[str]:
    """Ids of the connections that lookups have used, but those of ``others``: the connection of an
    earlier test's lookup may still be open."""
    with server.client() as client:
        used = {each["id"] for each in client.client_list() if each["cmd"] == "exists"}
    return used - others


def test_a_late_answer_costs_no_connection(valkey: Server) -> None:
    link = SlowLink()
    others = connections(valkey)
    with lookup_behind(SlowProxy(valkey.port, link), valkey) as lookup:
        before = connections(valkey, others)
        link.set(stalled=True)
        assert ask(lookup, range(1), seconds=0.1) == 0
        link.set()
        wait_until(lambda: ask(lookup, range(1)) == 1, "the lookup did not recover")
        assert before
        assert connections(valkey, others) == before


def test_a_late_answer_read_by_a_late_thread_costs_no_connection(valkey: Server) -> None:
    """Whenever the thread reads the clock, the system runs other threads first: time passes."""
    lost = pause = 0.0

    def clock() -> float:
        nonlocal lost
        lost += pause
        return time.monotonic() + lost

    proxy = HeldReplies(valkey.port)
    others = connections(valkey)
    with lookup_behind(proxy, valkey, clock) as lookup:
        before = connections(valkey, others)
        proxy.is_holding = True
        assert ask(lookup, range(1), seconds=1.0) == 0  # long enough to be asked at all
        proxy.let(len(b":0\r\n"))
        proxy.is_holding = False
        pause = 0.01
        lookup.maintain()
        wait_until(lambda: ask(lookup, range(1), 60.0) == 1, "no answer")
        assert connections(valkey, others) == before


def test_a_server_that_owes_the_end_of_an_answer_is_silent(valkey: Server) -> None:
    proxy = HeldReplies(valkey.port)
    others = connections(valkey)
    with lookup_behind(proxy, valkey) as lookup:
        before = connections(valkey, others)
        assert before
        proxy.is_holding = True
        assert ask(lookup, range(400), seconds=1.0) == 0  # long enough to be asked at all

        def is_given_up() -> bool:
            proxy.let_any()
            lookup.maintain()
            return not connections(valkey, others) & before

        proxy.let(1)  # the answer has begun
        wait_until(is_given_up, "a byte now and then keeps the connection", 10.0)
