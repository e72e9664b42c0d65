"""How a prompt of any length passes through a buffer of any size.

A prompt that fits is kept whole. A longer one goes through in segments of so many blocks, each in
one of ``num_slots`` places, which are used in turn: segment ``i`` takes the place of segment
``i - num_slots``, once that is not needed any more.
"""

from __future__ import annotations

from dataclasses import dataclass

_SLOTS = 4


@dataclass(frozen=True, slots=True)
class Ring:
    """``num_blocks``: of the prompt."""

    num_blocks: int
    segment_blocks: int
    num_slots: int

    @classmethod
    def of(cls, num_blocks: int, block_bytes: int, buffer_bytes: int) -> Ring:
        """``block_bytes``: of one block on the rank that holds most. ``buffer_bytes``: the largest
        piece of memory to be had; a prompt that does not fit into it goes through half of it."""
        if num_blocks * block_bytes <= buffer_bytes:
            return cls(num_blocks, max(1, num_blocks), 1)
        window = max(1, buffer_bytes // 2 // block_bytes)
        segment_blocks = max(1, window // _SLOTS)
        return cls(num_blocks, segment_blocks, window // segment_blocks)

    @property
    def num_segments(self) -> int:
        return -(-self.num_blocks // self.segment_blocks)

    @property
    def is_whole(self) -> bool:
        return self.num_segments <= self.num_slots

    @property
    def memory_blocks(self) -> int:
        """Blocks that are in memory at a time."""
        return self.segment_blocks * self.num_slots

    def segment_of(self, block: int) -> int:
        return block // self.segment_blocks

    def end_of(self, segment: int) -> int:
        """The block after the segment's last."""
        return min(self.num_blocks, (segment + 1) * self.segment_blocks)

    def split(self, first_block: int, last_block: int) -> list[tuple[int, int]]:
        """The parts of ``[first_block, last_block)`` by segment."""
        parts = []
        while first_block < last_block:
            end = min(last_block, self.end_of(self.segment_of(first_block)))
            parts.append((first_block, end))
            first_block = end
        return parts
