"""Blocks of one size in Redis, under vLLM's names of them.

A block is stored whole, and read back whole and verified, or it is a miss. No load, look-up or
store runs on the thread of vLLM's engine. Every load and store ends with one call of its
``on_done``, from any thread.
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
from lmcache_connector.storage.redis.tier import RedisTier, RedisTierStats
from lmcache_connector.threads import Background

logger = logging.getLogger(__name__)

OnDone = Callable[[list[bool]], None]
"""Takes for each block whether it was stored, or loaded with every byte verified."""
_NAME_CONTEXT = "lmcache-connector 2026-11 neighbour block name v1"
_SECRET_CONTEXT = "lmcache-connector 2026-11 neighbour block secret v1"
# A block is cut into pieces of this size, which are packed into values.
_PIECE_BYTES = 128 << 10
_NUM_LOADERS = 2


class RedisBlocks:
    """Blocks of ``block_bytes`` each. Thread-safe.

    ``identity``: plain JSON values that make a block's bytes what they are, beside its name.
    Returns at once; connections are made in the background.
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
        self._lookup.tend()  # connects ahead of the first question
        self._tier = RedisTier(config, geometries)
        self._open = 0
        self._changed = threading.Condition()
        self._loads = Background("lmc-block-load", _NUM_LOADERS)

    def exist(self, names: Sequence[bytes]) -> list[bool]:
        """Whether each block is known to be in Redis. Blocks for 0.1 s at most. One thread calls
        this."""
        try:
            until = time.monotonic() + limits.LOOKUP_DEADLINE_SECONDS
            return self._lookup.exist(self._keys(names), until)
        except Exception:  # the next question may fare better
            logger.exception("A look-up failed; its blocks count as misses")
            return [False] * len(names)

    def load(self, names: Sequence[bytes], buffers: Sequence[memoryview], on_done: OnDone) -> None:
        """Read blocks into ``buffers``, one each, writable and of format B. Ends within
        ``load_deadline_seconds``; then nothing touches the buffers any more. The buffer of what is
        no hit holds rubbish."""
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
        """Write blocks in the background. No buffer may change before the end. ``orders``: where in
        its prompt each block stands; when the queue is full, the deepest are given up first."""
        ends = _Ends(len(names), self._opened(on_done))
        for i, key in enumerate(self._keys(names)):
            self._tier.put(key, buffers[i], partial(ends.end, i), orders[i])

    def forget(self) -> None:
        """Find nothing again that was stored under a name until now: its meaning may be another.
        From here on this instance shares with no other."""
        self._root = blake3(self._root + time.time_ns().to_bytes(8, "little")).digest()

    def drain(self, seconds: float) -> bool:
        """Wait until every load and store has ended. Past ``seconds`` the tier is given up for
        good, which ends them: False."""
        if self._wait_idle(seconds):
            return True
        logger.error("Transfers with Redis did not end within %g s: Redis is given up", seconds)
        self._tier.close(0.0)
        self._wait_idle(seconds)
        return False

    def close(self) -> None:
        """Write what can be written within 5 s, end the rest. Idempotent."""
        self._tier.close(limits.SHUTDOWN_SECONDS)
        self._loads.close(limits.SHUTDOWN_SECONDS)
        self._lookup.close()

    def stats(self) -> RedisTierStats:
        return self._tier.stats()

    def _keys(self, names: Sequence[bytes]) -> list[bytes]:
        return [blake3(self._root + name, key=self._key).digest() for name in names]

    def _opened(self, on_done: OnDone) -> OnDone:
        """``on_done``, counted as open until it was called."""

        def close(results: list[bool]) -> None:
            try:
                on_done(results)
            except Exception:  # a fault of the caller's ends no thread of ours
                logger.exception("What was to follow a transfer with Redis failed")
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
    """Calls ``on_done`` once each of ``num_blocks`` has ended."""

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
    """Of bytes that mean nothing to us: one head, and pieces in place of layers."""
    num_whole, rest = divmod(block_bytes, _PIECE_BYTES)
    widths = (_PIECE_BYTES,) * num_whole + ((rest,) if rest else ())
    return ChunkGeometry(1, 0, widths, (0,), 1, "uint8")
