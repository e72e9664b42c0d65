"""Blocks that vLLM may hand out although a forward pass under way still uses them.

With several batches under way vLLM frees the blocks of a request whose last passes have been queued
and have not ended. Its own passes come after those on the device. A load does not, unless it waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence


class BlocksInUse:
    """What was freed since the last few steps were planned: no later pass uses it.

    ``num_batches`` steps are under way at once. Windows and states free blocks without a word: for
    them, without ``is_told``, every block counts as in use.
    """

    def __init__(self, num_batches: int, *, is_told: bool) -> None:
        self._is_told = is_told
        # A pass planned before the last ``num_batches - 1`` plans has ended.
        self._freed: deque[set[int]] = deque(maxlen=num_batches - 1)
        self._freed.extend(set() for _ in range(num_batches - 1))
        self._num_unknown = 0
        self.changes = False
        """Whether :meth:`next_step` makes a difference."""

    def next_step(self) -> None:
        """A step has been planned."""
        self._freed.append(set())
        self._num_unknown -= self._num_unknown > 0
        self.changes = self._num_unknown > 0 or any(self._freed)

    def freed(self, block_ids: Sequence[Sequence[int]]) -> None:
        """A request has ended; its blocks per KV cache group."""
        if self._freed:
            self._freed[-1].update(*block_ids)
            self.changes = True

    def freed_some(self) -> None:
        """Requests were preempted, and it is not known which blocks they had."""
        self._num_unknown = len(self._freed)
        self.changes = self._num_unknown > 0

    def includes_any(self, block_ids: Collection[int]) -> bool:
        """Whether a pass under way may use one of these."""
        if not self._freed:
            return False
        if not self._is_told or self._num_unknown:
            return True
        return not all(freed.isdisjoint(block_ids) for freed in self._freed)
