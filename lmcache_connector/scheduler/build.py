"""Builds the scheduler side from the configuration, the model, and vLLM's own settings."""

from __future__ import annotations

import logging
import random
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from lmcache_connector.audit.verdicts import AuditSampler, NoiseGauge, RootEpochs
from lmcache_connector.config import limits
from lmcache_connector.config.strict import read_weights_label
from lmcache_connector.config.tiered import ConnectorConfig
from lmcache_connector.cost_model.cost_model import CostModel
from lmcache_connector.cost_model.policy import LoadPolicy
from lmcache_connector.keys.kept_digests import KeptDigests
from lmcache_connector.keys.prefix_hash import PrefixHasher
from lmcache_connector.kv_events.log import KvEventLog
from lmcache_connector.kv_parts.owners import Share
from lmcache_connector.kv_parts.part import Rule
from lmcache_connector.lookup.background_lookup import BackgroundLookup
from lmcache_connector.lookup.chunk_index import ChunkIndex
from lmcache_connector.lookup.hit_finder import HitFinder
from lmcache_connector.metrics.samples import Tally
from lmcache_connector.peers.routing import Router
from lmcache_connector.plans import RankStart, Tier
from lmcache_connector.requests.adapters import Adapters
from lmcache_connector.requests.identifier import RequestIdentifier
from lmcache_connector.scheduler.auditor import Auditor
from lmcache_connector.scheduler.engine_start import EngineStart
from lmcache_connector.scheduler.request_book import RequestBook
from lmcache_connector.scheduler.request_state import SchedulerSettings
from lmcache_connector.scheduler.scheduler import Scheduler
from lmcache_connector.scheduler.transfers import RequestTransfers
from lmcache_connector.threads import start_thread
from lmcache_connector.tracing.spans import make_spans
from lmcache_connector.vllm_compat.lora_loads import adapter_folder, adapters_leak
from lmcache_connector.vllm_compat.machines import engine_index
from lmcache_connector.vllm_compat.model import ModelDescription, describe_model
from lmcache_connector.vllm_compat.weights import weights_identity
from lmcache_connector.weight_names import WeightNames

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from lmcache_connector.lookup.any_lookup import AnyLookup
    from lmcache_connector.storage.redis.lookup import RedisLookup
    from lmcache_connector.vllm_compat.api.names import KVCacheConfig, VllmConfig


def build_scheduler(
    config: ConnectorConfig,
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    *,
    kv_events: bool,
    does_both: bool,
) -> Scheduler:
    """Build the scheduler side, and start its lookup thread if there are remote tiers.
    ``does_both``: load and store, whatever the role."""
    parallel = vllm_config.parallel_config
    model = describe_model(vllm_config, kv_cache_config, chunk_size=config.wanted_chunk_size)
    config = config.fitted(model.chunk_size, parallel.local_world_size)
    settings = _settings(config, model, vllm_config, does_both=does_both)
    tally, index, clock = Tally(), ChunkIndex(model.world_size), time.monotonic
    policy = _policy(config, model, vllm_config)
    noise = NoiseGauge(model.parts[0].formats)
    transfers = _transfers(config, model, vllm_config, tally)
    lifetime, renews = config.redis_ttl_seconds, config.redis_ttl_refresh
    events = KvEventLog(model.world_size, lifetime, refresh_ttl=renews, is_wanted=kv_events)
    asked, lookup = _lookup(config, model, vllm_config), None
    make_hasher = partial(make_root_hasher, config, model.lookahead)
    learn = partial(learn_start, model, policy, asked, noise, index, events)
    identifier = RequestIdentifier(
        config.require_cache_salt,
        Adapters(model.world_size, adapter_folder),
        config.chunk_size,
        lambda reason: tally.count("bypassed_requests", reason.value),
    )
    book = RequestBook(
        settings,
        EngineStart(model.world_size, make_hasher, clock, learn),
        _weights(config, model, vllm_config),
        identifier,
        RootEpochs(lambda: uuid.uuid4().hex),
        tally,
        transfers.part_of,
    )
    sampler = AuditSampler(config.audit_share, random.Random().random)
    spans = make_spans(vllm_config)
    if asked is not None:  # last, because its thread would outlive a failed start
        lookup = BackgroundLookup(asked, limits.LOOKUP_DEADLINE_SECONDS, clock)
    return Scheduler(
        settings,
        book,
        index,
        HitFinder(settings.parts, settings.chunk_size, index, tally, policy, events, lookup),
        policy,
        events,
        tally,
        Auditor(settings, index, sampler, noise, tally, model=model.name),
        transfers,
        spans,
    )


def _settings(
    config: ConnectorConfig, model: ModelDescription, vllm_config: VllmConfig, *, does_both: bool
) -> SchedulerSettings:
    transfer, hashing = vllm_config.kv_transfer_config, vllm_config.cache_config
    assert transfer is not None
    num_engines = vllm_config.parallel_config.data_parallel_size
    return SchedulerSettings(
        chunk_size=config.chunk_size,
        parts=tuple(part.part for part in model.parts),
        world_size=model.world_size,
        loads=transfer.is_kv_consumer or does_both,
        stores=transfer.is_kv_producer or does_both,
        store_generated=config.store_generated,
        window_interval=config.window_interval,
        redis_admission=config.redis_admission,
        # vLLM's prefix cache may then hold two blocks of different tokens under one hash.
        weak_block_hashes=not hashing.prefix_caching_hash_algo.startswith("sha256"),
        load_deadline_seconds=config.load_deadline_seconds,
        step_wait_seconds=limits.LOOKUP_WAIT_SECONDS,
        others_wait=num_engines > 1 and vllm_config.model_config.is_moe,
        has_rings=model.has_rings,
        lookahead=model.lookahead,
        drafted_len=model.drafted_len,
        adapters_leak=adapters_leak(vllm_config.lora_config),
        is_mm_prefix_lm=vllm_config.model_config.is_mm_prefix_lm,
        num_batches=vllm_config.max_concurrent_batches,
    )


