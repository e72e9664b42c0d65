"""How often each chunk was wanted, and whose tokens are stored."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmcache_connector.scheduler.store_planner import ReuseTracker
from tests.scheduler.test_tails import long_answered, wide
from tests.support.doubles.lives import CHUNK
from tests.support.doubles.shadow_engine import Shape


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


@pytest.mark.parametrize(("store_generated", "stored"), [(True, 2), (False, 1)])
def test_answers_are_stored_if_that_is_wanted(
    model: Path, store_generated: bool, stored: int
) -> None:
    engine = wide(model, Shape(store_generated=store_generated))
    engine.add(long_answered(CHUNK + 4), max_tokens=CHUNK)
    engine.run_until_idle()
    engine.check_whole()
    assert engine.ranks[0].num_stored_chunks == stored
