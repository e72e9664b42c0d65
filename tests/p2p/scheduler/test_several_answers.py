"""Several requests for one hand-over: vLLM makes them for ``n`` answers, routers that repeat."""

from __future__ import annotations

from typing import Any

import pytest

from lmcache_connector.p2p.plans import HandoverReport, HandoverResult
from tests.p2p.scheduler.test_adapter import FakeRequest, make, step, wants

BLOCK_IDS = [1, 2, 3, 4]


def two_in_line() -> tuple[Any, FakeRequest, FakeRequest]:
    side, first, second = make("consumer"), wants("r", 50), wants("r", 50)
    second.request_id = "r once more"
    for request in (first, second):
        side.on_new_request(request)
    assert len(step(side, {}, {}).arrivals) == 1
    return side, first, second


def has_it_cached(side: Any, request: FakeRequest) -> None:
    assert side.get_num_new_matched_tokens(request, 48) == (0, False)
    side.update_state_after_alloc(request, lambda: BLOCK_IDS, 0)


@pytest.mark.parametrize("ends", [False, True], ids=["the first goes on", "the first has ended"])
def test_that_none_needs_it_is_told_once(ends: bool) -> None:
    """Else its lease is renewed for ever, and it stays where it lies at the producer."""
    side, first, second = two_in_line()
    has_it_cached(side, first)
    if ends:
        side.request_finished(first, [], is_served=True)
    assert step(side, {}, {}).releases == ()
    has_it_cached(side, second)
    (release,) = step(side, {}, {}).releases
    assert release.transfer_id == "at the producer r"
    for request in (first, second):
        side.request_finished(request, [], is_served=True)
    assert step(side, {}, {}).releases == ()


def test_an_abort_of_the_second_leaves_the_first_its_load() -> None:
    side, first, second = two_in_line()
    assert side.get_num_new_matched_tokens(first, 0) == (50, True)
    side.update_state_after_alloc(first, lambda: BLOCK_IDS, 50)
    side.request_finished(second, [], is_served=False)
    plan = step(side, {}, {})
    assert (len(plan.loads), plan.releases, plan.cancelled_loads) == (1, (), ())


def test_what_was_fetched_is_not_released_by_who_came_later() -> None:
    """A second decode instance may be reading it."""
    side, first, second = two_in_line()
    third = wants("r", 50)
    third.request_id = "r a third time"
    side.on_new_request(third)
    assert side.get_num_new_matched_tokens(first, 0) == (50, True)
    side.update_state_after_alloc(first, lambda: BLOCK_IDS, 50)
    for _ in range(2):  # ranks
        side.update_from_reports([HandoverReport((HandoverResult("r", 4, 0.1),))])
    has_it_cached(side, second)
    side.request_finished(first, [], is_served=True)
    has_it_cached(side, third)
    for request in (second, third):
        side.request_finished(request, [], is_served=True)
    assert step(side, {}, {}).releases == ()
    side.check_integrity()
