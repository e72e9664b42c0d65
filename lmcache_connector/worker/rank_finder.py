"""Finds out at start which other ranks of the engine this rank can read from.

Until its first job, each rank keeps a sample in its CPU tier for the others to read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from lmcache_connector.threads import Background, Task
from lmcache_connector.worker.self_test import store_sample

if TYPE_CHECKING:
    from lmcache_connector.peers.server import PeerServer
    from lmcache_connector.peers.tier import PeerTier
    from lmcache_connector.worker.lmcache_engine import LMCacheEngineAdapter
    from lmcache_connector.worker.paged_part import PagedPart

_FIND_SECONDS = 5.0


class RankFinder:
    """Create before other ranks can reach this one: stores the sample, if some rank may read it.
    ``peers``: ``None`` if this rank reads from no other. Runs on the engine's step thread."""

    def __init__(
        self,
        engine: LMCacheEngineAdapter,
        parts: Sequence[PagedPart],
        peers: PeerTier | None,
        clock: Callable[[], float],
    ) -> None:
        can_read = engine.share.others and engine.chunks.memory is not None
        self._engine, self._clock = engine, clock
        self._peers = peers if can_read else None
        self._is_given_up, self._thread = threading.Event(), Background("lmc-ranks")
        self._give_up_at = float("inf")
        self._found = Task[frozenset[int]]()
        self._found.settle(frozenset())
        self._sample = store_sample(engine, parts) if self._peers else ()

    def begin(self, server: PeerServer | None, *, loads: bool) -> None:
        """Start reading other ranks' samples; ``server`` serves this rank's. Without ``loads``,
        read nothing, and leave the shared KV to the other ranks."""
        if not loads:
            self._found.settle(self._engine.share.others)
        if self._peers and server and server.has_host_socket:
            find = partial(self._peers.find_ranks, self._sample, self._is_given_up)
            self._found = self._thread.submit(find)

    def find(self) -> frozenset[int] | None:
        """The ranks whose memory this rank reads; ``None``: unknown so far. Poll in each step: all
        ranks have started when the first step comes, or will within seconds."""
        now = self._clock()
        self._give_up_at = min(self._give_up_at, now + _FIND_SECONDS)
        if now >= self._give_up_at:
            self._is_given_up.set()
        if not self._found.is_done:
            return None
        return self._found.value or frozenset()

    def forget_sample(self) -> None:
        """All ranks have started, as there are jobs: drop the sample."""
        for key in self._sample:
            self._engine.forget(key)
        self._sample = ()

    def close(self) -> None:
        self._is_given_up.set()
        self._thread.close()
