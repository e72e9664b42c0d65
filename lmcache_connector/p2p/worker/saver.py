"""Copies what a forward pass has written out of the paged cache, layer by layer, on one thread."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import xxhash

from lmcache_connector.copy_kv_blocks.copier import Copier, copy_kv_blocks
from lmcache_connector.kv_layout.chunk_buffers import ChunkBuffers
from lmcache_connector.kv_layout.paged_cache import PagedLayout
from lmcache_connector.p2p.worker.send_buffer import SendBuffer
from lmcache_connector.p2p.worker.transfer import Outgoing, Piece

if TYPE_CHECKING:
    from lmcache_connector.copy_kv_blocks.copier import Fence

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LayerSave:
    """Blocks ``first_block`` and on of one layer (counted over this rank), in ``block_ids``."""

    outgoing: Outgoing
    layer: int
    first_block: int
    block_ids: tuple[int, ...]
    fence: Fence | None


class Saver:
    """One thread that copies in the order of submission. ``layers``: the cache, layer by layer."""

    def __init__(
        self,
        layers: tuple[PagedLayout, ...],
        copier: Copier,
        buffer: SendBuffer,
        *,
        checksum: bool,
    ) -> None:
        self._layers = layers
        self._copier = copier
        self._buffer = buffer
        self._checksum = checksum
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="lmc-p2p-save", daemon=True)
        self._thread.start()

    def submit(self, save: LayerSave) -> None:
        self._buffer.save_planned(save.outgoing)
        self._queue.put(partial(self._save, save))

    def seal(self, outgoing: Outgoing) -> None:
        """After the last layer of the last blocks."""
        self._buffer.save_planned(outgoing)
        self._queue.put(partial(self._buffer.sealed, outgoing))

    def close(self, seconds: float) -> None:
        """Finish what was submitted, for ``seconds`` at most."""
        self._queue.put(None)
        self._thread.join(seconds)

    def _work(self) -> None:
        while (work := self._queue.get()) is not None:
            work()

    def _save(self, save: LayerSave) -> None:
        outgoing = save.outgoing
        if outgoing.failed is not None:
            self._buffer.not_saved(outgoing)
            return
        try:
            piece = self._copy(save)
        except Exception:  # it costs this hand-over, not the thread
            logger.exception("KV of %s could not be copied", outgoing.transfer_id)
            self._buffer.not_saved(outgoing)
        else:
            self._buffer.saved(outgoing, piece)

    def _copy(self, save: LayerSave) -> Piece:
        outgoing, paged = save.outgoing, self._layers[save.layer]
        last_block = save.first_block + len(save.block_ids)
        copy_kv_blocks(
            paged,
            ChunkBuffers(
                outgoing.geometry,
                paged.block_size,
                [outgoing.region.address],
                outgoing.region,
                first_layer=save.layer,
                num_layers=1,
            ),
            save.block_ids,
            range(save.first_block, last_block),
            "d2h",
            self._copier,
            save.fence,
        )
        layer = outgoing.geometry.layer_start + save.layer
        checksums: tuple[int, ...] = ()
        if self._checksum:
            checksums = tuple(
                xxhash.xxh3_64_intdigest(outgoing.run(layer, head, save.first_block, last_block))
                for head in outgoing.geometry.shards
            )
        return Piece(layer, save.first_block, last_block, checksums)
