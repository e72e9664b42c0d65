"""The start-up self-test: a pattern goes through store and load, and must come back byte for byte.

It runs before vLLM serves anything, on the real paged cache, and leaves it as it was.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lmcache_connector.kv_layout.paged_cache import PagedLayout
from lmcache_connector.plans import LoadJob, PartRun, StoreJob
from lmcache_connector.worker.lmcache_engine import LMCacheEngineAdapter
from lmcache_connector.worker.step_gate import StepGate

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
    paged: PagedLayout,
    chunk_size: int,
    clock: Callable[[], float],
) -> SelfTestResult | None:
    """Store, load and compare one chunk of ``chunk_size`` tokens.

    Returns ``None`` if the cache is smaller than a chunk. Raises :class:`SelfTestError` if the
    chunk cannot be stored and loaded, or comes back with other bytes.
    """
    per_chunk = chunk_size // paged.block_size
    if paged.num_blocks < per_chunk:
        return None
    # Last to first: an order no straight copy of neighbours would get right.
    last = paged.num_blocks - 1
    trial = _Trial(engine, paged, tuple(range(last, last - per_chunk, -1)), clock)
    before = trial.read()
    pattern = [torch.randint(0, 256, layer.shape, dtype=torch.uint8) for layer in before]
    try:
        # The first trip touches memory and compiles; the second is what transfers will cost.
        trial.round_trip(pattern)
        engine.forget(_KEY)
        return trial.round_trip(pattern)
    finally:
        trial.write(before)
        engine.forget(_KEY)
        engine.take_events()


@dataclass(frozen=True, slots=True)
class _Trial:
    """The blocks of one chunk. Their bytes are lists over layers, as :meth:`read` returns them."""

    engine: LMCacheEngineAdapter
    paged: PagedLayout
    block_ids: tuple[int, ...]
    clock: Callable[[], float]

    def round_trip(self, pattern: Sequence[torch.Tensor]) -> SelfTestResult:
        self.write(pattern)
        never, started = threading.Event(), self.clock()
        run = PartRun(0, (_KEY,), (0,), (self.block_ids,))
        store = StoreJob(0, "self-test", (run,))
        stored = self.engine.store(store, None, never, StepGate())
        store_seconds = self.clock() - started
        self.write([torch.zeros_like(layer) for layer in pattern])
        started = self.clock()
        load = LoadJob(0, "self-test", (run,), _DEADLINE_SECONDS, False, 0)
        loaded = self.engine.load(load, None, never, started + _DEADLINE_SECONDS)
        load_seconds = self.clock() - started
        if stored.num_chunks != 1 or loaded.num_chunks != 1:
            raise SelfTestError("the self-test could not store and load one chunk: raise cpu_gib")
        for name, found, wanted in zip(self.paged.names, self.read(), pattern, strict=True):
            if not torch.equal(found, wanted):
                raise SelfTestError(
                    f"the self-test loaded other bytes than it stored in layer {name}; "
                    "refusing to start, please report this with your model and vLLM command line"
                )
        return SelfTestResult(stored.num_bytes, store_seconds, load_seconds)

    def read(self) -> list[torch.Tensor]:
        """uint8 ``[rows, heads, tokens, content bytes]`` of each layer, on the CPU."""
        rows = self._rows()
        return [
            layer[rows.to(layer.device)].contiguous().cpu().view(torch.uint8)
            for layer in self.paged.owners
        ]

    def write(self, layers: Sequence[torch.Tensor]) -> None:
        rows = self._rows()
        for layer, data in zip(self.paged.owners, layers, strict=True):
            layer[rows.to(layer.device)] = data.view(layer.dtype).to(layer.device)

    def _rows(self) -> torch.Tensor:
        """Indices of the blocks in a layer's tensor, several each where vLLM splits blocks."""
        block_ids = np.array(self.block_ids, np.int64)
        return torch.from_numpy(self.paged.rows(block_ids, self.paged.row_tokens).index)
