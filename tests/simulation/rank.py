"""One rank of an instance: our real worker side over checked memory, and how it is configured."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.worker.worker_base import WorkerBase

from lmcache_connector.connector import LMCacheTieredConnector
from lmcache_connector.retention.ledger import Holdings
from tests.simulation.kernel import Kernel, SimulationFailure
from tests.simulation.kv_memory import KVMemory
from tests.simulation.setup import ONE_HEAD
from tests.support.integrity import empty
from tests.support.vllm_configs import BLOCK_SIZE, engine_config

CHUNK_SIZE = 32
PEER_PORT = 7450  # of rank 0
NUM_LAYERS, NUM_HEADS, HEAD_SIZE = 2, 2, 32
WIDTH = 2 * HEAD_SIZE * 2  # bytes of K and V, one token and head, bfloat16


@dataclass(frozen=True, slots=True)
class Shape:
    """Of one instance. ``num_heads``: KV heads of the model; a single one is on all ranks, which
    store each chunk once. ``depth``: steps scheduled ahead. Sizes in blocks and chunks, times in
    seconds. ``settings``: ``kv_connector_extra_config``."""

    world_size: int = 1
    num_heads: int = NUM_HEADS
    depth: int = 1
    num_blocks: int = 40
    cpu_chunks: int = 24
    max_batched_tokens: int = 64
    token_seconds: float = 0.0005
    step_seconds: float = 0.004
    copy_seconds: float = 0.0005
    role: str = "kv_both"
    kv_events: bool = False
    peers: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def chunk_bytes(self) -> int:
        """Of each rank."""
        return CHUNK_SIZE * NUM_LAYERS * self.heads_per_rank * WIDTH

    @property
    def heads_per_rank(self) -> int:
        return max(1, self.num_heads // self.world_size)

    @property
    def shares(self) -> bool:
        """Whether a chunk is in the memory of one rank."""
        return self.num_heads < self.world_size

    @property
    def cpu_gib(self) -> float:
        return self.cpu_chunks * self.chunk_bytes * self.world_size / 2**30


@dataclass(frozen=True, slots=True)
class Pass:
    """One request in one forward pass: compute positions ``[start, end)``."""

    request_id: str
    start: int
    end: int
    cells: list[int]  # of all positions up to ``end``


@dataclass(frozen=True, slots=True)
class Step:
    """``tables``: whose blocks are whose, from here on. ``needs_loads``: the passes read what loads
    of this step bring."""

    passes: list[Pass]
    tables: dict[str, list[int]]
    needs_loads: bool = False


class Weights:
    """KV follows from them: ``version`` is what cells begin with. Versions above 0 came by an
    update, followed by a reset."""

    def __init__(self) -> None:
        self.version = 0
        self.model = torch.nn.Linear(1, 1, bias=False).requires_grad_(False)
        self.load(0)

    def load(self, version: int) -> None:
        """Other ones, or the same again, unseen by the connector. A reset of the cache follows."""
        self.version = version
        self.model.weight.fill_(version)


class Worker(WorkerBase):
    """Initialises a connector's worker side, as vLLM's worker does."""

    def __init__(self, weights: Weights) -> None:
        self.model_runner: Any = SimpleNamespace()
        self._model = weights.model

    def get_model(self) -> torch.nn.Module:
        return self._model

    def initialize(self, connector: Any, kv_caches: dict[str, torch.Tensor]) -> None:
        connector.register_kv_caches(kv_caches)


class Rank:
    """One worker process; it shares its instance's :class:`Process`, and dies with it."""

    def __init__(
        self, kernel: Kernel, config: VllmConfig, shape: Shape, rank: int, weights: Weights
    ) -> None:
        self.rank = rank
        self.chunk_bytes = shape.chunk_bytes
        self.token_seconds = shape.token_seconds
        self._kernel = kernel
        self._shape = shape
        first = rank * shape.num_heads // shape.world_size
        heads = range(first, first + shape.heads_per_rank)
        self.memory = KVMemory(NUM_LAYERS, shape.num_blocks, BLOCK_SIZE, heads, WIDTH)
        self.connector = LMCacheTieredConnector(
            config, KVConnectorRole.WORKER, kv_cache_config(shape)
        )
        Worker(weights).initialize(self.connector, self.memory.caches(torch.bfloat16))
        worker: Any = self.connector._worker
        self._engine, self._peers = worker._tiers.engine, worker._tiers.peers

    def run(
        self, metadata: Any, step: Step, check_call: Callable[[str, float], None]
    ) -> KVConnectorOutput:
        kernel, connector = self._kernel, self.connector
        started = kernel.now
        connector.handle_preemptions(metadata)
        check_call("handle_preemptions", started)
        connector.bind_connector_metadata(metadata)
        if step.needs_loads:
            started = kernel.now
            connector.start_load_kv(None)
            check_call("loads inside a step", started)
        self._forward(step)
        started = kernel.now
        if not step.needs_loads:
            connector.start_load_kv(None)
        connector.wait_for_save()
        output = KVConnectorOutput()
        results = connector.get_transfer_results(set())
        output.finished_sending = results.finished_sending
        output.finished_recving = results.finished_recving
        output.failed_recving = results.failed_recving
        output.invalid_block_ids = connector.get_block_ids_with_load_errors()
        output.kv_connector_worker_meta = connector.build_connector_worker_meta()
        connector.clear_connector_metadata()
        check_call("the end of a step", started)
        return output

    def pins(self) -> dict[bytes, float]:
        """When the pin of each pinned chunk ends, on the process's clock."""
        chunks = self._engine.cpu.ledger._chunks.items()
        return {key: chunk.pinned_until for key, chunk in chunks if chunk.pinned_until is not None}

    def keys_in_memory(self) -> set[bytes]:
        return set(self._engine.cpu.all_keys())

    @property
    def has_updates(self) -> bool:
        """Whether the next step has something to tell."""
        return bool(self._engine.cpu.has_updates)

    @property
    def holdings(self) -> Holdings:
        return self._engine.cpu.ledger.holdings()  # type: ignore[no-any-return]

    def meet(self, ranks: Sequence[Rank]) -> None:
        """All ranks of the engine: whose memory this one reads."""
        if self._peers is not None:  # else it loads nothing
            self._peers.engines = [rank._engine for rank in ranks]

    @property
    def num_read_from_ranks(self) -> int:
        return self._peers.num_mapped if self._peers is not None else 0

    def evict(self) -> None:
        empty(self._engine)

    def check_memory(self) -> None:
        """After the end: every chunk was given back, and none was written since."""
        pool = self._engine.cpu._backend.pool
        if pool.num_free != pool.num_chunks:
            raise SimulationFailure(f"{pool.num_chunks - pool.num_free} chunks of memory leaked")
        pool.check()

    def _forward(self, step: Step) -> None:
        tokens = sum(one.end - one.start for one in step.passes)
        seconds = 0.0002 + tokens * self.token_seconds
        seconds += self._shape.step_seconds if step.passes else 0.0
        # vLLM's kernels read and write somewhere in the middle of the pass.
        self._kernel.sleep(seconds / 2)
        for one in step.passes:  # in order: one may use what another computes
            blocks = step.tables[one.request_id]
            self.memory.check(blocks, 0, one.cells[: one.start], one.request_id)
            self.memory.write(blocks, one.start, one.cells[one.start :])
        self._kernel.sleep(seconds / 2)


# -- configuration -------------------------------------------------------------------------------


_engine_config = lru_cache(maxsize=64)(engine_config)


def config_of(model: Path, shape: Shape, transfer: KVTransferConfig, rank: int = 0) -> VllmConfig:
    """Making one takes a tenth of the time of a world: those of a kind share most of its parts."""
    config = copy.copy(
        _engine_config(
            model / ONE_HEAD if shape.num_heads == 1 else model,
            depth=shape.depth,
            max_batched_tokens=shape.max_batched_tokens,
            world_size=shape.world_size,
            kv_events=shape.kv_events,
        )
    )
    config.cache_config = copy.copy(config.cache_config)
    config.parallel_config = copy.copy(config.parallel_config)
    config.parallel_config.rank = rank
    config.kv_transfer_config = transfer
    return config


def kv_cache_config(shape: Shape) -> KVCacheConfig:
    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE,
        num_kv_heads=shape.heads_per_rank,
        head_size=HEAD_SIZE,
        dtype=torch.bfloat16,
    )
    layers = [f"model.layers.{i}.self_attn.attn" for i in range(NUM_LAYERS)]
    return KVCacheConfig(
        num_blocks=shape.num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(layers, spec)],
    )
