"""What routers are told, report by report."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from lmcache_connector.kv_events.log import (
    BlockRun,
    BlocksRemoved,
    BlocksStored,
    KvEventLog,
)
from lmcache_connector.plans import CacheEvent, RankReport, Tier


def blocks(name: bytes) -> BlockRun:
    return BlockRun((name + b"0", name + b"1"), None, array("I", range(8)), block_size=4)


def report(rank: int, admitted: str = "", evicted: str = "", written: str = "") -> RankReport:
    events = [CacheEvent(key.encode(), True) for key in admitted]
    events += [CacheEvent(key.encode(), False) for key in evicted]
    return RankReport(rank, tuple(events), (), written=tuple(key.encode() for key in written))


def log_of(keys: str, world_size: int = 1) -> KvEventLog:
    log = KvEventLog(world_size)
    log.describe([key.encode() for key in keys], lambda i: blocks(keys[i].encode()))
    return log


def test_each_tier_tells_what_it_takes_in_and_lets_go() -> None:
    log = log_of("a")
    log.apply(report(0, admitted="a"))
    log.apply(report(0, written="a", evicted="a"))
    log.missing(b"a")
    a = blocks(b"a")
    assert log.take() == [
        BlocksStored(Tier.CPU, a),
        BlocksStored(Tier.REDIS, a),
        BlocksRemoved(Tier.CPU, a.hashes),
        BlocksRemoved(Tier.REDIS, a.hashes),
    ]
    assert log.take() == []
    assert len(log) == 0


def test_a_chunk_is_there_when_all_ranks_have_it_and_gone_when_one_lacks_it() -> None:
    log = log_of("a", world_size=2)
    log.apply(report(0, admitted="a"))
    assert log.take() == []
    log.apply(report(1, admitted="a"))
    log.apply(report(1, admitted="a"))  # again: nothing new
    assert log.take() == [BlocksStored(Tier.CPU, blocks(b"a"))]
    log.apply(report(0, evicted="a"))
    log.apply(report(1, evicted="a"))
    assert log.take() == [BlocksRemoved(Tier.CPU, blocks(b"a").hashes)]
    assert len(log) == 0


def test_what_nobody_described_is_passed_over() -> None:
    log = log_of("")
    log.apply(report(0, admitted="a", evicted="a", written="a"))
    log.missing(b"a")
    assert log.take() == []


def test_a_job_that_brought_nothing_leaves_nothing() -> None:
    log = log_of("ab")
    log.apply(report(0, admitted="a"))
    log.settle([b"a", b"b"])
    assert len(log) == 1


def test_after_a_reset_everything_is_gone_once() -> None:
    log = log_of("ab")
    log.apply(report(0, admitted="ab", written="a"))
    log.take()
    log.clear()
    log.apply(report(0, evicted="ab"))
    removed = log.take()
    assert all(isinstance(event, BlocksRemoved) for event in removed)
    assert {(event.tier, event.hashes) for event in removed} == {  # type: ignore[union-attr]
        (Tier.CPU, blocks(b"a").hashes),
        (Tier.REDIS, blocks(b"a").hashes),
        (Tier.CPU, blocks(b"b").hashes),
    }
    assert len(removed) == 3


acts = st.lists(st.tuples(st.integers(0, 1), st.sampled_from("abc"), st.booleans()), max_size=40)


@given(acts)
def test_stored_and_removed_alternate_and_end_with_the_truth(
    steps: list[tuple[int, str, bool]],
) -> None:
    log = KvEventLog(2)
    holders: dict[str, set[int]] = {key: set() for key in "abc"}
    told: set[bytes] = set()
    for rank, key, admitted in steps:
        log.describe([key.encode()], lambda i, key=key: blocks(key.encode()))  # type: ignore[misc]
        log.apply(report(rank, admitted=key) if admitted else report(rank, evicted=key))
        (holders[key].add if admitted else holders[key].discard)(rank)
        for event in log.take():
            if isinstance(event, BlocksStored):
                assert event.blocks.hashes[0] not in told
                told.add(event.blocks.hashes[0])
            else:
                told.remove(event.hashes[0])
    assert told == {f"{key}0".encode() for key, ranks in holders.items() if len(ranks) == 2}
