from __future__ import annotations

from lmcache_connector.net.deadline import Deadline


def test_remaining_time_stops_at_zero() -> None:
    now = 100.0
    deadline = Deadline(101.5, lambda: now)
    assert deadline.remaining() == 1.5
    now = 103.0
    assert deadline.remaining() == 0.0


def test_a_cancelled_deadline_has_nothing_left() -> None:
    assert Deadline(float("inf"), lambda: 0.0, lambda: True).remaining() == 0.0
