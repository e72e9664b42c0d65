"""Collections within bounds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

ItemT = TypeVar("ItemT")
KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")


class Latest(OrderedDict[KeyT, ValueT]):
    """The ``most`` entries that were set last, the oldest first. Not thread-safe."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: KeyT, value: ValueT) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._most:
            self.popitem(last=False)


def batches(
    items: Iterable[ItemT],
    size_of: Callable[[ItemT], int],
    max_size: int,
    max_items: int | None = None,
) -> Iterator[list[ItemT]]:
    """Batches of consecutive items: as many as fit into ``max_size``, but 1 to ``max_items``."""
    batch, size = list[ItemT](), 0
    for item in items:
        more = size_of(item)
        if batch and (size + more > max_size or len(batch) == max_items):
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += more
    if batch:
        yield batch
