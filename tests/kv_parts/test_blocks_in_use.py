"""Blocks count as in use until the passes have ended that were under way when they were freed."""

from __future__ import annotations

import pytest

from lmcache_connector.kv_parts.blocks import BlocksInUse


@pytest.mark.parametrize("num_batches", [1, 2, 3])
def test_a_finished_request_was_part_of_the_steps_under_way(num_batches: int) -> None:
    """They are all but the one being planned, and the oldest of them ends with each plan."""
    blocks = BlocksInUse(num_batches, is_told=True)
    blocks.next_step()
    blocks.freed([[1, 2], [7]])
    for _ in range(num_batches - 1):
        assert blocks.includes_any({2, 3})
        assert blocks.includes_any({7})
        assert not blocks.includes_any({3, 4})
        blocks.next_step()
    assert not blocks.includes_any({1, 2, 7})


def test_after_a_reset_any_block_may_be_in_use() -> None:
    blocks = BlocksInUse(2, is_told=True)
    blocks.mark_all_in_use()
    assert blocks.includes_any({5})
    blocks.next_step()
    assert not blocks.includes_any({5})


def test_windows_leave_blocks_behind_without_a_word() -> None:
    assert BlocksInUse(2, is_told=False).includes_any({5})
    assert not BlocksInUse(1, is_told=False).includes_any({5})
