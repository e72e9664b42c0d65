"""Removes what lies under a value's name and is not that value.

A reader that finds such a value counts a miss. As long as it lies there, look-ups promise the
chunk, and a writer that compares lengths takes it for stored. So it is removed, and whoever has the
chunk writes it anew. Only what is still wrong goes: the name is watched (``WATCH``) from before it
is looked at again, so a good value written meanwhile stays.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from lmcache_connector.net.deadline import Deadline
from lmcache_connector.net.wire import Wire, WireError
from lmcache_connector.storage.chunk_codec import (
    HEADER_BYTES,
    InvalidValueError,
    Sealer,
    ValueHeader,
    may_be_value,
)
from lmcache_connector.storage.compression import check_whole_value
from lmcache_connector.storage.redis.client.conversation import (
    ErrorReply,
    RefusedError,
    Reply,
    ReplyLimits,
    receive_reply,
)
from lmcache_connector.storage.redis.client.resp import command
from lmcache_connector.storage.redis.connections import Connections, Servers, UnavailableError
from lmcache_connector.storage.redis.recent_keys import RecentKeys
from lmcache_connector.storage.redis.topology import Node

logger = logging.getLogger(__name__)

_MAX_SUSPECTS = 1024
# Removed in one go, between two bursts of writes.
_AT_ONCE = 4
_SECONDS = 5.0
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

    def may_have(self, length: Reply) -> bool:
        return isinstance(length, int) and may_be_value(length, self.expected.payload_bytes)

    def is_sound(self, value: Reply) -> bool:
        if not isinstance(value, bytes):
            return False
        try:
            check_whole_value(value, self.expected, self.sealer)
        except InvalidValueError:
            return False
        return True


class Healer:
    """``add`` is for any thread, ``heal`` for one with ``connections`` of its own, which calls
    ``report`` when it ends."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._suspects = RecentKeys[Suspect](_MAX_SUSPECTS)
        self._may_remove = True
        self._lock = threading.Lock()
        self._removed = Counter[Node]()
        self._last_removal = 0.0

    def add(self, suspect: Suspect) -> None:
        self._suspects.add(suspect.name, suspect)

    def heal(self, connections: Connections, is_mine: Callable[[Node], bool]) -> None:
        """Look again at a few suspects, and remove those that are still wrong. The suspects of
        other nodes are left to others."""
        for _ in range(_AT_ONCE):
            suspect = self._suspects.pop_oldest()
            if suspect is None or not self._may_remove:
                break
            node = self._servers.topology.node_of(suspect.name)
            if node is not None and is_mine(node):
                self._heal(suspect, connections, node)
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

    def _heal(self, suspect: Suspect, connections: Connections, node: Node) -> None:
        clock = self._servers.clock
        deadline = Deadline(clock() + _SECONDS, clock)
        try:
            if _remove(suspect, connections.get(node, deadline), deadline):
                with self._lock:
                    self._removed[node] += 1
                    self._last_removal = clock()
        except UnavailableError:
            return
        except RefusedError as error:
            connections.drop(node, "no value removed", blame=False)
            if error.reply.is_a(b"NOPERM"):
                self._may_remove = False
                logger.warning(
                    "redis %s: damaged values stay until an instance that reads and writes finds "
                    "them; this user may not remove them: %s", node, self._servers.redact(error)
                )  # fmt: skip
        except WireError as error:
            connections.drop(node, str(error), blame=error.is_peers_fault)


def _remove(suspect: Suspect, wire: Wire, deadline: Deadline) -> bool:
    """Whether it was there, wrong, and is gone. Raises `WireError` or `RefusedError`."""
    name = suspect.name
    watched, length = _ask(wire, deadline, 64, (b"WATCH", name), (b"STRLEN", name))
    _agreed(watched)
    if not (isinstance(length, ErrorReply) and length.is_a(b"WRONGTYPE")):
        _agreed(length)
    is_wrong = True  # or there is nothing: removing that does no harm
    if suspect.may_have(length):
        (value,) = _ask(wire, deadline, suspect.max_bytes + 64, (b"GET", name))
        _agreed(value)  # what was not seen is not wrong
        is_wrong = not (value is None or suspect.is_sound(value))
    # An empty transaction ends the watch as well.
    steps = [(b"MULTI",), (b"UNLINK", name), (b"EXEC",)] if is_wrong else [(b"MULTI",), (b"EXEC",)]
    replies = _ask(wire, deadline, 1024, *steps)
    for reply in replies:
        _agreed(reply)
    return replies[-1] == [1]


def _agreed(reply: Reply) -> None:
    """Raises `RefusedError` for an error."""
    if isinstance(reply, ErrorReply):
        raise RefusedError(reply)


def _ask(
    wire: Wire, deadline: Deadline, max_bytes: int, *commands: tuple[bytes, ...]
) -> list[Reply]:
    limits = ReplyLimits(max_bytes + 1024, 8)
    wire.send([b"".join(command(*words) for words in commands)], deadline)
    return [receive_reply(wire, limits, deadline) for _ in commands]
