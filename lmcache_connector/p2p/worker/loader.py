"""Copies what has arrived into the paged cache, one request after the other, on one thread."""

from __future__ import annotations

import logging
from collections.abc import Callable

from lmcache_connector.copy_kv_blocks.copier import Copier, copy_kv_blocks
from lmcache_connector.kv_layout.chunk_buffers import ChunkBuffers
from lmcache_connector.kv_layout.paged_cache import PagedLayout
from lmcache_connector.p2p.data.frame import digest_of
from lmcache_connector.p2p.plans import HandoverLoad, HandoverResult
from lmcache_connector.p2p.reasons import Cause, Reason
from lmcache_connector.p2p.worker.incoming import Arrived, Incoming, Stretch
from lmcache_connector.p2p.worker.receive_buffer import ReceiveBuffer
from lmcache_connector.threads import start_thread

logger = logging.getLogger(__name__)

_DAMAGED = Cause(Reason.BAD_CHECKSUM, "bytes were damaged on the way")
_NOT_COPIED = Cause(Reason.COPY_FAILED, "the copy into the KV cache failed")
_SHORT = Cause(Reason.OTHER, "the producer offered a shorter prompt")


class Loader:
    """Takes requests that are over from the receive buffer, and keeps their results until asked."""

    def __init__(
        self,
        paged: PagedLayout,
        copier: Copier,
        buffer: ReceiveBuffer,
        clock: Callable[[], float],
    ) -> None:
        self._paged = paged
        self._copier = copier
        self._buffer = buffer
        self._clock = clock
        self._results: list[tuple[HandoverLoad, HandoverResult]] = []
        self._thread = start_thread("lmc-p2p-load", self._work)

    def take_results(self) -> list[tuple[HandoverLoad, HandoverResult]]:
        """Loads that ended since the last call."""
        with self._buffer.changed:
            results, self._results = self._results, []
            return results

    def wait_for_result(self, seconds: float) -> None:
        """Until a load ends; at once if none is open."""
        with self._buffer.changed:
            self._buffer.changed.wait_for(
                lambda: bool(self._results) or not self._buffer.num_waiting, seconds
            )

    def close(self, seconds: float) -> None:
        """Wait for the copy in progress, ``seconds`` at most. The buffer must be closed."""
        self._thread.join(seconds)

    def _work(self) -> None:
        while (arrived := self._buffer.next_arrived()) is not None:
            num_blocks, cause = self._load(arrived)
            with self._buffer.changed:
                self._buffer.loaded(arrived, num_blocks, cause)
                if arrived.is_last:
                    self._results.append((arrived.waiting.load, self._result(arrived)))

    def _result(self, arrived: Arrived) -> HandoverResult:
        waiting, incoming = arrived.waiting, arrived.incoming
        return HandoverResult(
            waiting.load.request_id,
            waiting.num_blocks,
            seconds=self._clock() - waiting.since,
            wire_bytes=incoming.num_bytes if incoming is not None else waiting.read_bytes,
            wire_seconds=incoming.wire_seconds if incoming is not None else waiting.read_seconds,
            cause=None if waiting.is_whole else waiting.cause or _SHORT,
        )

    def _load(self, arrived: Arrived) -> tuple[int, Cause | None]:
        """Blocks that are in the cache now, without a gap, and why not all if some are missing."""
        load, incoming = arrived.waiting.load, arrived.incoming
        num_loaded = 0
        try:
            for stretch in arrived.stretches:
                assert incoming is not None
                end = min(_intact_end(incoming, stretch), load.first_block + len(load.block_ids))
                if end > stretch.first_block:
                    self._copy(load, incoming, stretch, end)
                    num_loaded += end - stretch.first_block
                if end < stretch.last_block:
                    return num_loaded, _DAMAGED
        except Exception:  # it costs this load, not the thread
            logger.exception("KV for request %s could not be copied", load.request_id)
            return num_loaded, _NOT_COPIED
        return num_loaded, None

    def _copy(self, load: HandoverLoad, incoming: Incoming, stretch: Stretch, end: int) -> None:
        memory = incoming.memory
        base, start = stretch.segment * memory.ring.segment_blocks, stretch.first_block
        copy_kv_blocks(
            ChunkBuffers(
                memory.geometry,
                self._paged.block_size,
                [memory.address_of(stretch.segment)],
                memory.region,
            ),
            self._paged,
            range(start - base, end - base),
            load.block_ids[start - load.first_block : end - load.first_block],
            "h2d",
            self._copier,
        )


def _intact_end(incoming: Incoming, stretch: Stretch) -> int:
    """The first block of a stretch whose digest is wrong, or its end."""
    end = stretch.last_block
    for check in stretch.checks:
        if check.first_block < end and check.last_block > stretch.first_block:
            place = (check.layer, check.head, check.first_block, check.last_block)
            run = incoming.memory.region.view[incoming.memory.run(*place)]
            if digest_of([run], len(check.digest)) != check.digest:
                end = max(stretch.first_block, check.first_block)
    return end
