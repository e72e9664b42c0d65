"""Chunks are counted to two, and forgotten in the order they were seen last."""

from __future__ import annotations

from lmcache_connector.scheduler.store_planner import ReuseTracker


def test_only_the_second_sight_counts() -> None:
    tracker = ReuseTracker()
    assert [tracker.is_second(b"a") for _ in range(4)] == [False, True, False, False]
    assert not tracker.is_second(b"b")


def test_the_chunk_not_seen_for_longest_is_forgotten() -> None:
    tracker = ReuseTracker(capacity=2)
    for key in (b"a", b"b", b"a", b"c"):  # b goes
        tracker.is_second(key)
    assert not tracker.is_second(b"b")  # and now a
    assert tracker.is_second(b"c")
