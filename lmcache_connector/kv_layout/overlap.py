"""Proving that strided regions of memory do not overlap.

A box is the set of bytes ``base + sum(i_k * stride_k) + [0, width)`` with ``0 <= i_k < count_k``,
as one layer of a paged KV cache is. Layers may be interleaved views of one big tensor, so comparing
their first and last byte is not enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Box:
    """``base`` is an address, ``width`` in bytes; ``axes`` are (stride in bytes, count) pairs."""

    name: str
    base: int
    width: int
    axes: tuple[tuple[int, int], ...]

    @property
    def end(self) -> int:
        """One past the last byte."""
        return self.base + self.width + sum(stride * (count - 1) for stride, count in self.axes)

    @property
    def widest_stride(self) -> int | None:
        """The largest stride of an axis with several entries; ``None`` for a run of bytes."""
        return max((stride for stride, count in self.axes if count > 1), default=None)

    def without(self, stride: int) -> Box:
        """The first slice along the axis with ``stride``."""
        axes = list(self.axes)
        axes.remove(next(axis for axis in axes if axis[0] == stride and axis[1] > 1))
        return replace(self, axes=tuple(axes))


def spans(boxes: Iterable[Box]) -> tuple[tuple[int, int], ...]:
    """The memory that ``boxes`` lie in: disjoint ``(first byte, one past the last)``, ascending."""
    return tuple((cluster[0].base, max(box.end for box in cluster)) for cluster in _clusters(boxes))


def find_overlap(boxes: Iterable[Box]) -> tuple[str, str] | None:
    """Names of boxes (perhaps one twice) that are not proved disjoint; ``None`` if all are.

    The proof is sound, not complete: boxes must nest as the axes of one array do, as those of every
    KV cache layout do. Boxes that fit into one window as large as their common widest stride, and
    are disjoint inside it, are disjoint altogether.
    """
    for cluster in _clusters(boxes):
        strides = {box.widest_stride for box in cluster}
        if strides == {None} and len(cluster) == 1:
            continue
        stride = strides.pop()
        names = (cluster[0].name, cluster[-1].name)
        if strides or not stride:
            return names
        inner = [box.without(stride) for box in cluster]
        if max(box.end for box in inner) - cluster[0].base > stride:
            return names
        if (found := find_overlap(inner)) is not None:
            return found
    return None


def _clusters(boxes: Iterable[Box]) -> Iterator[list[Box]]:
    """Groups of boxes whose spans overlap, in the order of their first bytes."""
    cluster: list[Box] = []
    end = 0
    for box in sorted(boxes, key=lambda box: box.base):
        if cluster and box.base >= end:
            yield cluster
            cluster = []
        cluster.append(box)
        end = max(end, box.end) if len(cluster) > 1 else box.end
    if cluster:
        yield cluster
