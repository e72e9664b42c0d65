"""The Redis tier as a secondary tier of vLLM's ``OffloadingConnector``.

vLLM copies its blocks to memory and back, evicts there, and names blocks by its own hashes. This
tier stores those bytes and returns them, or a miss. Everything runs in the scheduler's process; no
method here waits for a network.

vLLM decides what a name covers: it hashes adapters by name and images by their hash. The rest of
the identity is what vLLM tells a tier about the model, and the weights by content. Hashes shorter
than 256 bits are refused: whoever can make two prompts collide could serve one the KV of the other.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import vllm
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
from lmcache_connector.integrations.redis_blocks import RedisBlocks
from lmcache_connector.integrations.settings import TierSettings
from lmcache_connector.vllm_compat.weights import folder_identity

logger = logging.getLogger(__name__)

_HASH_BYTES = 32


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
        parsed = parse(TierSettings, settings, "the secondary tier's configuration", limits.GONE)
        self.locality = Locality(parsed.locality)
        self._drain_seconds = parsed.load_deadline_seconds + limits.SHUTDOWN_SECONDS
        self._memory = primary_kv_view.cast("B")
        self._ended: deque[_Ended] = deque()
        self._events: list[OffloadingEvent] | None = None
        self._events_locality = self.locality
        if parsed.enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events:
            self._events = []
        identity = _identity(offloading_spec, parsed.model_digest)
        self._blocks = RedisBlocks(parsed, identity, self.block_size_bytes)
        self._lookups = _Lookups(tier_type, self._blocks.exist)

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
        keys, on_done = list(job_metadata.keys), self._ends(job_metadata)
        self._blocks.load(keys, self._slots(job_metadata), on_done)

    def submit_store(self, job_metadata: TransferJob) -> None:
        keys, on_done = list(job_metadata.keys), self._ends(job_metadata)
        if not all(map(_is_sound, keys)):
            logger.debug("Blocks not stored: their hashes have less than %d bytes", _HASH_BYTES)
            on_done([False] * len(keys))
            return
        position = job_metadata.req_context.get_offload_key_position
        orders = [position(key) or 0 for key in keys]
        self._blocks.store(keys, self._slots(job_metadata), orders, on_done)

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
        """vLLM resets its cache, maybe for other weights: this instance never finds earlier blocks
        again."""
        self._blocks.drain(self._drain_seconds)
        self._blocks.forget()
        self._events_locality = Locality.LOCAL  # other instances cannot use these blocks

    def shutdown(self) -> None:
        self._lookups.shutdown()
        self._blocks.close()
        self._memory.release()

    def _slots(self, job: TransferJob) -> list[memoryview]:
        size = self.block_size_bytes
        return [self._memory[int(i) * size : (int(i) + 1) * size] for i in job.chunk_ids]

    def _ends(self, job: TransferJob) -> Callable[[list[bool]], None]:
        started = time.monotonic()

        def ended(results: list[bool]) -> None:
            self._ended.append(_Ended(job, results, time.monotonic() - started))

        return ended


class _Lookups(AsyncLookupManager):
    """Asks Redis on a thread that vLLM starts."""

    def __init__(self, tier_type: str, exist: Callable[[Sequence[bytes]], list[bool]]) -> None:
        self._exist = exist
        super().__init__(tier_type)

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> Iterable[bool]:
        return self._exist(keys)

    def mark_miss(self, keys: Collection[OffloadKey]) -> None:
        """Skips keys being asked again, for which vLLM 0.32 asserts that no answer comes."""
        answered = LookupPhase.RESOLVED
        known = {key: state for key in keys if (state := self._lookup_state.get(key)) is not None}
        super().mark_miss([key for key, state in known.items() if state.phase is answered])


def _is_sound(key: OffloadKey) -> bool:
    return len(get_offload_block_hash(key)) >= _HASH_BYTES


def _identity(spec: OffloadingSpec, model_digest: str) -> dict[str, object]:
    """The weights, and all that vLLM tells a tier about what determines a block's bytes."""
    config = spec.config
    mapped = FileMapper.from_offloading_spec("", spec, spec.blocks_per_chunk, True)
    return {
        "neighbour": "vllm offloading",
        "vllm": vllm.__version__,
        "kv_cache_layout": config.kv_cache_layout,
        "bytes_per_block": config.worker_kv_bytes_per_block,
        "weights": folder_identity(config.model.name, model_digest, user_cache_folder()),
        **mapped.get_run_config(),
    }
