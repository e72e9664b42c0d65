"""KV cache events for routers, report by report."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_connector.kv_events.log import BlockRun, KvEvent, KvEventLog
from lmcache_connector.kv_events.vllm_events import to_vllm
from lmcache_connector.plans import CacheEvent, RankReport, Tier
from tests.support.clock import Clock


def blocks(name: bytes) -> BlockRun:
    return BlockRun((name + b"0", name + b"1"), None, array("I", range(8)), block_size=4)


def stored(tier: Tier, run: BlockRun) -> KvEvent:
    return KvEvent(tier, run, is_stored=True)


def removed(tier: Tier, run: BlockRun) -> KvEvent:
    return KvEvent(tier, run, is_stored=False)


def report(rank: int, admitted: str = "", evicted: str = "", written: str = "") -> RankReport:
    events = [CacheEvent(key.encode(), True) for key in admitted]
    events += [CacheEvent(key.encode(), False) for key in evicted]
    return RankReport(rank, tuple(events), (), written=tuple(key.encode() for key in written))


def log_of(keys: str, world_size: int = 1) -> KvEventLog:
    log = KvEventLog(world_size)
    log.describe([key.encode() for key in keys], 0, lambda i: blocks(keys[i].encode()))
    return log


def test_each_tier_reports_stored_and_removed_chunks() -> None:
    log = log_of("a")
    log.apply(report(0, admitted="a"))
    log.apply(report(0, written="a", evicted="a"))
    log.missing(b"a")
    a = blocks(b"a")
    assert log.take() == [
        stored(Tier.CPU, a),
        stored(Tier.REDIS, a),
        removed(Tier.CPU, a),
        removed(Tier.REDIS, a),
    ]
    assert log.take() == []
    log.forget_jobs()
    assert len(log._chunks) == 0


def test_a_chunk_of_several_jobs_is_stored_once_whichever_job_ends_first() -> None:
    log = log_of("a")
    log.describe([b"a"], 1, lambda i: blocks(b"a"))
    log.settle([b"a"], 0)
    log.missing(b"a")
    log.apply(report(0, admitted="a"))
    assert log.take() == [stored(Tier.CPU, blocks(b"a"))]
    log.apply(report(0, evicted="a"))
    log.apply(report(0, admitted="a"))
    assert len(log.take()) == 2
    log.settle([b"a"], 1)
    assert len(log._chunks) == 1
    log.apply(report(0, evicted="a"))
    assert len(log._chunks) == 0


def removed_from_redis(log: KvEventLog) -> list[str]:
    """The removed chunks, by their letters in `log_of`."""
    return [
        event.blocks.hashes[0][:-1].decode()
        for event in log.take()
        if not event.is_stored and event.tier is Tier.REDIS
    ]


def test_chunks_of_redis_beyond_a_bound_are_removed_least_recent_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Redis does not report its evictions."""
    monkeypatch.setattr("lmcache_connector.kv_events.log.MAX_REDIS_CHUNKS", 3)
    log = log_of("abcde")
    log.apply(report(0, admitted="abcde", written="abc"))
    log.apply(report(0, evicted="abcde"))
    log.describe([b"a"], 0, lambda i: blocks(b"a"))  # a use
    log.take()
    log.describe([b"d", b"e"], 0, lambda i: blocks(b"de"[i : i + 1]))
    log.apply(report(0, written="d"))
    assert removed_from_redis(log) == ["b"]
    log.apply(report(0, written="e"))
    assert removed_from_redis(log) == ["c"]
    log.forget_jobs()
    assert len(log._chunks) == 3


