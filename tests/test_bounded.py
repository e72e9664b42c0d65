"""Bounded tables and batches."""

from __future__ import annotations

import pytest

from lmcache_connector.bounded import Latest, batches


def test_the_least_recently_set_entry_is_dropped() -> None:
    latest: Latest[str, int] = Latest(2)
    for number, key in enumerate("abac"):
        latest[key] = number
    assert list(latest.items()) == [("a", 2), ("c", 3)]


@pytest.mark.parametrize(
    ("sizes", "max_items", "found"),
    [
        ([], None, []),
        ([9, 3, 3, 5, 1], None, [[9], [3, 3], [5, 1]]),
        ([3, 3, 3, 3], 1, [[3], [3], [3], [3]]),
        ([6, 1], None, [[6], [1]]),
    ],
)
def test_batches_are_as_large_as_allowed(
    sizes: list[int], max_items: int | None, found: list[list[int]]
) -> None:
    assert list(batches(sizes, int, 6, max_items)) == found
