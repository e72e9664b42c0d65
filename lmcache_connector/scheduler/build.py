"""Builds the scheduler side from the configuration, the model, and vLLM's own settings."""

from __future__ import annotations

import logging
import random
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
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
from lmcache_connector.lookup.chunk_index import ChunkIndex, WantedChunks
from lmcache_connector.lookup.hit_finder import HitFinder
from lmcache_connector.metrics.samples import Tally
from lmcache_connector.peers.routing import Router
from lmcache_connector.plans import RankStart, Tier
from lmcache_connector.requests.adapters import AdapterReader, LoadedAdapters
from lmcache_connector.requests.identifier import RequestIdentifier
from lmcache_connector.scheduler.auditor import Auditor
from lmcache_connector.scheduler.engine_start import EngineStart
from lmcache_connector.scheduler.metrics import SchedulerMetrics
from lmcache_connector.scheduler.request_book import RequestBook
from lmcache_connector.scheduler.request_state import SchedulerSettings
from lmcache_connector.scheduler.scheduler import Scheduler
from lmcache_connector.scheduler.transfers import Transfers, TransferSettings
from lmcache_connector.threads import start_thread
from lmcache_connector.tracing.spans import Spans
from lmcache_connector.weight_names import WeightFiles, WeightNames

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from lmcache_connector.lookup.any_lookup import AnyLookup
    from lmcache_connector.storage.redis.lookup import RedisLookup
    from lmcache_connector.vllm_compat.model import ModelDescription


