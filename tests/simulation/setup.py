"""Puts models in the place of what cannot run in a simulation: LMCache's engine, the duration of
copies, the CPU's attention."""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.simulation.kernel import SimulationFailure
from tests.simulation.stdlib import RUNTIME

if TYPE_CHECKING:
    from examples.tiny_model import ModelShape

_READ_GRACE_SECONDS = 0.1
ONE_HEAD = "one-head"
"""Where the model of one KV head is, beside the other's files."""
_SILENT_SHARE = 0.02


def prepare(folder: Path, shape: ModelShape | None = None) -> Path:
    """The folder of the model that instances claim to serve, a tiny one if no ``shape`` is given.
    Takes seconds."""
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    logging.getLogger("vllm").setLevel(logging.ERROR)
    import torch

    from examples.tiny_model import TINY, build_tiny_model
    from lmcache_connector.copy_kv_blocks.cpu import CpuCopier
    from lmcache_connector.peers.tier import PeerTier
    from lmcache_connector.storage.redis.tier import RedisTier
    from tests.simulation import lmcache_model

    torch.set_num_threads(1)
    copier = _SlowCopier(CpuCopier())
    _replace(
        "worker.rank_tiers",
        make_copier=lambda device: copier,
        run_self_test=lambda *_, **more: None,
    )
    _replace("worker.adapter", ask_for_amx=lambda: None)
    _replace("storage.redis.pending_read", _ARRIVAL_BYTES=1)  # loads copy while they read
    _replace("worker.self_test", store_sample=lambda *_: ())
    _replace("worker.lmcache_engine", start_engine=lmcache_model.start_engine)
    model = _module("vllm_compat.model")
    _replace("vllm_compat.model", configuration_digests=_remembered(model.configuration_digests))
    plain = _module("vllm_compat.parts").Packing("simulated", ())
    _replace("vllm_compat.parts", find_packing=lambda *_: plain)
    _watch_reads(RedisTier)
    _watch_reads(PeerTier)
    tier: Any = PeerTier
    tier.find_ranks, tier.read_ranks = _all_others, _read_ranks
    _module("peers.server").PeerServer.has_host_socket = True
    _module("worker.lmcache_tier").CpuTier.memory = -1
    build_tiny_model(folder / ONE_HEAD, replace(shape or TINY, num_kv_heads=1))
    return build_tiny_model(folder, shape or TINY)


def _all_others(tier: Any, sample: Sequence[bytes], is_given_up: Any) -> frozenset[int]:
    return tier._share.others  # type: ignore[no-any-return]


def _read_ranks(
    tier: Any,
    keys: Sequence[bytes],
    buffers: Sequence[memoryview],
    deadline: float,
    cancelled: Callable[[], bool],
) -> list[bool]:
    """Out of the memory of the engine's other ranks, in the time that this takes. Now and then one
    does not answer."""
    kernel, found = RUNTIME.kernel, list[bool]()
    is_answered = kernel.chance.random() > _SILENT_SHARE
    for key, buffer in zip(keys, buffers, strict=True):
        kernel.sleep(0.0001)
        lease = tier.engines[tier._share.owner(key)].cpu.lease(key) if is_answered else None
        if lease is not None:
            buffer[:] = lease.view
            tier.num_mapped += 1
            kernel.sleep(0.0001)
            lease.release()
        found.append(lease is not None)
    return found


def _remembered(digests: Callable[..., dict[str, str]]) -> Callable[..., dict[str, str]]:
    """``configuration_digests``, taken once for each shape of instances: they all serve one model,
    and a digest takes as long as a tenth of a world."""
    known: dict[tuple[object, ...], dict[str, str]] = {}

    def remembered(vllm_config: Any, kv_cache_config: Any, packings: Any) -> dict[str, str]:
        shape = (
            vllm_config.model_config.model,
            vllm_config.parallel_config.tensor_parallel_size,
            vllm_config.scheduler_config.max_num_batched_tokens,
            vllm_config.scheduler_config.async_scheduling,
            kv_cache_config.num_blocks,
        )
        if shape not in known:
            known[shape] = digests(vllm_config, kv_cache_config, packings)
        return known[shape]

    return remembered


class _SlowCopier:
    """The real copy, in two halves; meanwhile other threads run and forward passes write."""

    shares_cores = True

    def __init__(self, copier: Any) -> None:
        self._copier = copier

    def fence(self) -> None:
        return self._copier.fence()  # type: ignore[no-any-return]

    def copy(self, copies: Sequence[Any], direction: Any, after: Any = None) -> int:
        kernel = RUNTIME.kernel
        moved = 0
        for first in (True, False):
            kernel.sleep(0.0002 + 0.02 * kernel.chance.random() ** 8)
            halves = [_half(each, first) for each in copies]
            moved += self._copier.copy(halves, direction, after)
        kernel.sleep(0.0002)
        return moved

    def enqueue(self, copies: Sequence[Any]) -> Any:
        self.copy(copies, "h2d")
        return self._copier.enqueue(copies)

    def close(self) -> None:
        """The real one is shared."""


def _half(copy: Any, first: bool) -> Any:
    half = len(copy.src_block_ids) // 2
    part = slice(None, half) if first else slice(half, None)
    return replace(
        copy,
        src_block_ids=list(copy.src_block_ids[part]),
        dst_block_ids=list(copy.dst_block_ids[part]),
    )


def _module(name: str) -> Any:
    return importlib.import_module(f"lmcache_connector.{name}")


def _replace(name: str, **doubles: Any) -> None:
    """Raises if a name is not there: one that has moved would go on being used unreplaced."""
    module = _module(name)
    for attribute, double in doubles.items():
        getattr(module, attribute)
        setattr(module, attribute, double)


def _watch_reads(tier: Any) -> None:
    """No read of the tier may outlast its deadline."""
    read = tier.read

    def watched(
        self: Any, keys: Any, buffers: Any, deadline: float, *more: Any, **others: Any
    ) -> Any:
        result = read(self, keys, buffers, deadline, *more, **others)
        late = RUNTIME.kernel.clock() - deadline
        if late > _READ_GRACE_SECONDS + RUNTIME.process.frozen_seconds:
            raise SimulationFailure(f"a read ended {late:.3f} s after its deadline")
        return result

    tier.read = watched
