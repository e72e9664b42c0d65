"""Copies what a forward pass has written out of the paged cache, layer by layer, on one thread."""

from __future__ import annotations

import logging

from lmcache_connector.copy_kv_blocks.copier import Copier, copy_kv_blocks
from lmcache_connector.kv_layout.chunk_buffers import ChunkBuffers
from lmcache_connector.kv_layout.paged_cache import PagedLayout
from lmcache_connector.p2p.data.frame import NO_DIGEST, digest_of
from lmcache_connector.p2p.memory.outgoing import LayerSave, Piece
from lmcache_connector.p2p.worker.send_buffer import SendBuffer
from lmcache_connector.threads import start_thread

logger = logging.getLogger(__name__)


class Saver:
    """One thread. ``layers``: the cache, layer by layer. ``digest_bytes``: of a head's blocks."""

    def __init__(
        self,
        layers: tuple[PagedLayout, ...],
        copier: Copier,
        buffer: SendBuffer,
        *,
        digest_bytes: int,
    ) -> None:
        self._layers = layers
        self._copier = copier
        self._buffer = buffer
        self._digest_bytes = digest_bytes
        self._thread = start_thread("lmc-p2p-save", self._work)

    def close(self, seconds: float) -> None:
        """Finish what can be saved, for ``seconds`` at most."""
        self._buffer.end_saves()
        self._thread.join(seconds)

    def _work(self) -> None:
        while (save := self._buffer.next_save()) is not None:
            try:
                piece = self._copy(save)
            except Exception:  # it costs this hand-over, not the thread
                logger.exception("KV of %s could not be copied", save.outgoing.transfer_id)
                self._buffer.not_saved(save.outgoing)
            else:
                self._buffer.saved(save.outgoing, piece)

    def _copy(self, save: LayerSave) -> Piece:
        outgoing, paged = save.outgoing, self._layers[save.layer]
        memory, first, last = outgoing.memory, save.first_block, save.last_block
        segment = memory.ring.segment_of(first)
        base = segment * memory.ring.segment_blocks
        copy_kv_blocks(
            paged,
            ChunkBuffers(
                memory.geometry,
                paged.block_size,
                [memory.address_of(segment)],
                memory.region,
                layers=(save.layer,),
            ),
            save.block_ids,
            range(first - base, last - base),
            "d2h",
            self._copier,
            save.fence,
        )
        layer = memory.geometry.layer_start + save.layer
        digests: tuple[bytes, ...] = ()
        if self._digest_bytes != NO_DIGEST:
            runs = [outgoing.run(layer, head, first, last) for head in memory.geometry.shards]
            digests = tuple(digest_of([run], self._digest_bytes) for run in runs)
        return Piece(layer, first, last, digests)
