"""Prompts that stay in their blocks, where all ranks can be read."""

from __future__ import annotations

from typing import Any

import pytest

from lmcache_connector.p2p.control.messages import MAX_BLOCK_IDS
from lmcache_connector.p2p.plans import HandoverReport, RankHost
from lmcache_connector.p2p.reasons import Reason
from tests.p2p.scheduler.test_adapter import BLOCK, FakeRequest, asks_for_decode, begin, make, step

BLOCKS = {"r": [10, 11, 12, 13, 14, 15, 16, 17]}


def holding() -> Any:
    side = make(buffer_blocks=1)  # which nothing needs
    side.update_from_reports(
        [HandoverReport(start=RankHost(rank, "127.0.0.1", holds=True)) for rank in range(2)]
    )
    return side


def test_nothing_is_saved_and_the_blocks_are_held_at_the_end() -> None:
    side, request = holding(), asks_for_decode("r", 100)
    assert begin(side, request) == (0, False)
    first = step(side, {request: 60}, BLOCKS)
    assert (first.announced, first.starts, first.saves) == (("r",), (), ())
    step(side, {request: 40}, BLOCKS)
    keeps, params = side.request_finished(request, BLOCKS["r"], is_served=True)
    assert keeps
    assert params["remote_block_ids"] == [BLOCKS["r"][:7]]
    (hold,) = step(side, {}, {}).holds
    assert hold.held is not None
    assert (hold.request_id, hold.held.num_tokens) == ("r", 100)
    assert hold.held.block_ids == tuple(BLOCKS["r"][:7])
    assert side.reserved_bytes == 0
    side.check_integrity()


def test_what_is_not_all_computed_is_not_held() -> None:
    side, request = holding(), asks_for_decode("r", 100)
    begin(side, request)
    step(side, {request: 60}, BLOCKS)
    assert side.request_finished(request, BLOCKS["r"], is_served=False) == (False, None)
    plan = step(side, {}, {})
    assert plan.holds == ()
    assert [drop.cause.reason for drop in plan.drops] == [Reason.ABORTED]


def test_a_preempted_prompt_is_held_as_computed_last() -> None:
    side, request = holding(), asks_for_decode("r", 100)
    begin(side, request)
    step(side, {request: 60}, BLOCKS)
    request.num_computed_tokens = 0
    step(side, {}, {}, preempted=("r",))
    step(side, {request: 100}, {"r": [1, 2, 3, 4, 5, 6, 7]})
    side.request_finished(request, [1, 2, 3, 4, 5, 6, 7], is_served=True)
    (hold,) = step(side, {}, {}).holds
    assert hold.held is not None
    assert hold.held.block_ids == (1, 2, 3, 4, 5, 6, 7)


def test_what_is_pushed_is_not_held() -> None:
    side = make()
    side.update_from_reports(
        [HandoverReport(start=RankHost(rank, "127.0.0.1", holds=True)) for rank in range(2)]
    )
    params = {"do_remote_decode": True, "remote_host": "127.0.0.1", "remote_port": 9}
    request = FakeRequest("r", list(range(100)), params)
    begin(side, request)
    assert step(side, {request: 100}, BLOCKS).saves


def test_one_rank_that_cannot_be_read_is_enough_to_copy() -> None:
    side = make()
    side.update_from_reports(
        [HandoverReport(start=RankHost(rank, "127.0.0.1", holds=rank == 0)) for rank in range(2)]
    )
    request = asks_for_decode("r", 100)
    begin(side, request)
    assert step(side, {request: 100}, BLOCKS).saves


def test_after_a_reset_nothing_is_held() -> None:
    side, request = holding(), asks_for_decode("r", 100)
    begin(side, request)
    step(side, {request: 100}, BLOCKS)
    side.reset_cache()
    assert side.request_finished(request, BLOCKS["r"], is_served=True) == (False, None)
    plan = step(side, {}, {})
    assert (plan.reset, plan.holds) == (True, ())


@pytest.mark.parametrize(("more", "is_held"), [(0, True), (1, False)])
def test_a_prompt_of_more_blocks_than_a_message_names_is_copied(more: int, is_held: bool) -> None:
    """Else no consumer would learn where it lies."""
    side, request = holding(), asks_for_decode("r", MAX_BLOCK_IDS * BLOCK + more)
    begin(side, request)
    blocks = {"r": list(range(MAX_BLOCK_IDS + more))}
    assert (step(side, {request: request.num_prompt_tokens}, blocks).saves == ()) is is_held
    side.request_finished(request, blocks["r"], is_served=True)
    assert (step(side, {}, {}).holds[0].held is not None) is is_held
