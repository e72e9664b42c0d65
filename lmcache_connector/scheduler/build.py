"""Builds the scheduler side from the configuration and the model."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lmcache_connector.audit.verdicts import AuditSampler, NoiseGauge, RootEpochs
from lmcache_connector.config import limits
from lmcache_connector.config.limits import user_cache_folder
from lmcache_connector.config.strict import read_weights_label
from lmcache_connector.config.tiered import ConnectorConfig
from lmcache_connector.cost_model.cost_model import CostModel
from lmcache_connector.cost_model.policy import LoadPolicy
from lmcache_connector.keys.kept_digests import KeptDigests
from lmcache_connector.keys.prefix_hash import PrefixHasher
from lmcache_connector.kv_events.log import KvEventLog, KvEventSink
from lmcache_connector.kv_parts.part import Rule
from lmcache_connector.lookup.background_lookup import BackgroundLookup
from lmcache_connector.lookup.chunk_index import ChunkIndex, WantedChunks
from lmcache_connector.lookup.hit_finder import HitFinder, RedisHitFinder
from lmcache_connector.metrics.samples import Tally
from lmcache_connector.peers.routing import Router
from lmcache_connector.plans import RankStart, Tier
from lmcache_connector.requests.adapters import AdapterReader
from lmcache_connector.requests.identifier import RequestIdentifier
from lmcache_connector.requests.loaded_adapters import LoadedAdapters
from lmcache_connector.scheduler.adapter import SchedulerAdapter
from lmcache_connector.scheduler.auditor import Auditor
from lmcache_connector.scheduler.engine_start import EngineStart
from lmcache_connector.scheduler.metrics import SchedulerMetrics
from lmcache_connector.scheduler.request_book import RequestBook
from lmcache_connector.scheduler.request_state import SchedulerSettings
from lmcache_connector.scheduler.transfers import Transfers, TransferSettings
from lmcache_connector.threads import start_thread
from lmcache_connector.tracing.spans import Spans
from lmcache_connector.weight_names import WeightFiles, WeightNames

if TYPE_CHECKING:
    from lmcache_connector.lookup.any_lookup import AnyLookup
    from lmcache_connector.vllm_compat.model import ModelDescription


def build_scheduler(
    config: ConnectorConfig,
    model: ModelDescription,
    weights: WeightFiles,
    *,
    loads: bool,
    stores: bool,
    kv_events: bool,
    weak_block_hashes: bool,
    num_batches: int,
    max_step_tokens: int,
    find_adapter: Callable[[str], Path | None] = Path,
    spans: Spans | None = None,
    engine_id: str = "",
    sends: bool = False,
    receives: bool = False,
    first_rank: int = 0,
    tp_size: int = 1,
) -> SchedulerAdapter:
    """The scheduler side of an engine. ``weights`` is what they are loaded
    from. ``loads`` and ``stores``: what
    ``kv_role`` allows. ``weak_block_hashes``: vLLM's own are not cryptographic. ``find_adapter``
    turns a LoRA adapter's path into the folder vLLM reads. ``num_batches`` steps are under way at
    once, of ``max_step_tokens`` at most. ``engine_id``: vLLM's name of this engine. ``sends``,
    ``receives``: its part in KV transfers; ``first_rank`` is its first among those of all
    data-parallel engines."""
    settings = _settings(config, model, loads, stores, weak_block_hashes, num_batches)
    tally, index = Tally(), ChunkIndex(model.world_size)
    policy = _make_policy(config, model, num_batches, max_step_tokens)
    events = KvEventSink()
    if kv_events:
        lifetime, renews = config.redis_ttl_seconds, config.redis_ttl_refresh
        events = KvEventLog(model.world_size, lifetime, refresh_ttl=renews)
    hits, metrics, tiers = _make_hits(
        config, model, settings, index, policy, events, tally, engine_id
    )
    loaded = LoadedAdapters(model.world_size)
    noise = NoiseGauge(model.parts[0].formats)
    learn = partial(_learn_layers, model, policy, tiers, noise)
    wanted = None
    if stores and config.redis_tier_config() is not None:
        wanted = WantedChunks(index, time.monotonic, config.redis_ttl_seconds)
    transfers = _make_transfers(
        config, model, tally, engine_id, sends, receives, first_rank, tp_size
    )
    return SchedulerAdapter(
        settings,
        _make_book(
            config,
            model,
            settings,
            weights,
            learn,
            AdapterReader(find_adapter, loaded),
            tally,
            transfers,
        ),
        index=index,
        hits=hits,
        policy=policy,
        kv_events=events,
        tally=tally,
        metrics=metrics,
        auditor=_make_auditor(config, model, settings, index, noise, tally),
        loaded_adapters=loaded,
        wanted=wanted,
        transfers=transfers,
        spans=spans,
    )


def _make_transfers(
    config: ConnectorConfig,
    model: ModelDescription,
    tally: Tally,
    engine_id: str,
    sends: bool,
    receives: bool,
    first_rank: int,
    tp_size: int,
) -> Transfers:
    address = config.told_address(first_rank)
    tier_config = config.peer_tier_config()
    receives = receives and bool(config.peer_hosts) and tier_config is not None
    watch = None
    if receives and tier_config is not None:
        from lmcache_connector.peers.watch import TransferWatch

        watch = TransferWatch(tier_config, engine_id)
    return Transfers(
        TransferSettings(
            Router(address, sends and address is not None, receives, config.peer_hosts),
            address,
            engine_id,
            tp_size,
            len(model.parts),
            config.chunk_size,
            config.transfer_deadline_seconds,
            config.trusts,
        ),
        tally,
        watch,
    )


def _make_hits(
    config: ConnectorConfig,
    model: ModelDescription,
    settings: SchedulerSettings,
    index: ChunkIndex,
    policy: LoadPolicy,
    events: KvEventSink,
    tally: Tally,
    engine_id: str,
) -> tuple[HitFinder, SchedulerMetrics, AnyLookup | None]:
    """And the metrics, which tell of the tiers that are asked, and what asks them."""
    clock = time.monotonic
    tiers = _make_lookup(config, model, engine_id)
    if tiers is None:
        finder = HitFinder(settings.parts, settings.chunk_size, index, tally)
        return finder, SchedulerMetrics(tally, clock), None
    lookup = BackgroundLookup(tiers, limits.LOOKUP_DEADLINE_SECONDS, clock)
    hits = RedisHitFinder(
        settings.parts,
        settings.chunk_size,
        index,
        tally,
        lookup,
        policy,
        events,
        clock,
    )
    return hits, SchedulerMetrics(tally, clock, lookup.take_seconds, tiers.servers), tiers


def _make_lookup(
    config: ConnectorConfig, model: ModelDescription, engine_id: str
) -> AnyLookup | None:
    """What asks Redis, or peers, or both; ``None``: there are neither."""
    tiers = config.remote_tiers
    if not tiers:
        return None
    from lmcache_connector.lookup.any_lookup import AnyLookup
    from lmcache_connector.storage.geometry import PartGeometries
    from lmcache_connector.storage.redis.lookup import RedisLookup

    ranks = zip(*(part.geometries for part in model.parts), strict=True)
    geometries = [PartGeometries(parts) for parts in ranks]
    lookups: dict[Tier, RedisLookup] = {}
    if Tier.PEER in tiers and (peer_config := config.peer_tier_config()) is not None:
        from lmcache_connector.peers.commands import Greeting
        from lmcache_connector.peers.lookup import PeerLookup
        from lmcache_connector.peers.topology import PeerTopology

        greeting, addresses = Greeting(model.world_size, engine_id), config.peer_addresses
        topology = PeerTopology(peer_config, addresses, greeting, 0, time.monotonic)
        lookups[Tier.PEER] = PeerLookup(peer_config, geometries, topology, time.monotonic)
    if (redis_config := config.redis_tier_config()) is not None:
        lookups[Tier.REDIS] = RedisLookup(redis_config, geometries)
    return AnyLookup(lookups, time.monotonic)


def _make_book(
    config: ConnectorConfig,
    model: ModelDescription,
    settings: SchedulerSettings,
    weights: WeightFiles,
    learn: Callable[[Sequence[RankStart]], None],
    adapters: AdapterReader,
    tally: Tally,
    transfers: Transfers,
) -> RequestBook:
    make_hasher = partial(_make_hasher, config, model.lookahead)
    kept = KeptDigests(user_cache_folder())
    return RequestBook(
        settings,
        EngineStart(model.world_size, make_hasher, time.monotonic, learn),
        WeightNames(
            model.world_size,
            weights,
            kept.load(),
            lambda found: start_thread("lmc-keep-digests", kept.add, found),
            partial(read_weights_label, config.weights_label),
            time.monotonic,
        ),
        RequestIdentifier(
            config.require_cache_salt,
            adapters,
            config.chunk_size,
            lambda reason: tally.count("bypassed_requests", reason.value),
        ),
        RootEpochs(lambda: uuid.uuid4().hex),
        tally,
        transfers.part_of,
    )


def _learn_layers(
    model: ModelDescription,
    policy: LoadPolicy,
    tiers: AnyLookup | None,
    noise: NoiseGauge,
    starts: Sequence[RankStart],
) -> None:
    """What all ranks say of their layers: this process sees one of a KV cache group."""
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
    if tiers is not None:
        tiers.learn_geometries([PartGeometries(parts) for parts in found])
    noise.learn_formats([name for start in starts for name in start.formats])


def _make_auditor(
    config: ConnectorConfig,
    model: ModelDescription,
    settings: SchedulerSettings,
    index: ChunkIndex,
    noise: NoiseGauge,
    tally: Tally,
) -> Auditor:
    sampler = AuditSampler(config.audit_share, random.Random().random)
    return Auditor(settings, index, sampler, noise, tally, model=model.name)


def _make_hasher(
    config: ConnectorConfig, lookahead: int, configuration: Mapping[str, str]
) -> PrefixHasher:
    root = {"namespace": config.namespace, "configuration": configuration}
    return PrefixHasher(root, config.chunk_size, config.hash_key_bytes, lookahead=lookahead)


def _settings(
    config: ConnectorConfig,
    model: ModelDescription,
    loads: bool,
    stores: bool,
    weak_block_hashes: bool,
    num_batches: int,
) -> SchedulerSettings:
    return SchedulerSettings(
        chunk_size=config.chunk_size,
        parts=tuple(part.part for part in model.parts),
        world_size=model.world_size,
        loads=loads,
        stores=stores,
        store_generated=config.store_generated,
        window_interval=config.window_interval,
        redis_admission=config.redis_admission,
        weak_block_hashes=weak_block_hashes,
        load_deadline_seconds=config.load_deadline_seconds,
        step_wait_seconds=limits.LOOKUP_WAIT_SECONDS,
        prefetch_bytes=config.prefetch_bytes,
        has_rings=model.has_rings,
        lookahead=model.lookahead,
        drafted_len=model.drafted_len,
        num_batches=num_batches,
    )


def _make_policy(
    config: ConnectorConfig, model: ModelDescription, num_batches: int, max_step_tokens: int
) -> LoadPolicy:
    cost_model = CostModel(
        clock=time.monotonic,
        max_deadline_seconds=config.load_deadline_seconds,
        mode=config.compute_or_load,
        num_batches=num_batches,
        max_step_tokens=max_step_tokens,
    )
    return LoadPolicy(
        cost_model,
        chunk_tokens=config.chunk_size,
        value_bytes=[max(rank.chunk_bytes for rank in part.geometries) for part in model.parts],
        clock=time.monotonic,
        num_stages=len({rank.layer_start for rank in model.parts[0].ranks}),
        num_prefix_parts=sum(part.part.rule is Rule.PREFIX for part in model.parts),
        remote_tiers=config.remote_tiers,
    )
