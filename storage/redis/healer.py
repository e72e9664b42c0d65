"""Removes what lies under a value's name and is not that value.

A reader that finds such a value counts a miss. As long as it lies there, look-ups promise the
chunk, and a writer that compares lengths takes it for stored. So it is removed, and whoever has the
chunk writes it anew. Only what is still wrong goes: the name is watched (``WATCH``) from before it
is looked at again, so a good value written meanwhile stays.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from lmcache_connector.storage.chunk_codec import (
    HEADER_BYTES,
    InvalidValueError,
    Sealer,
    ValueHeader,
    may_be_value,
)
from lmcache_connector.storage.compression import check_whole_value
from lmcache_connector.storage.redis.client.dial import (
    SMALL_BYTES,
    TALK_ERRORS,
    Client,
    NoPermissionError,
    ResponseError,
    WatchError,
    is_wrong_type,
)
from lmcache_connector.storage.redis.connections import Servers
from lmcache_connector.storage.redis.topology import Node

logger = logging.getLogger(__name__)

_MAX_SUSPECTS = 1024
# Removed in one go, between two bursts of writes.
_AT_ONCE = 4
# An episode of removals, told in one line, ends when nothing was removed for so long.
_QUIET_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Suspect:
    """The value ``name`` did not verify; ``expected`` is what its header should say."""

    name: bytes
    expected: ValueHeader
    sealer: Sealer

    @property
    def max_bytes(self) -> int:
        return HEADER_BYTES + self.expected.payload_bytes

    def is_sound(self, value: bytes) -> bool:
        try:
            check_whole_value(value, self.expected, self.sealer)
        except InvalidValueError:
            return False
        return True


class Healer:
    """``add`` is for any thread, ``heal`` for one that may wait for a server, as it connects anew,
    and that calls ``report`` when it ends."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._suspects = RecentKeys[Suspect](_MAX_SUSPECTS)
        self._may_remove = True
        self._lock = threading.Lock()
        self._removed = Counter[Node]()
        self._last_removal = 0.0

    def add(self, suspect: Suspect) -> None:
        self._suspects.add(suspect.name, suspect)

    def heal(self, is_mine: Callable[[Node], bool]) -> None:
        """Look again at a few suspects, and remove those that are still wrong. The suspects of
        other nodes are left to others."""
        for _ in range(_AT_ONCE):
            suspect = self._suspects.pop_oldest()
            if suspect is None or not self._may_remove:
                break
            node = self._servers.topology.node_of(suspect.name)
            if node is not None and is_mine(node):
                self._heal(suspect, node)
            elif node is not None:
                self.add(suspect)  # behind the others
        if self._servers.clock() >= self._last_removal + _QUIET_SECONDS:
            self.report()

    def report(self) -> None:
        """Log what was removed since the last report."""
        with self._lock:
            removed, self._removed = self._removed, Counter()
        for node, count in removed.items():
            logger.warning(
                "redis %s: removed %d values that were not what their names say; "
                "`lmcache-connector verify` reads all", node, count
            )  # fmt: skip

    def _heal(self, suspect: Suspect, node: Node) -> None:
        if self._servers.is_open(node):
            return
        try:
            with self._servers.connect(node, suspect.max_bytes + SMALL_BYTES) as client:
                if _remove(suspect, client):
                    with self._lock:
                        self._removed[node] += 1
                        self._last_removal = self._servers.clock()
        except NoPermissionError as error:
            self._may_remove = False
            logger.warning(
                "redis %s: damaged values stay until an instance that reads and writes finds "
                "them; this user may not remove them: %s", node, self._servers.redact(error)
            )  # fmt: skip
        except TALK_ERRORS:
            return  # readers and writers will notice


def _remove(suspect: Suspect, client: Client) -> bool:
    """Whether it was there, wrong, and is gone. Raises one of ``TALK_ERRORS``."""
    with client.pipeline() as pipe:
        pipe.watch(suspect.name)
        try:
            may_be_sound = may_be_value(pipe.strlen(suspect.name), suspect.expected.payload_bytes)
        except ResponseError as error:
            if not is_wrong_type(error):
                raise  # what was not seen is not wrong
            may_be_sound = False
        is_wrong = True  # or there is nothing: removing that does no harm
        if may_be_sound:
            value = pipe.get(suspect.name)
            is_wrong = value is not None and not suspect.is_sound(value)
        pipe.multi()  # an empty transaction ends the watch as well
        if is_wrong:
            pipe.unlink(suspect.name)
        with contextlib.suppress(WatchError):
            return bool(pipe.execute() == [1])
    return False


_T = TypeVar("_T")


class RecentKeys(Generic[_T]):
    """A bounded map of chunk keys that forgets the oldest. Thread-safe."""

    def __init__(self, max_size: int) -> None:
        self._values: dict[bytes, _T] = {}
        self._max_size = max_size
        self._lock = threading.Lock()

    def add(self, key: bytes, value: _T) -> _T:
        """Keep ``value``, unless there is one for ``key`` already. The one that is kept."""
        with self._lock:
            kept = self._values.setdefault(key, value)
            if len(self._values) > self._max_size:
                del self._values[next(iter(self._values))]
            return kept

    def pop(self, key: bytes) -> _T | None:
        with self._lock:
            return self._values.pop(key, None)

    def pop_oldest(self) -> _T | None:
        with self._lock:
            return self._values.pop(next(iter(self._values))) if self._values else None
