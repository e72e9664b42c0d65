"""Waits for connections to peers, which are made in the background."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

from lmcache_connector.storage.redis.connections import Servers

_SECONDS = 30.0
_ENDED = threading.Event()


@contextmanager
def watched_dials() -> Iterator[None]:
    """While entered, `once_dialled` hears of every dial that ends, well or not."""
    ended = Servers._task_ended

    def note(servers: Servers) -> None:
        ended(servers)
        _ENDED.set()

    with patch.object(Servers, "_task_ended", note):
        yield


def once_dialled(holds: Callable[[], bool]) -> None:
    """Ask now, and again whenever somebody has been dialled, until it holds."""
    until = time.monotonic() + _SECONDS
    while True:
        _ENDED.clear()
        if holds():
            return
        assert time.monotonic() < until
        _ENDED.wait(1.0)
