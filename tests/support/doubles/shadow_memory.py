"""The KV of a shadow rank, which is made of *cells*, and another connector that writes to it.

A cell is one integer and stands for the KV of a position: a digest of the request's source and
weights, and of all tokens up to that position and the images they stand for, because in a real
model all of these change it. With a drafter's head, the token after it is included.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tests.support.doubles.foreign_connector import Arrival, ForeignLoad

BLOCK_SIZE = 16
Cells = tuple[int, ...]
_NOTHING = 0


def cell(before: int, token: int) -> int:
    """The KV of a token after ``before``, the cell of the token before it."""
    return hash((before, token))


class Memory:
    """One cell per position of every block."""

    def __init__(self, num_blocks: int) -> None:
        self._blocks = [[_NOTHING] * BLOCK_SIZE for _ in range(num_blocks)]

    def read(self, blocks: Sequence[int], start: int, end: int) -> Cells:
        """Positions ``[start, end)``."""
        first = start // BLOCK_SIZE
        touched = blocks[first : -(-end // BLOCK_SIZE)]
        cells = [value for block in touched for value in self._blocks[block]]
        return tuple(cells[start - first * BLOCK_SIZE : end - first * BLOCK_SIZE])

    def write(self, blocks: Sequence[int], start: int, cells: Iterable[int]) -> None:
        """From position ``start`` on."""
        for position, value in enumerate(cells, start):
            self._blocks[blocks[position // BLOCK_SIZE]][position % BLOCK_SIZE] = value

    def zero(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._blocks[block] = [_NOTHING] * BLOCK_SIZE

    def forget(self) -> None:
        """As in a sleep."""
        self.zero(range(len(self._blocks)))


@dataclass(frozen=True, slots=True)
class ForeignWork:
    """What another connector begins in one step. ``aborted``: requests nobody waits for any more.

    ``cells[i]``: what load i should bring.
    """

    loads: tuple[ForeignLoad, ...] = ()
    cells: tuple[Cells, ...] = ()
    sends: tuple[str, ...] = ()
    aborted: frozenset[str] = frozenset()


NO_FOREIGN_WORK = ForeignWork()


@dataclass(slots=True)
class _Arriving:
    load: ForeignLoad
    cells: Cells
    num_written: int = 0


class ForeignWorker:
    """Writes a little at a time; the rest of an aborted load never comes."""

    def __init__(self, memory: Memory, chance: random.Random) -> None:
        self._memory = memory
        self._chance = chance
        self._arriving: list[_Arriving] = []
        self._sending: list[str] = []
        self._sent: set[str] = set()
        self._received: set[str] = set()
        self._lost: set[int] = set()

    def begin(self, work: ForeignWork) -> None:
        """Before the forward pass: what is loaded for this very step must be there now."""
        self._sending += work.sends
        for load, cells in zip(work.loads, work.cells, strict=True):
            arriving = _Arriving(load, cells)
            if load.offer.is_async:
                self._arriving.append(arriving)
            else:
                self._end(arriving)
        for arriving in [a for a in self._arriving if a.load.request_id in work.aborted]:
            self._arriving.remove(arriving)
            self._received.add(arriving.load.request_id)

    def go_on(self) -> None:
        for arriving in list(self._arriving):
            self._write(arriving, self._chance.randrange(3 * BLOCK_SIZE))
            if self._chance.random() < 0.3:
                self._arriving.remove(arriving)
                self._end(arriving)
                self._received.add(arriving.load.request_id)
        for request_id in [r for r in self._sending if self._chance.random() < 0.3]:
            self._sending.remove(request_id)
            self._sent.add(request_id)

    def take_finished(self) -> tuple[set[str], set[str], set[int]]:
        """Requests sent, requests received, and blocks that were not filled."""
        out = self._sent, self._received, self._lost
        self._sent, self._received, self._lost = set(), set(), set()
        return out

    def _end(self, arriving: _Arriving) -> None:
        load = arriving.load
        if load.offer.arrival is not Arrival.FAILED:
            self._write(arriving, len(arriving.cells))
            return
        whole = self._chance.randrange(len(load.block_ids))
        self._write(arriving, whole * BLOCK_SIZE - arriving.num_written)
        self._lost.update(load.block_ids[max(whole, arriving.num_written // BLOCK_SIZE) :])

    def _write(self, arriving: _Arriving, count: int) -> None:
        start = arriving.num_written
        cells = arriving.cells[start : start + max(0, count)]
        if arriving.load.offer.arrival is Arrival.WRONG:
            cells = tuple(cell(value, -2) for value in cells)
        self._memory.write(arriving.load.block_ids, start, cells)
        arriving.num_written += len(cells)


VOCABULARY = 61


@dataclass(frozen=True, slots=True)
class Image:
    """Stands at positions ``[start, end)``. vLLM knows it as ``name``, whatever it shows."""

    name: str
    content: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Source:
    """What a request's KV is computed from, beside its tokens."""

    salt: str | None = None
    adapter: str | None = None  # its name
    adapter_version: int = 0
    images: tuple[Image, ...] = ()

    @property
    def is_hidden(self) -> bool:
        """Whether the KV depends on something that only the request knows."""
        return self.adapter_version < 0


def cells_of(
    tokens: Sequence[int], source: Source = Source(), weights: int = 0, lookahead: int = 0
) -> Cells:
    """The right ones, of all tokens but the last ``lookahead``."""
    root = f"{source.salt}/{source.adapter}/{source.adapter_version}/{weights}"
    out, last = [], zlib.crc32(root.encode())
    shown = {
        p: zlib.crc32(i.content.encode()) for i in source.images for p in range(i.start, i.end)
    }
    inputs = [shown.get(position, token) for position, token in enumerate(tokens)]
    for one in inputs:
        last = cell(last, one)
        out.append(last)
    return tuple(map(cell, out, inputs[lookahead:])) if lookahead else tuple(out)


def cells_of_part(cells: Cells, part: int) -> Cells:
    """As the layers of that part compute them: none can be taken for those of another part."""
    return cells if part == 0 else tuple(cell(value, -3 - part) for value in cells)


class WrongKV(AssertionError):
    """A block was read or written that is not the request's, or holds something else."""
