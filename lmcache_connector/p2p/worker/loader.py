"""Copies what has arrived into the paged cache, one request after the other, on one thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import xxhash

from lmcache_connector.copy_kv_blocks.copier import Copier, copy_kv_blocks
from lmcache_connector.kv_layout.chunk_buffers import ChunkBuffers
from lmcache_connector.kv_layout.paged_cache import PagedLayout
from lmcache_connector.p2p.plans import HandoverLoad, HandoverResult
from lmcache_connector.p2p.reasons import Cause, Reason
from lmcache_connector.p2p.worker.receive_buffer import ReceiveBuffer
from lmcache_connector.p2p.worker.transfer import Arrived, Incoming

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
        self._thread = threading.Thread(target=self._work, name="lmc-p2p-load", daemon=True)
        self._thread.start()

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
            load, incoming = arrived.waiting.load, arrived.incoming
            result = HandoverResult(
                load.request_id,
                num_blocks,
                seconds=self._clock() - arrived.waiting.since,
                wire_bytes=incoming.num_bytes if incoming is not None else 0,
                wire_seconds=incoming.wire_seconds if incoming is not None else 0.0,
                cause=None if num_blocks == len(load.block_ids) else cause,
            )
            with self._buffer.changed:
                self._results.append((load, result))
                self._buffer.loaded(arrived)

    def _load(self, arrived: Arrived) -> tuple[int, Cause]:
        """Blocks that are in the cache now, and why not all are if some are missing."""
        load, incoming = arrived.waiting.load, arrived.incoming
        cause = arrived.waiting.cause or _SHORT
        if incoming is None:
            return 0, cause
        num_blocks = _num_intact(arrived, incoming)
        if num_blocks < arrived.num_blocks:
            cause = _DAMAGED
        num_blocks = min(num_blocks, len(load.block_ids))
        if num_blocks == 0:
            return 0, cause
        try:
            self._copy(load, incoming, num_blocks)
        except Exception:  # it costs this load, not the thread
            logger.exception("KV for request %s could not be copied", load.request_id)
            return 0, _NOT_COPIED
        return num_blocks, cause

    def _copy(self, load: HandoverLoad, incoming: Incoming, num_blocks: int) -> None:
        copy_kv_blocks(
            ChunkBuffers(
                incoming.geometry,
                self._paged.block_size,
                [incoming.region.address],
                incoming.region,
            ),
            self._paged,
            range(load.first_block, load.first_block + num_blocks),
            load.block_ids[:num_blocks],
            "h2d",
            self._copier,
        )


def _num_intact(arrived: Arrived, incoming: Incoming) -> int:
    """Blocks that arrived for a load, up to the first whose checksum is wrong."""
    first, num_blocks = arrived.waiting.load.first_block, arrived.num_blocks
    for check in arrived.checks:
        if check.first_block < first + num_blocks and check.last_block > first:
            found = xxhash.xxh3_64_intdigest(incoming.region.view[check.run])
            if found != check.checksum:
                num_blocks = max(0, check.first_block - first)
    return num_blocks