def _weights(
    config: ConnectorConfig, model: ModelDescription, vllm_config: VllmConfig
) -> WeightNames:
    kept = KeptDigests(limits.user_cache_folder())
    return WeightNames(
        model.world_size,
        weights_identity(vllm_config, config.model_digest, limits.user_cache_folder()),
        kept.load(),
        lambda found: start_thread("lmc-keep-digests", kept.add, found),
        partial(read_weights_label, config.weights_label),
        time.monotonic,
    )


def _policy(
    config: ConnectorConfig, model: ModelDescription, vllm_config: VllmConfig
) -> LoadPolicy:
    parts = model.parts
    cost_model = CostModel(
        clock=time.monotonic,
        max_deadline_seconds=config.load_deadline_seconds,
        mode=config.compute_or_load,
        num_batches=vllm_config.max_concurrent_batches,
        max_step_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
    )
    return LoadPolicy(
        cost_model,
        chunk_tokens=config.chunk_size,
        value_bytes=[max(rank.chunk_bytes for rank in part.geometries) for part in parts],
        clock=time.monotonic,
        num_stages=len({rank.layer_start for rank in parts[0].geometries}),
        num_prefix_parts=sum(part.part.rule is Rule.PREFIX for part in parts),
        remote_tiers=config.remote_tiers,
    )


def _transfers(
    config: ConnectorConfig, model: ModelDescription, vllm_config: VllmConfig, tally: Tally
) -> RequestTransfers:
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    assert transfer is not None
    address = config.advertised_address(engine_index(parallel) * model.world_size)
    tier_config, watch = config.peer_tier_config(), None
    receives, sends = transfer.is_kv_consumer and bool(config.peer_hosts), transfer.is_kv_producer
    if receives and tier_config is not None:
        from lmcache_connector.peers.watch import TransferWatch

        watch = TransferWatch(tier_config, str(transfer.engine_id))
    router = Router(address, sends and address is not None, receives, config.peer_hosts)
    told = str(transfer.engine_id), parallel.tensor_parallel_size
    return RequestTransfers(config, router, *told, len(model.parts), tally, watch)


def _lookup(
    config: ConnectorConfig, model: ModelDescription, vllm_config: VllmConfig
) -> AnyLookup | None:
    """The lookup in Redis and peers; ``None`` without either."""
    if not (tiers := config.remote_tiers):
        return None
    from lmcache_connector.lookup.any_lookup import AnyLookup
    from lmcache_connector.storage.redis.lookup import RedisLookup

    lookups: dict[Tier, RedisLookup] = {}
    if Tier.PEER in tiers and (peer_config := config.peer_tier_config()) is not None:
        from lmcache_connector.peers.commands import Greeting
        from lmcache_connector.peers.host import open_folder
        from lmcache_connector.peers.lookup import PeerLookup
        from lmcache_connector.peers.topology import PeerTopology

        assert vllm_config.kv_transfer_config is not None
        engine_id, addresses = str(vllm_config.kv_transfer_config.engine_id), config.peer_addresses
        greeting = Greeting(model.world_size, engine_id)
        host = open_folder(config.host_folder) if config.host_sharing else None
        share = Share(0, model.owners)
        topology = PeerTopology(peer_config, addresses, greeting, share, time.monotonic, host)
        lookups[Tier.PEER] = PeerLookup(peer_config, model.geometries, topology, time.monotonic)
    if (redis_config := config.redis_tier_config()) is not None:
        lookups[Tier.REDIS] = RedisLookup(redis_config, model.geometries)
    return AnyLookup(lookups, time.monotonic)


def learn_start(
    model: ModelDescription,
    policy: LoadPolicy,
    asked: AnyLookup | None,
    noise: NoiseGauge,
    index: ChunkIndex,
    events: KvEventLog,
    starts: Sequence[RankStart],
) -> None:
    """Apply what all ranks report: the sizes and formats of their layers (this process sees one
    layer per KV cache group), and which ranks store what."""
    if any(start.reads for start in starts):
        events.needed = model.owners.needed([start.reads for start in starts])
        index.share(events.needed, model.owners.numbers)
    others = [Share(rank, model.owners).others for rank in range(model.world_size)]
    if any(ranks - start.reads for ranks, start in zip(others, starts, strict=True)):
        logger.info(
            "lmcache-connector: ranks that cannot read each other's memory store their own copies "
            "of KV that they have in common"
        )
    from lmcache_connector.storage.geometry import PartGeometries

    found = [
        tuple(
            replace(part.geometries[rank], layer_widths=each)
            for part, each in zip(model.parts, start.layer_widths, strict=True)
        )
        for rank, start in enumerate(starts)
    ]
    by_part = zip(*found, strict=True)
    policy.learn_sizes([max(rank.chunk_bytes for rank in ranks) for ranks in by_part])
    if asked is not None:
        asked.learn_geometries([PartGeometries(parts) for parts in found])
    noise.learn_formats([name for start in starts for name in start.formats])


def make_root_hasher(
    config: ConnectorConfig, lookahead: int, configuration: Mapping[str, str]
) -> PrefixHasher:
    """A hasher for chunk keys of a model whose ranks report this ``configuration``."""
    root = {"namespace": config.namespace, "configuration": configuration}
    return PrefixHasher(root, config.chunk_size, config.hash_key_bytes, lookahead=lookahead)
