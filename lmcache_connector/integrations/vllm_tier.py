"""The Redis tier as a secondary tier of vLLM's ``OffloadingConnector``.

vLLM copies its blocks to memory and back, evicts there, and names blocks by its own hashes. This
tier stores those bytes and returns them, verified, or a miss. Everything runs in the scheduler's
process, whose thread waits for a network only when vLLM resets its cache or shuts down.

vLLM decides what a name covers: adapters count by name, images by their ``mm_hash``. The rest of
the identity is what vLLM tells a tier about the model, the content of a weights folder, and the
user's names for everything else. Hashes shorter than 256 bits are refused: whoever can make two
prompts collide could serve one the KV of the other.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import vllm
from blake3 import blake3
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    get_offload_block_hash,
)
from vllm.v1.kv_offload.file_mapper import FileMapper
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager, LookupPhase
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from lmcache_connector.config import limits
from lmcache_connector.config.limits import user_cache_folder
from lmcache_connector.config.strict import parse
from lmcache_connector.config.tiered import ConnectorConfig
from lmcache_connector.errors import ConfigError
from lmcache_connector.keys.prefix_hash import canonical_bytes
from lmcache_connector.storage.geometry import ChunkGeometry, PartGeometries
from lmcache_connector.storage.redis.lookup import RedisLookup
from lmcache_connector.storage.redis.tier import RedisTier
from lmcache_connector.threads import Background
from lmcache_connector.vllm_compat.weights import folder_identity

logger = logging.getLogger(__name__)

KEYS = (
    *("redis_url", "namespace", "hash_key", "redis_ttl_seconds", "redis_timeout_seconds"),
    *("load_deadline_seconds", "model_digest", "locality", "enable_kv_events"),
)
"""The tiered connector's settings for Redis, with the same names and meanings, and vLLM's own."""
_HASH_BYTES = 32
_NAME_CONTEXT = "lmcache-connector 2026-11 neighbour block name v1"
_SECRET_CONTEXT = "lmcache-connector 2026-11 neighbour block secret v1"
# Blocks are cut into pieces of this size, which are packed into values.
_PIECE_BYTES = 128 << 10
_NUM_LOADERS = 2


class TierSettings(ConnectorConfig):
    """Only :data:`KEYS` may be given."""

    locality: Literal["LOCAL", "REMOTE"] = "REMOTE"
    """Location of Redis in KV cache events."""
    enable_kv_events: bool = True
    """Publish stores as KV cache events, if vLLM publishes any."""

    def problems(self) -> Iterator[str]:
        if self.redis_url is None:
            yield "'redis_url': field required"
        if "namespace" not in self.model_fields_set:
            yield (
                "'namespace': field required: vLLM tells a tier neither --quantization nor "
                "--hf-overrides, so give instances with other settings another namespace"
            )
        yield from super().problems()


@dataclass(frozen=True, slots=True)
class _Ended:
    """``results``: per key of the job, whether it was stored, or loaded and verified."""

    job: TransferJob
    results: list[bool]
    seconds: float


class RedisSecondaryTier(SecondaryTierManager):
    """``settings``: as in `TierSettings`. Raises :class:`ConfigError` with all problems."""

    medium: ClassVar[Medium] = Medium.STORAGE
    # vLLM has no source for a store that instances share.
    cache_hit_source: ClassVar[CacheHitSource] = CacheHitSource.EXTERNAL_UNSPECIFIED

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **settings: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        parsed = parse(
            TierSettings, settings, "the secondary tier's configuration", limits.GONE, KEYS
        )
        self.locality = Locality(parsed.locality)
        self._load_seconds = parsed.load_deadline_seconds
        self._memory = primary_kv_view.cast("B")
        self._ended: deque[_Ended] = deque()
        self._num_open = 0  # jobs without an entry in `_ended`
        self._changed = threading.Condition()
        self._events: list[OffloadingEvent] | None = None
        self._events_locality = self.locality
        if parsed.enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events:
            self._events = []
        identity = _identity(offloading_spec, parsed.model_digest)
        form = {"block_bytes": self.block_size_bytes, **identity}
        self._root = blake3(canonical_bytes(form), derive_key_context=_NAME_CONTEXT).digest()
        secret = parsed.hash_key_bytes or b""
        self._secret = blake3(secret, derive_key_context=_SECRET_CONTEXT).digest()
        config = parsed.redis_tier_config()
        assert config is not None  # `redis_url` is required
        geometries = PartGeometries((_geometry(self.block_size_bytes),))
        self._lookup = RedisLookup(config, [geometries])
        self._lookup.maintain()  # connect ahead of the first lookup
        self._tier = RedisTier(config, geometries)
        self._loads = Background("lmc-block-load", _NUM_LOADERS)
        self._lookups = _Lookups(tier_type, self._exist)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if not _is_sound(key):
            return LookupResult.MISS
        found = self._lookups.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Ends at ``load_deadline_seconds`` or soon after; nothing touches the memory after that.
        The memory of misses may hold garbage then."""
        deadline = time.monotonic() + self._load_seconds
        keys, buffers = self._keys(job_metadata.keys), self._slots(job_metadata)
        end = self._begin(job_metadata)

        def load() -> None:
            hits = [False] * len(keys)
            try:
                hits = self._tier.read(keys, buffers, deadline).hits
            finally:
                end(hits)

        self._loads.submit(load)

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Writes in the background; a full queue drops the deepest blocks of a prompt first."""
        names, end = list(job_metadata.keys), self._begin(job_metadata)
        if not names or not all(map(_is_sound, names)):
            logger.debug("Blocks not stored: their hashes have less than %d bytes", _HASH_BYTES)
            end([False] * len(names))
            return
        position = job_metadata.req_context.get_offload_key_position
        results: dict[int, bool] = {}

        def put_ended(index: int, is_stored: bool) -> None:
            with self._changed:
                results[index] = is_stored
                if len(results) == len(names):
                    end([results[i] for i in range(len(names))])

        slots = self._slots(job_metadata)
        for i, key in enumerate(self._keys(names)):
            self._tier.put(key, slots[i], partial(put_ended, i), position(names[i]) or 0)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = []
        while self._ended:
            ended = self._ended.popleft()
            keys = list(ended.job.keys)
            good = [key for key, fine in zip(keys, ended.results, strict=True) if fine]
            if ended.job.is_promotion:
                self._lookups.mark_miss(set(keys) - set(good))
            elif good and self._events is not None:
                self._events.append(
                    OffloadingEvent(good, self.medium, False, self._events_locality)
                )
            results.append(
                JobResult(
                    ended.job.job_id,
                    len(good) == len(keys),
                    tuple(good) or None,
                    ended.seconds,
                    len(good) * self.block_size_bytes,
                )
            )
        return results

    def take_events(self) -> Iterable[OffloadingEvent]:
        if self._events:
            yield from self._events
            self._events.clear()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._lookups.cleanup(req_context.req_id)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._lookups.flush()

    def drain_jobs(self) -> None:
        """vLLM resets its cache, maybe for other weights: the same name may now mean other bytes,
        so this instance never finds earlier blocks again, and shares blocks with no other."""
        if not self._wait_idle():
            logger.error("Transfers with Redis did not end in time: Redis is not used any more")
            self._tier.close(0.0)
            self._wait_idle()
        self._root = blake3(self._root + time.time_ns().to_bytes(8, "little")).digest()
        self._events_locality = Locality.LOCAL

    def shutdown(self) -> None:
        """Writes for up to 5 s, then ends everything."""
        self._lookups.shutdown()
        self._tier.close(limits.SHUTDOWN_SECONDS)
        self._loads.close(limits.SHUTDOWN_SECONDS)
        self._lookup.close()
        self._memory.release()

    def _exist(self, names: Sequence[bytes]) -> list[bool]:
        """Whether each block is known to be in Redis. Runs on one thread of vLLM's."""
        try:
            until = time.monotonic() + limits.LOOKUP_DEADLINE_SECONDS
            return self._lookup.exist(self._keys(names), until)
        except Exception:  # keep serving lookups
            logger.exception("A lookup failed; its blocks count as misses")
            return [False] * len(names)

    def _keys(self, names: Iterable[bytes]) -> list[bytes]:
        return [blake3(self._root + name, key=self._secret).digest() for name in names]

    def _slots(self, job: TransferJob) -> list[memoryview]:
        size = self.block_size_bytes
        return [self._memory[int(i) * size : (int(i) + 1) * size] for i in job.chunk_ids]

    def _begin(self, job: TransferJob) -> Callable[[list[bool]], None]:
        """Returns a function that ends the job with its results, on any thread."""
        started = time.monotonic()

        def end(results: list[bool]) -> None:
            with self._changed:
                self._ended.append(_Ended(job, results, time.monotonic() - started))
                self._num_open -= 1
                self._changed.notify_all()

        with self._changed:
            self._num_open += 1
        return end

    def _wait_idle(self) -> bool:
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._num_open, self._load_seconds + limits.SHUTDOWN_SECONDS
            )


