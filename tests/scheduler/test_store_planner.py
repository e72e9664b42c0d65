"""How often each chunk was wanted."""

from __future__ import annotations

from lmcache_connector.scheduler.store_planner import ReuseTracker


def test_sights_are_counted() -> None:
    tracker = ReuseTracker()
    assert [tracker.sight(b"a") for _ in range(3)] == [1, 2, 3]
    assert tracker.sight(b"b") == 1


def test_the_chunk_not_seen_for_longest_is_forgotten() -> None:
    tracker = ReuseTracker(capacity=2)
    for key in (b"a", b"b", b"a", b"c"):  # b goes
        tracker.sight(key)
    assert tracker.sight(b"b") == 1  # and now a
    assert tracker.sight(b"c") == 2
