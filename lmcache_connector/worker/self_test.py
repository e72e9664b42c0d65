"""The start-up self-test: a pattern goes through store and load, and must come back byte for byte.

It runs before vLLM serves anything, on the real paged cache, and leaves it as it was.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from lmcache_connector.plans import LoadJob, StoreJob
from lmcache_connector.worker.lmcache_engine import LMCacheEngineAdapter

_KEY = b"\0" * 31 + b"\1"  # no BLAKE3 output anyone will meet
_DEADLINE_SECONDS = 60.0


class SelfTestError(RuntimeError):
    """What was loaded is not what was stored."""


@dataclass(frozen=True, slots=True)
class SelfTestResult:
    """``num_bytes`` went each way, in so many seconds."""

    num_bytes: int
    store_seconds: float
    load_seconds: float


def run_self_test(
    engine: LMCacheEngineAdapter,
    kv_caches: dict[str, torch.Tensor],
    layer_widths: dict[str, int],
    block_size: int,
    chunk_size: int,
    clock: Callable[[], float],
) -> SelfTestResult | None:
    """``None`` if the cache is smaller than a chunk; :class:`SelfTestError` on a mismatch."""
    layers = {name: kv_caches[name] for name in layer_widths}
    per_chunk = chunk_size // block_size
    num_blocks = min(tensor.shape[0] for tensor in layers.values())
    if num_blocks < per_chunk:
        return None
    # Last to first: an order no straight copy of neighbours would get right.
    block_ids = tuple(range(num_blocks - 1, num_blocks - 1 - per_chunk, -1))
    index = torch.tensor(block_ids)
    before = {name: _read(tensor, index) for name, tensor in layers.items()}
    pattern = {name: _pattern(bytes_) for name, bytes_ in before.items()}
    try:
        # The first trip touches memory and compiles; the second is what transfers will cost.
        _round_trip(engine, layers, index, block_ids, pattern, clock)
        engine.forget(_KEY)
        result = _round_trip(engine, layers, index, block_ids, pattern, clock)
    finally:
        for name, tensor in layers.items():
            _write(tensor, index, before[name])
        engine.forget(_KEY)
        engine.take_events()
    return result


def _round_trip(
    engine: LMCacheEngineAdapter,
    layers: dict[str, torch.Tensor],
    index: torch.Tensor,
    block_ids: tuple[int, ...],
    pattern: dict[str, torch.Tensor],
    clock: Callable[[], float],
) -> SelfTestResult:
    for name, tensor in layers.items():
        _write(tensor, index, pattern[name])
    never, started = threading.Event(), clock()
    stored = engine.store(StoreJob(0, "self-test", (_KEY,), (0,), (block_ids,)), None, never)
    store_seconds = clock() - started
    for name, tensor in layers.items():
        _write(tensor, index, torch.zeros_like(pattern[name]))
    started = clock()
    loaded = engine.load(
        LoadJob(0, "self-test", (_KEY,), (block_ids,), 0, _DEADLINE_SECONDS, False, 0),
        None,
        never,
        started + _DEADLINE_SECONDS,
    )
    load_seconds = clock() - started
    if stored.num_chunks != 1 or loaded.num_chunks != 1:
        raise SelfTestError("the self-test could not store and load one chunk: raise cpu_gib")
    for name, tensor in layers.items():
        if not torch.equal(_read(tensor, index), pattern[name]):
            raise SelfTestError(
                f"the self-test loaded other bytes than it stored in layer {name}; "
                "refusing to start, please report this with your model and vLLM command line"
            )
    return SelfTestResult(stored.num_bytes, store_seconds, load_seconds)


def _read(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The bytes of some blocks, on the CPU."""
    return tensor[index.to(tensor.device)].contiguous().cpu().view(torch.uint8)


def _write(tensor: torch.Tensor, index: torch.Tensor, data: torch.Tensor) -> None:
    tensor[index.to(tensor.device)] = data.view(tensor.dtype).to(tensor.device)


def _pattern(like: torch.Tensor) -> torch.Tensor:
    return torch.randint(0, 256, like.shape, dtype=torch.uint8)
