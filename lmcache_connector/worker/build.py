"""Builds the worker side of one rank from the configuration, the model and vLLM's settings."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import chain
from typing import TYPE_CHECKING

from lmcache_connector.config.tiered import ConnectorConfig
from lmcache_connector.config.warnings import (
    available_memory,
    settings_warnings,
    size_warnings,
)
from lmcache_connector.errors import ConfigError
from lmcache_connector.kv_parts.owners import Share
from lmcache_connector.kv_parts.part import Rule, part_key
from lmcache_connector.net.address import Address
from lmcache_connector.peers.commands import Chunks, Commands, Greeting
from lmcache_connector.peers.host import (
    HostFolder,
    HostFolderError,
    HostSocket,
    SocketName,
    digest,
    open_folder,
)
from lmcache_connector.peers.server import Limits, PeerServer, listen
from lmcache_connector.peers.transfers import Transfers
from lmcache_connector.storage.chunk_codec import HEADER_BYTES, Sealer
from lmcache_connector.storage.geometry import PartGeometries
from lmcache_connector.storage.redis.config import MIB, RedisTierConfig
from lmcache_connector.vllm_compat.api.names import may_sleep_unseen
from lmcache_connector.vllm_compat.identity import fingerprint
from lmcache_connector.vllm_compat.loaded_weights import LoadedWeights, worker_on_stack
from lmcache_connector.vllm_compat.lora_loads import LoraLoads
from lmcache_connector.vllm_compat.machines import engine_index
from lmcache_connector.vllm_compat.model import ModelDescription, describe_model
from lmcache_connector.worker.adapter import WorkerAdapter
from lmcache_connector.worker.lmcache_start import RankSettings
from lmcache_connector.worker.redis_probe import probe_keys
from lmcache_connector.worker.self_test import SelfTestResult

if TYPE_CHECKING:
    import torch

    from lmcache_connector.peers.tier import PeerTier
    from lmcache_connector.storage.redis.tier import RedisTier
    from lmcache_connector.vllm_compat.api.names import KVCacheConfig, VllmConfig

logger = logging.getLogger(__name__)

_LEASED_SHARE = 1 / 8
"""Share of the CPU tier that answers to slow peers may protect from eviction."""
_IN_ORDER = ("uni", "mp", "external_launcher")
"""Executors that call every rank in step order."""


def build_worker(
    config: ConnectorConfig,
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    kv_caches: dict[str, torch.Tensor],
    *,
    kv_events: bool,
    does_both: bool,
) -> WorkerAdapter:
    """Allocate the CPU tier, connect to Redis and run the self-test; rank 0 logs the result.

    ``kv_caches``: vLLM's registered tensors by layer name. ``kv_events``: report chunks written to
    Redis. ``does_both``: load and store, whatever the role. Raises ``UnsupportedError``,
    ``ConfigError``, ``LayoutError`` or ``SelfTestError``.
    """
    model = describe_model(vllm_config, kv_cache_config, chunk_size=config.wanted_chunk_size)
    ranks_on_host = vllm_config.parallel_config.local_world_size
    config = config.fitted(model.chunk_size, ranks_on_host)
    transfer = vllm_config.kv_transfer_config
    loads = transfer.is_kv_consumer or does_both
    root = {"namespace": config.namespace, **model.configuration}
    probed = probe_keys(config, root) if loads else ()
    settings = RankSettings(
        config,
        model.rank,
        model.world_size,
        model.owners,
        announces=loads and loads_in_step(config, vllm_config),
        report_writes=kv_events,
        probe_keys=[part_key(key, 0, len(model.parts)) for key in probed],
        parts=model.parts,
        configuration=tuple(sorted(model.configuration.items())),
        blocks_are_zeroed=kv_cache_config.needs_kv_cache_zeroing,
        finishes_stores=may_sleep_unseen(vllm_config),
        loads=loads,
    )
    if model.rank == 0:
        _log_warnings(config, vllm_config, model)
    make_peer_server = _peer_server_maker(config, model, vllm_config)
    with ExitStack() as if_it_fails:
        weights = LoadedWeights(worker_on_stack())
        if_it_fails.callback(weights.close)
        peers = _peer_tier(config, model, str(transfer.engine_id)) if loads else None
        if peers is not None:
            if_it_fails.callback(peers.close, 0.0)
        if (redis := _redis_tier(config, model)) is not None:
            if_it_fails.callback(redis.close, 0.0)
        lora_loads = LoraLoads(vllm_config.lora_config)
        worker = WorkerAdapter(
            settings,
            kv_caches,
            redis,
            weights,
            lora_loads=lora_loads,
            peers=peers,
            make_peer_server=make_peer_server,
        )
        if_it_fails.pop_all()
    if model.rank == 0:
        logger.info(
            banner(
                config,
                fingerprint(model.configuration),
                model.geometries[model.rank],
                worker.self_test,
                worker.redis_is_away,
            )
        )
    return worker


def banner(
    config: ConnectorConfig,
    model: str,
    geometries: PartGeometries,
    self_test: SelfTestResult | None,
    redis_is_away: bool = False,
) -> str:
    """One line with the tiers, sizes, identity and self-test speeds; no secrets."""
    redis = config.redis_tier_config()
    away = " (not reachable yet)" if redis_is_away else ""
    sizes = " + ".join(f"{part.chunk_bytes / MIB:.2f}" for part in geometries.parts)
    share = f" ({config.rank_gib:g} per rank)" if config.rank_gib < config.cpu_gib else ""
    parts = [
        f"CPU tier {config.cpu_gib:g} GiB{share}",
        f"Redis {redis.address}{away}" if redis else "no Redis (redis_url is not set)",
        f"namespace {config.namespace}",
        f"model {model[:12]}",
        f"chunks of {config.chunk_size} tokens, {sizes} MiB per rank",
        f"compute_or_load {config.compute_or_load}",
    ]
    if self_test is not None:
        gigabytes = self_test.num_bytes / 1e9
        store = gigabytes / max(1e-9, self_test.store_seconds)  # the clock may be a coarse one
        load = gigabytes / max(1e-9, self_test.load_seconds)
        parts.append(f"self-test passed (store {store:.1f} GB/s, load {load:.1f} GB/s)")
    return "LMCacheTieredConnector: " + ", ".join(parts)


def loads_in_step(config: ConnectorConfig, vllm_config: VllmConfig) -> bool:
    executor = vllm_config.parallel_config.distributed_executor_backend
    return config.loads_in_step and executor in _IN_ORDER


def _redis_tier(config: ConnectorConfig, model: ModelDescription) -> RedisTier | None:
    tier_config = config.redis_tier_config()
    if tier_config is None:
        return None
    # Imported here, because only a Redis tier needs the client library.
    from lmcache_connector.storage.redis.tier import RedisTier

    is_writer = Share(model.rank, model.owners).is_owner
    return RedisTier(tier_config, model.geometries[model.rank], is_writer)


def _peer_tier(config: ConnectorConfig, model: ModelDescription, engine_id: str) -> PeerTier | None:
    if (tier_config := config.peer_tier_config()) is None:
        return None
    from lmcache_connector.peers.tier import PeerTier
    from lmcache_connector.peers.topology import PeerTopology

    greeting = Greeting(model.world_size, engine_id)
    host = open_host_folder(config)
    share = Share(model.rank, model.owners)
    topology = PeerTopology(
        tier_config, config.peer_addresses, greeting, share, time.monotonic, host
    )
    return PeerTier(tier_config, model.geometries[model.rank], topology)


def _peer_server_maker(
    config: ConnectorConfig, model: ModelDescription, vllm_config: VllmConfig
) -> Callable[[Chunks, Transfers], PeerServer] | None:
    host = open_host_folder(config)
    if config.peer_listen is None and host is None:
        return None
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    engine_id = str(transfer.engine_id)
    first_rank = engine_index(vllm_config.parallel_config) * model.world_size
    leased_bytes = int(config.rank_gib * 2**30 * _LEASED_SHARE)

    def start(chunks: Chunks, transfers: Transfers) -> PeerServer:
        commands = Commands(
            chunks,
            model.geometries[model.rank],
            namespace=config.namespace,
            sealer=Sealer(config.hash_key_bytes),
            greeting=Greeting(model.world_size, engine_id),
            max_payload_bytes=RedisTierConfig.max_value_bytes - HEADER_BYTES,
            transfers=transfers,
        )
        listeners, host_socket = [], None
        if config.peer_listen is not None:
            address = Address.parse(config.peer_listen)
            host_name, port = address.host, address.port + first_rank + model.rank
            try:
                listeners.append(listen(host_name, port))
            except (OSError, OverflowError) as error:
                reason = getattr(error, "strerror", None) or error
                raise ConfigError(
                    f"'peer_listen': cannot listen on {host_name}, port {port}: {reason}"
                ) from error
        if host is not None:
            names = digest(config.namespace), digest(engine_id)
            name = SocketName(*names, model.rank, model.world_size)
            try:
                host_socket = HostSocket(host, name)
            except HostFolderError as error:
                logger.warning("Other engines of this host cannot load from this one: %s", error)
        limits = Limits(leased_bytes=leased_bytes)
        server = PeerServer(listeners, commands, limits, host_socket=host_socket)
        transfers.on_change, transfers.seal = server.recheck_held_commands, commands.seal
        return server

    return start


def open_host_folder(config: ConnectorConfig) -> HostFolder | None:
    """The folder in which engines of this host find each other; ``None`` without sharing. Raises
    :class:`ConfigError`."""
    if not config.host_sharing:
        return None
    try:
        return open_folder(config.host_folder)
    except HostFolderError as error:
        raise ConfigError(f"'host_folder': {error}") from error


def _log_warnings(
    config: ConnectorConfig, vllm_config: VllmConfig, model: ModelDescription
) -> None:
    """Called once per engine, before the CPU tier takes its memory."""
    assert vllm_config.kv_transfer_config is not None
    sizes = size_warnings(
        config,
        max_model_len=vllm_config.model_config.max_model_len,
        # Windows and states need the last few chunks of a prompt only.
        chunk_bytes=sum(
            part.geometries[model.rank].chunk_bytes
            for part in model.parts
            if part.part.rule is Rule.PREFIX
        ),
        available_bytes=available_memory(),
        narrowest_window=min(
            (part.part.span for part in model.parts if part.part.rule is Rule.WINDOW), default=None
        ),
    )
    for warning in chain(settings_warnings(config, vllm_config.kv_transfer_config.kv_role), sizes):
        logger.warning("LMCacheTieredConnector: %s", warning)