class _Lookups(AsyncLookupManager):
    """Asks Redis on a thread that vLLM starts."""

    def __init__(self, tier_type: str, exist: Callable[[Sequence[bytes]], list[bool]]) -> None:
        self._exist = exist
        super().__init__(tier_type)

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> Iterable[bool]:
        return self._exist(keys)

    def mark_miss(self, keys: Collection[OffloadKey]) -> None:
        """Skips keys with an open lookup: vLLM 0.32 asserts that no marked key gets an answer."""
        answered = LookupPhase.RESOLVED
        known = {key: state for key in keys if (state := self._lookup_state.get(key)) is not None}
        super().mark_miss([key for key, state in known.items() if state.phase is answered])


def _is_sound(key: OffloadKey) -> bool:
    return len(get_offload_block_hash(key)) >= _HASH_BYTES


def _identity(spec: OffloadingSpec, model_digest: str) -> dict[str, object]:
    """The weights, and all that vLLM tells a tier about what determines a block's bytes."""
    config, weights = spec.config, f"named:{model_digest}"
    if model_digest == "full":
        weights = folder_identity(Path(config.model.name), user_cache_folder())
    if not weights:
        raise ConfigError(
            "'model_digest': set a name of your own, one for each revision: vLLM does not tell "
            f"a tier which weights it loads as {config.model.name!r}, which is not a weights folder"
        )
    mapped = FileMapper.from_offloading_spec("", spec, spec.blocks_per_chunk, True)
    return {
        "neighbour": "vllm offloading",
        "vllm": vllm.__version__,
        "kv_cache_layout": config.kv_cache_layout,
        "bytes_per_block": config.worker_kv_bytes_per_block,
        "weights": weights,
        **mapped.get_run_config(),
    }


def _geometry(block_bytes: int) -> ChunkGeometry:
    """Opaque bytes: one head, with pieces as layers."""
    num_whole, rest = divmod(block_bytes, _PIECE_BYTES)
    widths = (_PIECE_BYTES,) * num_whole + ((rest,) if rest else ())
    return ChunkGeometry(1, 0, widths, (0,), 1, "uint8")
