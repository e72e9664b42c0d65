"""Some of a run's chunks, as a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from lmcache_connector.plans import PartRun


def only(run: PartRun, numbers: Sequence[int]) -> PartRun:
    """The chunks with these numbers of a run that skips no blocks."""
    return replace(
        run,
        keys=tuple(run.keys[i] for i in numbers),
        chunks=tuple(run.chunks[i] for i in numbers),
        block_ids=tuple(
            _of_chunks(ids, len(ids) // len(run.keys), numbers) for ids in run.block_ids
        ),
        parents=(),
    )


def in_pieces(run: PartRun, size: int, blocks_per_chunk: int) -> Iterator[PartRun]:
    """All of a run, ``size`` chunks at a time."""
    for start in range(0, len(run.keys), size):
        end = min(start + size, len(run.keys))
        first, last = (max(0, i * blocks_per_chunk - run.skip_blocks) for i in (start, end))
        yield replace(
            run,
            keys=run.keys[start:end],
            chunks=run.chunks[start:end],
            block_ids=tuple(ids[first:last] for ids in run.block_ids),
            skip_blocks=run.skip_blocks if start == 0 else 0,
            parents=(),
        )


def _of_chunks(ids: Sequence[int], per_chunk: int, numbers: Sequence[int]) -> tuple[int, ...]:
    return tuple(block for i in numbers for block in ids[i * per_chunk : (i + 1) * per_chunk])
