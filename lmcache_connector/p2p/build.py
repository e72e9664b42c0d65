"""Builds the parts of the connector from vLLM's configuration, its own, and the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcache_connector.keys.request_identity import RequestIdentifier
from lmcache_connector.p2p.config import P2PConfig
from lmcache_connector.p2p.control.address import PeerAddress
from lmcache_connector.p2p.control.messages import Card
from lmcache_connector.p2p.control.peers import model_digests
from lmcache_connector.p2p.heartbeat import Heartbeat, Registration
from lmcache_connector.p2p.scheduler.adapter import P2PSchedulerAdapter
from lmcache_connector.p2p.scheduler.routing import Router
from lmcache_connector.p2p.scheduler.settings import P2PSchedulerSettings
from lmcache_connector.vllm_compat.model import ModelDescription, describe_model

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from lmcache_connector.p2p.worker.adapter import P2PWorkerAdapter


@dataclass(frozen=True, slots=True)
class Instance:
    """What hand-overs need to know of one rank of an engine."""

    model: ModelDescription
    address: PeerAddress
    engine_id: str
    kv_role: str
    tp_size: int
    layer_counts: tuple[int, ...]
    is_mla: bool
    max_model_len: int
    produces: bool
    consumes: bool
    first_rank: int


def describe(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: P2PConfig
) -> Instance:
    """Raises ``UnsupportedError`` with one sentence for a model or set-up that is not served."""
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    assert transfer is not None
    model = describe_model(
        vllm_config,
        kv_cache_config,
        chunk_size=None,
        namespace=config.namespace,
        model_digest=config.model_digest,
    )
    first_rank = parallel.data_parallel_rank * model.world_size
    tp_size = parallel.tensor_parallel_size
    return Instance(
        model=model,
        address=PeerAddress(config.host, transfer.kv_port + first_rank),
        first_rank=first_rank,
        engine_id=transfer.engine_id,
        kv_role=transfer.kv_role,
        tp_size=tp_size,
        layer_counts=tuple(rank.num_layers for rank in model.ranks[::tp_size]),
        is_mla=vllm_config.model_config.use_mla,
        max_model_len=vllm_config.model_config.max_model_len,
        produces=transfer.is_kv_producer,
        consumes=transfer.is_kv_consumer,
    )


def make_scheduler(instance: Instance, config: P2PConfig) -> P2PSchedulerAdapter:
    model = instance.model
    settings = P2PSchedulerSettings(
        block_size=model.block_size,
        block_bytes=max(geometry.chunk_bytes for geometry in model.geometries),
        world_size=model.world_size,
        num_writers=sum(bool(rank.write_shards) for rank in model.ranks),
        tp_size=instance.tp_size,
        buffer_bytes=config.kv_buffer_size + config.overflow_bytes,
        buffer_wait_seconds=config.buffer_wait_seconds,
        load_deadline_seconds=config.load_deadline_seconds,
        engine_id=instance.engine_id,
        address=instance.address,
    )
    router = Router(
        own=instance.address,
        produces=instance.produces,
        consumes=instance.consumes,
        pushes=config.send_type != "GET",
        may_talk_to=config.may_talk_to,
    )
    return P2PSchedulerAdapter(
        settings, router, model.root, RequestIdentifier(require_cache_salt=False).identify
    )


def make_worker(
    instance: Instance, config: P2PConfig, kv_caches: dict[str, torch.Tensor]
) -> P2PWorkerAdapter:
    # Imported late: numba and llvmlite must not be imported before vLLM's worker has started.
    from lmcache_connector.p2p.worker.adapter import P2PWorkerAdapter
    from lmcache_connector.p2p.worker.settings import P2PWorkerSettings

    model = instance.model
    own = model.ranks[model.rank]
    card = Card(
        engine_id=instance.engine_id,
        host=instance.address.host,
        port=instance.address.port,
        rank=model.rank,
        model=model_digests(model.root),
        block_size=model.block_size,
        tp_size=instance.tp_size,
        layer_counts=instance.layer_counts,
        num_kv_heads=own.num_shards_total,
        is_mla=instance.is_mla,
        transports={},
    )
    settings = P2PWorkerSettings(
        config=config,
        card=card,
        own=own,
        block_geometry=model.geometries[model.rank],
        layer_widths=model.layer_widths,
        num_kv_heads=model.num_kv_heads,
        max_blocks=-(-instance.max_model_len // model.block_size),
        produces=instance.produces,
        consumes=instance.consumes,
        first_rank=instance.first_rank,
    )
    return P2PWorkerAdapter(settings, kv_caches)


def make_heartbeat(instance: Instance, config: P2PConfig) -> Heartbeat | None:
    """``None`` without a router to register with."""
    if config.router is None or config.http_address is None:
        return None
    registration = Registration(
        instance.kv_role, config.http_address, str(instance.address), instance.engine_id
    )
    return Heartbeat(registration, config.router, config.heartbeat_seconds, config.secret_bytes)
