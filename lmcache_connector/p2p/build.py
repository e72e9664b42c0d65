"""Builds the parts of the connector from vLLM's configuration, its own, and the model."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcache_connector.config.folders import user_cache_folder
from lmcache_connector.keys.kept_digests import KeptDigests
from lmcache_connector.kv_layout.part_layout import PartLayout
from lmcache_connector.kv_parts.part import Rule
from lmcache_connector.p2p.config import P2PConfig
from lmcache_connector.p2p.control.address import PeerAddress
from lmcache_connector.p2p.control.messages import Card
from lmcache_connector.p2p.control.peers import model_digests
from lmcache_connector.peers.heartbeat import Heartbeat, Registration
from lmcache_connector.p2p.scheduler.adapter import P2PSchedulerAdapter
from lmcache_connector.p2p.scheduler.routing import Router
from lmcache_connector.p2p.scheduler.settings import P2PSchedulerSettings
from lmcache_connector.requests.adapters import AdapterReader
from lmcache_connector.requests.identifier import RequestIdentifier
from lmcache_connector.threads import start_thread
from lmcache_connector.tracing.spans import Spans
from lmcache_connector.vllm_compat.loaded_weights import LoadedWeights, worker_on_stack
from lmcache_connector.vllm_compat.machines import engine_header, engine_index, machine_host
from lmcache_connector.vllm_compat.model import ModelDescription, describe_model
from lmcache_connector.vllm_compat.parts import block_size_of
from lmcache_connector.vllm_compat.support import first_spec, unsupported
from lmcache_connector.vllm_compat.weights import WeightFiles, weights_identity
from lmcache_connector.weight_names import WeightNames

if TYPE_CHECKING:
    import torch

    from lmcache_connector.p2p.worker.adapter import P2PWorkerAdapter
    from lmcache_connector.vllm_compat.api.names import KVCacheConfig, KVTransferConfig, VllmConfig


@dataclass(frozen=True, slots=True)
class Instance:
    """What hand-overs need to know of one rank of an engine. ``card`` names no transports yet.
    ``weights`` is what those of the start are loaded from.
    ``max_blocks``, ``first_rank``, ``machine_host``: see :class:`P2PWorkerSettings`.
    ``engine_header``: see :func:`engine_header`."""

    model: ModelDescription
    weights: WeightFiles
    transfer: KVTransferConfig
    card: Card
    max_blocks: int
    first_rank: int
    machine_host: str
    engine_header: int

    @property
    def max_block_bytes(self) -> int:
        """Of one block, on the rank that holds most."""
        return max(geometry.chunk_bytes for geometry in self.part.geometries)

    @property
    def part(self) -> PartLayout:
        """All that is handed over."""
        return self.model.parts[0]

    @property
    def block_size(self) -> int:
        return self.part.part.block_size

    @property
    def address(self) -> PeerAddress:
        """Where its rank 0 takes control messages."""
        return PeerAddress(self.card.host, self.card.port)


def describe(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: P2PConfig
) -> Instance:
    """Raises ``UnsupportedError`` with one sentence for a model or set-up that is not served."""
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    assert transfer is not None
    block_size = block_size_of(kv_cache_config)
    model = describe_model(vllm_config, kv_cache_config, chunk_size=block_size)
    _check_is_handed_over(model, kv_cache_config)
    ranks = model.parts[0].ranks
    weights = weights_identity(vllm_config, config.model_digest, user_cache_folder())
    identity: dict[str, object] = {"namespace": config.namespace, "weights": weights.name}
    first_rank = engine_index(parallel) * model.world_size
    tp_size = parallel.tensor_parallel_size
    address = PeerAddress(config.host, transfer.kv_port + first_rank)
    card = Card(
        engine_id=transfer.engine_id,
        host=address.host,
        port=address.port,
        rank=model.rank,
        model=model_digests(identity | model.configuration),
        block_size=block_size,
        tp_size=tp_size,
        layer_counts=tuple(rank.num_layers for rank in ranks[::tp_size]),
        num_kv_heads=ranks[model.rank].num_shards_total,
        is_mla=vllm_config.model_config.use_mla,
        transports={},
    )
    max_blocks = -(-vllm_config.model_config.max_model_len // block_size)
    return Instance(
        model,
        weights,
        transfer,
        card,
        max_blocks,
        first_rank,
        machine_host(parallel, transfer.engine_id),
        engine_header(parallel, transfer.engine_id),
    )


def _check_is_handed_over(model: ModelDescription, kv_cache_config: KVCacheConfig) -> None:
    """A hand-over is a prefix of one KV cache group, whose size the scheduler's process knows."""
    layout = model.parts[0]
    if len(model.parts) > 1 or layout.part.rule is not Rule.PREFIX or len(layout.part.groups) > 1:
        raise unsupported(
            "hand-overs of models with windows, states or several KV cache groups yet",
            "share KV through Redis with LMCacheTieredConnector, or use vLLM's NixlConnector",
        )
    seen = first_spec(kv_cache_config.kv_cache_groups[0]).state_content_size_bytes
    if max(layout.geometries[model.rank].layer_widths) > seen:
        raise unsupported(
            "hand-overs of models with an index beside their latents yet",
            "share KV through Redis with LMCacheTieredConnector, or use vLLM's NixlConnector",
        )
    if model.drafted_len is not None:
        raise unsupported(
            "hand-overs of models whose drafter has KV of its own yet",
            "draft with ngram or suffix, or share KV through Redis with LMCacheTieredConnector",
        )


