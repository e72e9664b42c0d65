"""Which of a request's blocks hold which chunks of a part of the model.

Blocks that a window has left behind are gone: in their place vLLM lists the null block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lmcache_connector.kv_parts.part import Part
from lmcache_connector.plans import BlockIds

NULL_BLOCK = 0


def blocks_between(
    part: Part, block_ids: Sequence[Sequence[int]], start_token: int, end_token: int
) -> BlockIds:
    """Those with tokens ``[start_token, end_token)``, for each of the part's groups. ``block_ids``
    lists the request's blocks per KV cache group of the model."""
    size = part.block_size
    return tuple(
        tuple(block_ids[group][start_token // size : -(-end_token // size)])
        for group in part.groups
    )


def blocks_of(
    part: Part, block_ids: Sequence[Sequence[int]], chunk_size: int, chunks: Iterable[int]
) -> BlockIds:
    """Those of whole chunks, one chunk after the other."""
    each = [
        blocks_between(part, block_ids, chunk * chunk_size, (chunk + 1) * chunk_size)
        for chunk in chunks
    ]
    return tuple(
        tuple(block for blocks in each for block in blocks[i]) for i in range(len(part.groups))
    )


def are_there(blocks: BlockIds, num_blocks: int) -> bool:
    """Whether there are so many blocks in each group, and none of them is gone."""
    return all(len(ids) == num_blocks and NULL_BLOCK not in ids for ids in blocks)