@dataclass(frozen=True, kw_only=True)
class SchedulerBuild:
    """What the scheduler side of an engine is built from.

    ``weights`` is what they are loaded from. ``loads`` and ``stores``: what ``kv_role`` allows.
    ``weak_block_hashes``: vLLM's own are not cryptographic. ``find_adapter`` turns a LoRA adapter's
    path into the folder vLLM reads. ``num_batches`` steps are under way at once, of
    ``max_step_tokens`` at most. ``engine_id``: vLLM's name of this engine. ``sends``, ``receives``:
    its part in KV transfers; ``first_rank`` is its first among those of all data-parallel engines.
    """

    config: ConnectorConfig
    model: ModelDescription
    weights: WeightFiles
    loads: bool
    stores: bool
    kv_events: bool
    weak_block_hashes: bool
    num_batches: int
    max_step_tokens: int
    find_adapter: Callable[[str], Path | None]
    spans: Spans
    engine_id: str
    sends: bool
    receives: bool
    first_rank: int
    tp_size: int

    def build(self) -> Scheduler:
        """Starts the thread that asks Redis and peers, if there are any."""
        config, model, settings = self.config, self.model, self._settings()
        tally, index, policy = Tally(), ChunkIndex(model.world_size), self._policy()
        noise, loaded = NoiseGauge(model.parts[0].formats), LoadedAdapters(model.world_size)
        transfers = self._transfers(tally)
        lifetime, renews = config.redis_ttl_seconds, config.redis_ttl_refresh
        events = KvEventLog(
            model.world_size, lifetime, refresh_ttl=renews, is_wanted=self.kv_events
        )
        lookup, metrics = None, SchedulerMetrics(tally, time.monotonic)
        if (asked := self._lookup()) is not None:
            lookup = BackgroundLookup(asked, limits.LOOKUP_DEADLINE_SECONDS, time.monotonic)
            metrics = SchedulerMetrics(tally, time.monotonic, lookup.take_seconds, asked.servers)
        wanted = None
        if self.stores and config.redis_tier_config() is not None:
            wanted = WantedChunks(index, time.monotonic, config.redis_ttl_seconds)
        make_hasher = partial(make_root_hasher, config, model.lookahead)
        learn = partial(learn_start, model, policy, asked, noise, index, events)
        start = EngineStart(model.world_size, make_hasher, time.monotonic, learn)
        sampler = AuditSampler(config.audit_share, random.Random().random)
        return Scheduler(
            settings,
            self._book(settings, start, AdapterReader(self.find_adapter, loaded), tally, transfers),
            index,
            HitFinder(settings.parts, settings.chunk_size, index, tally, policy, events, lookup),
            policy,
            events,
            tally,
            metrics,
            Auditor(settings, index, sampler, noise, tally, model=model.name),
            loaded,
            wanted,
            transfers,
            self.spans,
        )

    def _settings(self) -> SchedulerSettings:
        config, model = self.config, self.model
        return SchedulerSettings(
            chunk_size=config.chunk_size,
            parts=tuple(part.part for part in model.parts),
            world_size=model.world_size,
            loads=self.loads,
            stores=self.stores,
            store_generated=config.store_generated,
            window_interval=config.window_interval,
            redis_admission=config.redis_admission,
            weak_block_hashes=self.weak_block_hashes,
            load_deadline_seconds=config.load_deadline_seconds,
            step_wait_seconds=limits.LOOKUP_WAIT_SECONDS,
            prefetch_bytes=config.prefetch_bytes,
            has_rings=model.has_rings,
            lookahead=model.lookahead,
            drafted_len=model.drafted_len,
            num_batches=self.num_batches,
        )

    def _policy(self) -> LoadPolicy:
        config, parts = self.config, self.model.parts
        cost_model = CostModel(
            clock=time.monotonic,
            max_deadline_seconds=config.load_deadline_seconds,
            mode=config.compute_or_load,
            num_batches=self.num_batches,
            max_step_tokens=self.max_step_tokens,
        )
        return LoadPolicy(
            cost_model,
            chunk_tokens=config.chunk_size,
            value_bytes=[max(rank.chunk_bytes for rank in part.geometries) for part in parts],
            clock=time.monotonic,
            num_stages=len({rank.layer_start for rank in parts[0].ranks}),
            num_prefix_parts=sum(part.part.rule is Rule.PREFIX for part in parts),
            remote_tiers=config.remote_tiers,
        )

    def _transfers(self, tally: Tally) -> Transfers:
        config, address = self.config, self.config.told_address(self.first_rank)
        tier_config, watch = config.peer_tier_config(), None
        receives = self.receives and bool(config.peer_hosts)
        if receives and tier_config is not None:
            from lmcache_connector.peers.watch import TransferWatch

            watch = TransferWatch(tier_config, self.engine_id)
        settings = TransferSettings(
            Router(address, self.sends and address is not None, receives, config.peer_hosts),
            address,
            self.engine_id,
            self.tp_size,
            len(self.model.parts),
            config.chunk_size,
            config.transfer_deadline_seconds,
            limits.LOOKUP_DEADLINE_SECONDS,
            config.trusts,
        )
        return Transfers(settings, tally, watch)

    def _lookup(self) -> AnyLookup | None:
        """What asks Redis, or peers, or both; ``None``: there are neither."""
        config, model = self.config, self.model
        if not (tiers := config.remote_tiers):
            return None
        from lmcache_connector.lookup.any_lookup import AnyLookup
        from lmcache_connector.storage.geometry import PartGeometries
        from lmcache_connector.storage.redis.lookup import RedisLookup

        ranks = zip(*(part.geometries for part in model.parts), strict=True)
        geometries = [PartGeometries(parts) for parts in ranks]
        lookups: dict[Tier, RedisLookup] = {}
        if Tier.PEER in tiers and (peer_config := config.peer_tier_config()) is not None:
            from lmcache_connector.peers.commands import Greeting
            from lmcache_connector.peers.host import open_folder
            from lmcache_connector.peers.lookup import PeerLookup
            from lmcache_connector.peers.topology import PeerTopology

            greeting, addresses = Greeting(model.world_size, self.engine_id), config.peer_addresses
            host = open_folder(config.host_folder) if config.host_sharing else None
            share = Share(0, model.owners)
            topology = PeerTopology(peer_config, addresses, greeting, share, time.monotonic, host)
            lookups[Tier.PEER] = PeerLookup(peer_config, geometries, topology, time.monotonic)
        if (redis_config := config.redis_tier_config()) is not None:
            lookups[Tier.REDIS] = RedisLookup(redis_config, geometries)
        return AnyLookup(lookups, time.monotonic)

    def _book(
        self,
        settings: SchedulerSettings,
        start: EngineStart,
        adapters: AdapterReader,
        tally: Tally,
        transfers: Transfers,
    ) -> RequestBook:
        config, kept = self.config, KeptDigests(limits.user_cache_folder())
        weights = WeightNames(
            self.model.world_size,
            self.weights,
            kept.load(),
            lambda found: start_thread("lmc-keep-digests", kept.add, found),
            partial(read_weights_label, config.weights_label),
            time.monotonic,
        )
        identifier = RequestIdentifier(
            config.require_cache_salt,
            adapters,
            config.chunk_size,
            lambda reason: tally.count("bypassed_requests", reason.value),
        )
        epochs = RootEpochs(lambda: uuid.uuid4().hex)
        return RequestBook(settings, start, weights, identifier, epochs, tally, transfers.part_of)


def learn_start(
    model: ModelDescription,
    policy: LoadPolicy,
    asked: AnyLookup | None,
    noise: NoiseGauge,
    index: ChunkIndex,
    events: KvEventLog,
    starts: Sequence[RankStart],
) -> None:
    """What all ranks say of their layers: this process sees one of a KV cache group. And what each
    of them stores."""
    if any(start.reads for start in starts):
        events.needed = model.owners.needed([start.reads for start in starts])
        index.share(events.needed, model.owners.numbers)
    others = [Share(rank, model.owners).others for rank in range(model.world_size)]
    if any(ranks - start.reads for ranks, start in zip(others, starts, strict=True)):
        logger.info(
            "lmcache-connector: each rank stores what others hold alike: memory cannot be read"
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
    """Of a model with this ``configuration``, as all ranks see it."""
    root = {"namespace": config.namespace, "configuration": configuration}
    return PrefixHasher(root, config.chunk_size, config.hash_key_bytes, lookahead=lookahead)