def make_scheduler(instance: Instance, config: P2PConfig, spans: Spans) -> P2PSchedulerAdapter:
    model = instance.model
    settings = P2PSchedulerSettings(
        block_size=instance.block_size,
        block_bytes=instance.max_block_bytes,
        world_size=model.world_size,
        num_writers=sum(bool(rank.write_shards) for rank in instance.part.ranks),
        tp_size=instance.card.tp_size,
        buffer_bytes=config.kv_buffer_size + config.overflow_bytes,
        largest_buffer_bytes=config.largest_buffer_bytes,
        buffer_wait_seconds=config.buffer_wait_seconds,
        load_deadline_seconds=config.load_deadline_seconds,
        engine_id=instance.card.engine_id,
        address=instance.address,
    )
    router = Router(
        own=instance.address,
        produces=instance.transfer.is_kv_producer,
        consumes=instance.transfer.is_kv_consumer,
        pushes=config.send_type != "GET",
        may_talk_to=config.may_talk_to,
    )
    kept = KeptDigests(user_cache_folder())
    return P2PSchedulerAdapter(
        settings,
        router,
        # The ranks compare their configurations when they meet.
        {"namespace": config.namespace, "files": instance.weights.name},
        WeightNames(
            model.world_size,
            instance.weights,
            kept.load(),
            lambda found: start_thread("lmc-keep-digests", kept.add, found),
            lambda: "",
            time.monotonic,
        ),
        model.configuration,
        RequestIdentifier(require_cache_salt=False, adapters=AdapterReader()),
        spans=spans,
    )


def make_worker(
    instance: Instance, config: P2PConfig, kv_caches: dict[str, torch.Tensor]
) -> P2PWorkerAdapter:
    # Imported late: numba and llvmlite must not be imported before vLLM's worker has started.
    from lmcache_connector.p2p.worker.adapter import P2PWorkerAdapter
    from lmcache_connector.p2p.worker.settings import P2PWorkerSettings

    model, part = instance.model, instance.part
    geometry = part.geometries[model.rank]
    settings = P2PWorkerSettings(
        config=config,
        card=instance.card,
        own=part.ranks[model.rank],
        block_geometry=geometry,
        layer_widths=dict(zip(part.groups[0].names, geometry.layer_widths, strict=True)),
        num_kv_heads=part.num_kv_heads,
        max_block_bytes=instance.max_block_bytes,
        max_blocks=instance.max_blocks,
        produces=instance.transfer.is_kv_producer,
        consumes=instance.transfer.is_kv_consumer,
        first_rank=instance.first_rank,
        machine_host=instance.machine_host,
    )
    weights = LoadedWeights(worker_on_stack())
    return P2PWorkerAdapter(settings, kv_caches, weights=weights)


def make_heartbeat(instance: Instance, config: P2PConfig) -> Heartbeat | None:
    """``None`` without a router to register with."""
    if config.router is None or config.http_address is None:
        return None
    registration = Registration(
        instance.transfer.kv_role,
        config.http_address,
        str(instance.address),
        instance.card.engine_id,
        instance.engine_header,
    )
    return Heartbeat(registration, config.router, config.heartbeat_seconds, config.secret_bytes)
