"""Which of a request's blocks hold which chunks of a part, and which blocks are in use.

vLLM frees blocks that have left a window, and lists the null block in their place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from lmcache_connector.kv_parts.part import BlockIds, BlockTables, Part

NULL_BLOCK = 0


def blocks_between(
    part: Part, block_ids: BlockTables, start_token: int, end_token: int
) -> BlockIds:
    """Blocks with tokens ``[start_token, end_token)``, per group of the part. ``block_ids`` lists
    the request's blocks per KV cache group of the model."""
    size = part.block_size
    return tuple(
        tuple(block_ids[group][start_token // size : -(-end_token // size)])
        for group in part.groups
    )


def are_there(blocks: BlockIds, num_blocks: int) -> bool:
    """Whether each group has ``num_blocks`` blocks, and vLLM has freed none of them."""
    return all(len(ids) == num_blocks and NULL_BLOCK not in ids for ids in blocks)


class BlocksInUse:
    """Blocks that vLLM may reuse while a forward pass under way still uses them: those freed since
    the last few steps were planned.

    With several batches under way, vLLM frees a request's blocks while its last passes are queued.
    A pass that reuses a block runs behind those on the device. A load does not, unless it waits.

    Up to ``num_passes`` passes are under way. ``hears_all_frees``: vLLM reports each freed block,
    as it does not behind windows and states: with several batches, all blocks then count as in use.
    """

    def __init__(self, num_passes: int, *, hears_all_frees: bool) -> None:
        self._hears_all_frees = hears_all_frees
        # A pass planned before the last ``num_passes - 1`` plans has ended.
        self._freed: deque[set[int]] = deque(maxlen=num_passes - 1)
        self._freed.extend(set() for _ in range(num_passes - 1))
        self._num_unknown = 0
        self.changes = False
        """Whether :meth:`next_step` makes a difference."""

    def next_step(self) -> None:
        """A step has been planned."""
        self._freed.append(set())
        self._num_unknown -= self._num_unknown > 0
        self.changes = self._num_unknown > 0 or any(self._freed)

    def freed(self, block_ids: BlockTables) -> None:
        """A request has ended; its blocks per KV cache group."""
        if self._freed:
            self._freed[-1].update(*block_ids)
            self.changes = True

    def mark_all_in_use(self) -> None:
        """It is not known which blocks were freed, as after a preemption, a reset or a failure."""
        self._num_unknown = len(self._freed)
        self.changes = self._num_unknown > 0

    def includes_any(self, block_ids: Collection[int]) -> bool:
        """Whether a pass under way may use one of ``block_ids``."""
        if not self._freed:
            return False
        if not self._hears_all_frees or self._num_unknown:
            return True
        return not all(freed.isdisjoint(block_ids) for freed in self._freed)
