"""Blocks of one size in Redis, under names that vLLM gives them.

A load returns a whole, verified block or a miss. Loads, look-ups and stores run outside of vLLM's
engine thread. Each load and store calls its ``on_done`` once, from any thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from blake3 import blake3

from lmcache_connector.config import limits
from lmcache_connector.integrations.settings import TierSettings
from lmcache_connector.keys.prefix_hash import canonical_bytes
from lmcache_connector.storage.geometry import ChunkGeometry, PartGeometries
from lmcache_connector.storage.redis.lookup import RedisLookup
from lmcache_connector.storage.redis.tier import RedisTier
from lmcache_connector.threads import Background

logger = logging.getLogger(__name__)

OnDone = Callable[[list[bool]], None]
"""Called with whether each block was stored, or loaded and verified."""
_NAME_CONTEXT = "lmcache-connector 2026-11 neighbour block name v1"
_SECRET_CONTEXT = "lmcache-connector 2026-11 neighbour block secret v1"
# Blocks are cut into pieces of this size, which are packed into values.
_PIECE_BYTES = 128 << 10
_NUM_LOADERS = 2


class RedisBlocks:
    """Blocks of ``block_bytes`` each. Thread-safe. ``identity``: plain JSON values that determine a
    block's bytes together with its name. The constructor returns at once; connections are made in
    the background.
    """

    def __init__(
        self, settings: TierSettings, identity: Mapping[str, object], block_bytes: int
    ) -> None:
        self._settings = settings
        secret = settings.hash_key_bytes
        self._key = blake3(secret or b"", derive_key_context=_SECRET_CONTEXT).digest()
        form = {"block_bytes": block_bytes, **identity}
        self._root = blake3(canonical_bytes(form), derive_key_context=_NAME_CONTEXT).digest()
        config = settings.redis_tier_config()
        geometries = PartGeometries((_geometry(block_bytes),))
        self._lookup = RedisLookup(config, [geometries])
        self._lookup.maintain()  # connect ahead of the first look-up
        self._tier = RedisTier(config, geometries)
        self._open = 0
        self._changed = threading.Condition()
        self._loads = Background("lmc-block-load", _NUM_LOADERS)

    def exist(self, names: Sequence[bytes]) -> list[bool]:
        """Whether each block is known to be in Redis. Blocks for up to 0.1 s. Called by one
        thread."""
        try:
            until = time.monotonic() + limits.LOOKUP_DEADLINE_SECONDS
            return self._lookup.exist(self._keys(names), until)
        except Exception:  # keep serving look-ups
            logger.exception("A look-up failed; its blocks count as misses")
            return [False] * len(names)

    def load(self, names: Sequence[bytes], buffers: Sequence[memoryview], on_done: OnDone) -> None:
        """Read blocks into writable ``buffers`` of format B. Ends within ``load_deadline_seconds``;
        nothing touches the buffers afterwards. Buffers of misses then hold garbage."""
        deadline = time.monotonic() + self._settings.load_deadline_seconds
        keys, on_done = self._keys(names), self._opened(on_done)

        def load() -> None:
            hits = [False] * len(keys)
            try:
                hits = self._tier.read(keys, buffers, deadline).hits
            finally:
                on_done(hits)

        self._loads.submit(load)

    def store(
        self,
        names: Sequence[bytes],
        buffers: Sequence[memoryview],
        orders: Sequence[int],
        on_done: OnDone,
    ) -> None:
        """Write blocks in the background. Buffers must not change before ``on_done``. ``orders``:
        position of each block in its prompt; a full queue drops the deepest blocks first."""
        ends = _Ends(len(names), self._opened(on_done))
        for i, key in enumerate(self._keys(names)):
            self._tier.put(key, buffers[i], partial(ends.end, i), orders[i])

    def forget(self) -> None:
        """Never find earlier blocks again, since the same name may now mean other bytes. From here
        on this instance shares blocks with no other."""
        self._root = blake3(self._root + time.time_ns().to_bytes(8, "little")).digest()

    def drain(self, seconds: float) -> bool:
        """Wait for all loads and stores. After ``seconds``, closes the tier for good, which ends
        them, and returns False."""
        if self._wait_idle(seconds):
            return True
        logger.error(
            "Transfers with Redis did not end within %g s: Redis is not used any more", seconds
        )
        self._tier.close(0.0)
        self._wait_idle(seconds)
        return False

    def close(self) -> None:
        """Write for up to 5 s, then end everything. Idempotent."""
        self._tier.close(limits.SHUTDOWN_SECONDS)
        self._loads.close(limits.SHUTDOWN_SECONDS)
        self._lookup.close()

    def _keys(self, names: Sequence[bytes]) -> list[bytes]:
        return [blake3(self._root + name, key=self._key).digest() for name in names]

    def _opened(self, on_done: OnDone) -> OnDone:
        """Wrap ``on_done`` to count the operation as open until it is called."""

        def close(results: list[bool]) -> None:
            try:
                on_done(results)
            except Exception:  # a caller's bug must not end our thread
                logger.exception("The callback of a transfer with Redis failed")
            with self._changed:
                self._open -= 1
                self._changed.notify_all()

        with self._changed:
            self._open += 1
        return close

    def _wait_idle(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._open, seconds)


class _Ends:
    """Calls ``on_done`` when all of ``num_blocks`` have ended."""

    def __init__(self, num_blocks: int, on_done: OnDone) -> None:
        self._results = [False] * num_blocks
        self._left = num_blocks
        self._on_done = on_done
        self._lock = threading.Lock()
        if not num_blocks:
            on_done([])

    def end(self, index: int, stored: bool) -> None:
        with self._lock:
            self._results[index] = stored
            self._left -= 1
            is_last = not self._left
        if is_last:
            self._on_done(self._results)


def _geometry(block_bytes: int) -> ChunkGeometry:
    """Opaque bytes: one head, with pieces as layers."""
    num_whole, rest = divmod(block_bytes, _PIECE_BYTES)
    widths = (_PIECE_BYTES,) * num_whole + ((rest,) if rest else ())
    return ChunkGeometry(1, 0, widths, (0,), 1, "uint8")
