"""Waits for connections to peers, which are made in the background."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

from lmcache_connector.storage.redis import connections
from lmcache_connector.threads import Task, ValueT

_SECONDS = 30.0
_ENDED = threading.Event()


@contextmanager
def watched_dials() -> Iterator[None]:
    """While entered, `once_dialled` hears of every dial that ends, well or not."""
    with patch.object(connections, "Task", _Dial):
        yield


class _Dial(Task[ValueT]):
    def settle(self, value: ValueT | None) -> None:
        super().settle(value)
        _ENDED.set()


def once_dialled(holds: Callable[[], bool]) -> None:
    """Ask now, and again whenever somebody has been dialled, until it holds."""
    until = time.monotonic() + _SECONDS
    while True:
        _ENDED.clear()
        if holds():
            return
        assert time.monotonic() < until
        _ENDED.wait(1.0)
