"""Blocks count as in use until the passes have ended that were under way when they were freed."""

from __future__ import annotations

import pytest

from lmcache_connector.kv_parts.part import Part, Rule
from lmcache_connector.scheduler.blocks_in_use import BlocksInUse
from lmcache_connector.scheduler.request_state import SchedulerSettings


def blocks_in_use(num_batches: int, rule: Rule = Rule.PREFIX) -> BlocksInUse:
    part = Part(rule, groups=(0,), block_size=16, span=32 if rule is Rule.WINDOW else 0)
    settings = SchedulerSettings(
        chunk_size=32, parts=(part,), world_size=1, loads=True, stores=True, num_batches=num_batches
    )
    return BlocksInUse(settings)


@pytest.mark.parametrize("num_batches", [1, 2, 3])
def test_a_finished_request_was_part_of_the_steps_under_way(num_batches: int) -> None:
    """They are all but the one being planned, and the oldest of them ends with each plan."""
    blocks = blocks_in_use(num_batches)
    blocks.next_step()
    blocks.freed([[1, 2], [7]])
    for _ in range(num_batches - 1):
        assert blocks.includes_any({2, 3})
        assert blocks.includes_any({7})
        assert not blocks.includes_any({3, 4})
        blocks.next_step()
    assert not blocks.includes_any({1, 2, 7})


def test_after_a_reset_any_block_may_be_in_use() -> None:
    blocks = blocks_in_use(2)
    blocks.freed_some()
    assert blocks.includes_any({5})
    blocks.next_step()
    assert not blocks.includes_any({5})


def test_windows_leave_blocks_behind_without_a_word() -> None:
    assert blocks_in_use(2, Rule.WINDOW).includes_any({5})
    assert not blocks_in_use(1, Rule.WINDOW).includes_any({5})
