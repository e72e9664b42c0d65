"""Puts models in the place of what the product cannot bring along: LMCache's engine, the copy's
duration, the CPU's attention."""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.simulation.kernel import SimulationFailure
from tests.simulation.stdlib import RUNTIME

_READ_GRACE_SECONDS = 0.1


def prepare(folder: Path) -> Path:
    """The folder of the model that instances claim to serve. Takes seconds."""
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    logging.getLogger("vllm").setLevel(logging.ERROR)
    import torch

    from lmcache_connector.copy_kv_blocks.cpu import CpuCopier
    from lmcache_connector.storage.redis.tier import RedisTier
    from tests.simulation import lmcache_model
    from tests.support.engines.tiny_model import TINY, build_tiny_model

    torch.set_num_threads(1)
    copier = _SlowCopier(CpuCopier())
    _module("connector").check_lmcache()
    _module("connector").check_lmcache = lambda: None  # once is enough: it takes time
    _module("worker.adapter").make_copier = lambda device: copier
    _module("worker.adapter").ask_for_amx = lambda: None
    _module("worker.lmcache_engine").start_engine = lmcache_model.start_engine
    compat = _module("vllm_compat.model")
    plain = compat.Packing("simulated", ())
    compat.find_packing = lambda *_: plain
    compat.configuration_digests = _remembered(compat.configuration_digests)
    _watch_reads(RedisTier)
    _quicken()
    return build_tiny_model(folder, TINY)


class _SlowCopier:
    """The real copy, block after block, while other threads run and forward passes write."""

    def __init__(self, copier: Any) -> None:
        self._copier = copier

    def fence(self) -> None:
        return self._copier.fence()  # type: ignore[no-any-return]

    def copy(
        self,
        src: Any,
        dst: Any,
        src_block_ids: Sequence[int],
        dst_block_ids: Sequence[int],
        direction: Any,
        after: Any = None,
    ) -> int:
        kernel = RUNTIME.kernel
        half = len(src_block_ids) // 2
        moved = 0
        for part in (slice(None, half), slice(half, None)):
            kernel.sleep(0.0002 + 0.02 * kernel.chance.random() ** 8)
            moved += self._copier.copy(
                src, dst, list(src_block_ids[part]), list(dst_block_ids[part]), direction, after
            )
        kernel.sleep(0.0002)
        return moved

    def close(self) -> None:
        """The real one is shared."""


def _quicken() -> None:
    """What is offered to Redis again takes half a minute in real life: most of a world's time."""
    pace, wanted = _module("worker.reconciler").Pace, _module("lookup.wanted_chunks")
    wanted.INTERVAL_SECONDS = 3.0

    def for_lifetime(ttl_seconds: float | None) -> Any:
        granted = 6.0 if ttl_seconds is None else min(6.0, ttl_seconds / 3)
        return pace(granted_seconds=granted, retry_seconds=6.0, max_retry_seconds=12.0)

    pace.for_lifetime = for_lifetime


def _remembered(digests: Callable[..., Any]) -> Callable[..., Any]:
    """They take milliseconds, and are the same for all instances of a shape."""
    known: dict[tuple[object, ...], Any] = {}

    def look_up(vllm_config: Any, *more: Any) -> Any:
        parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
        shape = (
            parallel.world_size,
            scheduler.async_scheduling,
            scheduler.max_num_batched_tokens,
        )
        if shape not in known:
            known[shape] = digests(vllm_config, *more)
        return dict(known[shape])

    return look_up


def _module(name: str) -> Any:
    return importlib.import_module(f"lmcache_connector.{name}")


def _watch_reads(tier: Any) -> None:
    """No read of the tier may outlast its deadline."""
    read = tier.read

    def watched(self: Any, keys: Any, buffers: Any, deadline: float, *more: Any) -> Any:
        result = read(self, keys, buffers, deadline, *more)
        late = RUNTIME.kernel.clock() - deadline
        if late > _READ_GRACE_SECONDS:
            raise SimulationFailure(f"a read ended {late:.3f} s after its deadline")
        return result

    tier.read = watched
