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
from lmcache_connector.p2p.worker.receive_buffer import ReceiveBuffer
from lmcache_connector.p2p.worker.transfer import Arrived

logger = logging.getLogger(__name__)

_CHECKSUM = "bytes were damaged on the way"
_COPY = "the copy into the KV cache failed"


class Loader:
    """Takes requests that are over from the receive buffer and keeps how they ended until asked."""

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

    def close(self, seconds: float) -> bool:
        """The receive_buffer must be closed. False if a copy took longer than ``seconds``."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (arrived := self._buffer.next_arrived()) is not None:
            load, since = arrived.waiting.load, arrived.waiting.since
            num_blocks, num_bytes, reason = self._load(arrived)
            seconds = self._clock() - since
            wire_bytes, wire_seconds = _on_the_wire(arrived)
            result = HandoverResult(
                load.request_id, num_blocks, num_bytes, seconds, wire_bytes, wire_seconds, reason
            )
            with self._buffer.changed:
                self._results.append((load, result))
                self._buffer.loaded(arrived)

    def _load(self, arrived: Arrived) -> tuple[int, int, str]:
        """Blocks and bytes that are in the cache now, and why not all are."""
        load, incoming = arrived.waiting.load, arrived.incoming
        if incoming is None:
            return 0, 0, arrived.waiting.end
        num_blocks, reason = arrived.num_blocks, arrived.waiting.end
        for check in arrived.checks:
            end = load.first_block + num_blocks
            if check.first_block < end and check.last_block > load.first_block:
                found = xxhash.xxh3_64_intdigest(incoming.region.view[check.run])
                if found != check.checksum:
                    num_blocks = max(0, check.first_block - load.first_block)
                    reason = _CHECKSUM
        num_blocks = min(num_blocks, len(load.block_ids))
        if num_blocks == 0:
            return 0, 0, reason
        try:
            num_bytes = copy_kv_blocks(
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
        except Exception:  # it costs this load, not the lane
            logger.exception("KV for request %s could not be copied", load.request_id)
            return 0, 0, _COPY
        return num_blocks, num_bytes, "" if num_blocks == len(load.block_ids) else reason


def _on_the_wire(arrived: Arrived) -> tuple[int, float]:
    """Bytes received for a request, and the time from the first to the last of them."""
    incoming = arrived.incoming
    if incoming is None or incoming.first_byte_at is None:
        return 0, 0.0
    return incoming.num_bytes, max(0.0, incoming.last_byte_at - incoming.first_byte_at)