@pytest.mark.parametrize("refresh_ttl", [False, True])
def test_chunks_are_removed_after_their_ttl(refresh_ttl: bool) -> None:
    clock = Clock()
    log = KvEventLog(1, 60.0, refresh_ttl=refresh_ttl, clock=clock)
    log.describe([b"a", b"b"], 0, lambda i: blocks(b"ab"[i : i + 1]))
    log.apply(report(0, written="ab"))
    clock.now += 50
    log.describe([b"a"], 0, lambda i: blocks(b"a"))  # a load
    log.apply(report(0))
    assert removed_from_redis(log) == []
    clock.now += 10
    log.apply(report(0))
    assert removed_from_redis(log) == (["b"] if refresh_ttl else ["a", "b"])
    clock.now += 50
    log.apply(report(0))
    assert removed_from_redis(log) == (["a"] if refresh_ttl else [])
    log.forget_jobs()
    assert len(log._chunks) == 0


acts = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.sampled_from("abcd"),
        st.sampled_from(["admitted", "evicted", "written", "missing", "reset"]),
        st.booleans(),
    ),
    max_size=40,
)


@given(acts)
def test_events_alternate_and_end_with_the_true_state(
    steps: list[tuple[int, str, str, bool]],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lmcache_connector.kv_events.log.MAX_REDIS_CHUNKS", 3)
        patch.setattr("lmcache_connector.kv_events.log.MAX_REMOVALS", 2)
        log = KvEventLog(2)
        holders: dict[tuple[Tier, str], set[int]] = {(t, k): set() for t in Tier for k in "abcd"}
        told: set[tuple[Tier, bytes]] = set()

        def take() -> None:
            for event in log.take():
                place = event.tier, event.blocks.hashes[0]
                assert (place in told) != event.is_stored
                (told.add if event.is_stored else told.remove)(place)

        for rank, key, act, takes in steps:
            if act == "reset":
                log.clear()
                holders = {place: set() for place in holders}
            elif act == "missing":
                log.missing(key.encode())
                holders[Tier.REDIS, key].clear()
            else:
                log.describe([key.encode()], 0, lambda i, key=key: blocks(key.encode()))  # type: ignore[misc]
                log.apply(report(rank, **{act: key}))
                held = holders[Tier.REDIS if act == "written" else Tier.CPU, key]
                (held.discard if act == "evicted" else held.add)(rank)
            if takes:
                take()
        while log.untaken:
            take()
        names = {
            (tier, f"{key}0".encode()) for (tier, key), ranks in holders.items() if len(ranks) == 2
        }
        assert told <= names
        assert {name for name in told if name[0] is Tier.CPU} == {
            name for name in names if name[0] is Tier.CPU
        }
        assert len(names - told) <= 1  # three of the four in Redis are kept


@pytest.mark.parametrize("tier", [Tier.CPU, Tier.REDIS])
@pytest.mark.parametrize("shared", [True, False])
def test_only_shared_chunks_of_redis_are_remote(tier: Tier, shared: bool) -> None:
    """Routers credit every instance with ``REMOTE`` blocks."""
    run = replace(blocks(b"a"), shared=shared)
    for event in (stored(tier, run), removed(tier, run)):
        told = to_vllm(event)
        assert told.locality == ("REMOTE" if shared and tier is Tier.REDIS else "LOCAL")


def test_the_owners_copy_of_a_shared_chunk_counts() -> None:
    log = log_of("a", world_size=2)
    log.needed = lambda key: 2
    log.apply(report(1, admitted="a", written="a"))
    a = blocks(b"a")
    assert log.take() == [stored(Tier.REDIS, a), stored(Tier.CPU, a)]
    log.apply(report(0, admitted="a"))  # a copy, stored while the owner was away
    log.apply(report(0, evicted="a"))
    assert log.take() == []
    log.apply(report(0, evicted="a"))  # the owner's chunk cannot be read
    assert log.take() == [removed(Tier.CPU, a)]
    log.apply(report(1, admitted="a"))
    log.clear()
    taken = log.take()[1:]
    assert len(taken) == 2
    assert all(removed(tier, a) in taken for tier in (Tier.CPU, Tier.REDIS))
