"""An instance of vLLM's own tiering over our tier, without a GPU.

The managers are vLLM's, made from a real configuration; calls are those of vLLM's scheduler.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from vllm.config import KVEventsConfig, KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from tests.support.clock import wait_until
from tests.support.vllm_configs import full_attention, kv_cache, vllm_config

_IDLE = ScheduleEndContext(new_req_ids=(), preempted_req_ids=())
_NUM_CHUNKS = 16


def block_key(index: int, num_bytes: int = 32) -> OffloadKey:
    """vLLM's key of block ``index``, as from SHA-256."""
    return make_offload_key(index.to_bytes(num_bytes, "big"), 0)


def tier_settings(url: str, **settings: Any) -> dict[str, Any]:
    """One entry of ``secondary_tiers``."""
    module = "lmcache_connector.integrations.vllm_tier"
    place = {"type": "RedisSecondaryTier", "module_path": module}
    return place | {"redis_url": url, "namespace": "default"} | settings


def configuration(model: Path, tier: dict[str, Any], name: str = "") -> tuple[VllmConfig, Any]:
    """The configuration that vLLM gives the connector, with memory for ``_NUM_CHUNKS`` blocks.
    ``name``: under which vLLM was told to load ``model``, if not by its path."""
    config, cache = vllm_config(model), kv_cache(full_attention())
    config.model_config.model = name or config.model_config.model
    page = -(-full_attention().page_size_bytes * 2 // 4096) * 4096
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_role="kv_both",
        engine_id=uuid.uuid4().hex,
        kv_connector_extra_config={
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": _NUM_CHUNKS * page,
            "secondary_tiers": [tier],
        },
    )
    config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    return config, cache


class Instance:
    """The managers of one engine. Tests name blocks by numbers."""

    def __init__(self, config: VllmConfig, cache: Any) -> None:
        spec = OffloadingSpecFactory.create_spec(build_offloading_config(config, cache))
        assert isinstance(spec, TieringOffloadingSpec)
        self.manager: Any = spec.get_manager()
        self.tier: Any = self.manager.secondary_tiers[0]
        view = self.manager.primary_tier.get_kv_memoryview()
        self.block_bytes = int(view.strides[0])
        self._memory: memoryview = view.cast("B")
        self._numbers = count()

    def slot(self, index: int) -> memoryview:
        return self._memory[index * self.block_bytes : (index + 1) * self.block_bytes]

    def close(self) -> None:
        self._memory.release()
        self.manager.shutdown()

    def store(self, blocks: dict[OffloadKey, bytes]) -> None:
        """Into memory and on to the tier; returns once no transfer is under way."""
        request = self._new_request()
        out = self.manager.prepare_store(list(blocks), request)
        for key, slot in zip(out.keys_to_store, out.store_spec.block_ids, strict=True):
            self.slot(int(slot))[:] = blocks[key]
        self.manager.complete_store(out.keys_to_store, request, success=True)
        self.manager.on_request_finished(request)
        self.settle()

    def load(self, keys: Sequence[OffloadKey]) -> list[bytes | None]:
        """A new request's blocks, after the last lookup that vLLM would repeat."""
        request = self._new_request()
        found = self._look_up(keys, request)

        def is_settled() -> bool:
            if not {LookupResult.RETRY, LookupResult.HIT_PENDING} & set(found):
                return True
            self.manager.on_schedule_end(_IDLE)
            found[:] = self._look_up(keys, request)
            return False

        wait_until(is_settled, "the lookup does not end")
        blocks = [
            self._read(key, request) if result is LookupResult.HIT else None
            for key, result in zip(keys, found, strict=True)
        ]
        self.manager.on_request_finished(request)
        self.settle()
        return blocks

    def settle(self) -> None:
        """Run steps without work until no transfer is left."""

        def is_idle() -> bool:
            self.manager.on_schedule_end(_IDLE)
            return not self.manager.has_pending_work()

        wait_until(is_idle, "a transfer does not end")

    def _new_request(self) -> ReqContext:
        request = ReqContext(req_id=f"request-{next(self._numbers)}")
        self.manager.on_new_request(request)
        return request

    def _look_up(self, keys: Sequence[OffloadKey], request: ReqContext) -> list[LookupResult]:
        return [self.manager.lookup(key, request) for key in keys]

    def _read(self, key: OffloadKey, request: ReqContext) -> bytes:
        slots = self.manager.prepare_load([key], request).block_ids
        data = bytes(self.slot(int(slots[0])))
        self.manager.complete_load([key], request)
        return data


@contextmanager
def running_instance(model: Path, tier: dict[str, Any], name: str = "") -> Iterator[Instance]:
    """Begins with empty memory, and frees it."""
    instance = Instance(*configuration(model, tier, name))
    try:
        yield instance
    finally:
        instance.close()
