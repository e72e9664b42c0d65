"""The tiers for an engine that waits for its loads.

The engine's thread looks chunks up, decides, and waits for a load until its deadline. Stores run in
the background. The components are those that the scheduler side and the workers use under vLLM,
without plans between them, since both sides are one thread here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from lmcache_connector.config import limits
from lmcache_connector.config.tiered import ConnectorConfig, parse_config
from lmcache_connector.cost_model.cost_model import CostModel
from lmcache_connector.cost_model.policy import LoadPolicy
from lmcache_connector.errors import ConfigError
from lmcache_connector.keys.reasons import by_field
from lmcache_connector.kv_parts.hit import num_leading
from lmcache_connector.lookup.background_lookup import BackgroundLookup
from lmcache_connector.lookup.chunk_index import ChunkIndex
from lmcache_connector.plans import (
    Claim,
    JobResult,
    LoadJob,
    PartRun,
    PrefillWork,
    PrefixUse,
    RankReport,
    StoreJob,
    Tier,
)
from lmcache_connector.retention.hints import tenant_of
from lmcache_connector.storage.geometry import PartGeometries
from lmcache_connector.vllm_compat.api.versions import check_lmcache
from lmcache_connector.worker.job_queue import Job, StepGate
from lmcache_connector.worker.lmcache_start import RankSettings
from lmcache_connector.worker.paged_part import PagedPart
from lmcache_connector.worker.rank_tiers import RankTiers
from lmcache_connector.worker.redis_probe import probe_keys

logger = logging.getLogger(__name__)

_MIN_TIMED_TOKENS = 32
_STUCK = "a copy of KV did not end; its memory must not be used"
WITHOUT_EFFECT = by_field(
    {
        "a setting that works only with vLLM: share through Redis": (
            "host_sharing host_folder peers peer_listen peer_host peer_hosts peer_insecure"
        ),
        "a setting that works only with vLLM: leave it out": (
            "transfer_deadline_seconds lease_seconds router router_secret http_address "
            "heartbeat_seconds window_interval audit_share pin_share loads_in_step"
        ),
    }
)
"""Settings that are refused without vLLM, with what to do instead."""


def read_settings(config: Mapping[str, Any]) -> ConnectorConfig:
    """Parse ``kv_connector_extra_config`` for an engine without vLLM. With an untested LMCache, the
    namespace is not shared with tested ones. Raises ``ConfigError`` with all problems, or
    ``UnsupportedError``."""
    if not isinstance(config, Mapping):
        raise ConfigError(f"settings are a dict of kv_connector_extra_config, not {config!r:.60}")
    settings, standing = parse_config(config, WITHOUT_EFFECT), check_lmcache()
    if not standing.unverified:
        return settings
    logger.warning(
        "%s was not tested with this release: nothing is shared with instances of tested versions",
        ", ".join(standing.unverified),
    )
    return settings.model_copy(update={"namespace": standing.namespace(settings.namespace)})


class StuckCopyError(RuntimeError):
    """A load has not ended long after its deadline: its blocks must not be used or reused."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Since the start, in chunks of ``chunk_size`` tokens. ``redis_chunks``: those of
    ``hit_chunks`` loaded from Redis. ``lost_chunks`` were planned to be loaded but arrived late or
    invalid."""

    lookups: int = 0
    hit_chunks: int = 0
    redis_chunks: int = 0
    lost_chunks: int = 0
    stored_chunks: int = 0
    chunk_size: int = 0

    @property
    def hit_tokens(self) -> int:
        return self.hit_chunks * self.chunk_size


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Chunks worth loading: ``keys`` of consecutive chunks from number ``first`` on, the tier of
    each, and the claim of their tenant."""

    first: int
    keys: tuple[bytes, ...]
    tiers: tuple[Tier, ...]
    deadline_seconds: float
    claim: Claim

    @property
    def stop(self) -> int:
        """One past the last chunk."""
        return self.first + len(self.keys)


class Tiers:
    """One rank's CPU tier, and Redis behind it.

    ``part``: a cache of at least one chunk; the self-test writes to it and restores it.
    ``probe_root`` identifies the model. Runs on the engine's thread. Raises ``ConfigError`` or
    ``SelfTestError``.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        part: PagedPart,
        probe_root: Mapping[str, object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._clock = clock
        self.chunk_bytes = part.geometry.chunk_bytes
        self.counts = Counts(chunk_size=config.chunk_size)
        redis_config, geometries = config.redis_tier_config(), PartGeometries((part.geometry,))
        self._index = ChunkIndex(1)
        self._policy = LoadPolicy(
            CostModel(clock, config.load_deadline_seconds, config.compute_or_load),
            config.chunk_size,
            [self.chunk_bytes],
            clock,
        )
        self._last_job = 0
        self._is_unfinished = False
        settings = RankSettings(
            config.model_copy(update={"host_sharing": False}),
            probe_keys=probe_keys(config, probe_root),
        )
        redis = None
        self._lookup: BackgroundLookup | None = None
        with ExitStack() as if_it_fails:
            if redis_config is not None:
                # Late import: unused without Redis.
                from lmcache_connector.lookup.any_lookup import AnyLookup
                from lmcache_connector.storage.redis.lookup import RedisLookup
                from lmcache_connector.storage.redis.tier import RedisTier

                redis = RedisTier(redis_config, geometries)
                if_it_fails.callback(redis.close, 0.0)
            self._rank = RankTiers(settings, [part], redis, None, clock)
            if_it_fails.callback(self.close)  # the user may interrupt the wait below
            if redis_config is not None:
                lookup = AnyLookup({Tier.REDIS: RedisLookup(redis_config, [geometries])}, clock)
                self._lookup = BackgroundLookup(lookup, limits.LOOKUP_DEADLINE_SECONDS, clock)
            while self._rank.is_calibrating:
                time.sleep(0.01)
            if_it_fails.pop_all()
        self._policy.observe_measured([self._rank.measured])

    def __str__(self) -> str:
        """Settings in effect, without secrets."""
        config, redis = self._config, self._config.redis_tier_config()
        return (
            f"CPU tier {config.cpu_gib:g} GiB, "
            f"{f'Redis {redis.address}' if redis else 'no Redis (redis_url is not set)'}, "
            f"namespace {config.namespace}, chunks of {config.chunk_size} tokens, "
            f"{self.chunk_bytes / 2**20:.2f} MiB, compute_or_load {config.compute_or_load}"
        )

    # -- before the forward pass ---------------------------------------------------------------

    def plan(
        self, keys: Sequence[bytes], context_tokens: int, num_tokens: int, cache_salt: str | None
    ) -> LoadPlan | None:
        """Chunks to load of a sequence of ``num_tokens`` with ``context_tokens`` in place, or
        ``None``. ``keys``: of all its chunks that may be loaded."""
        first = context_tokens // self._config.chunk_size
        self._end_interrupted()
        self._learn()
        self._count(lookups=1)
        wanted = tuple(keys[first:])
        are_in_cpu = self._index.has_each(wanted)
        in_redis = self._ask_redis(wanted, are_in_cpu, context_tokens, num_tokens)
        held = [a or key in in_redis for a, key in zip(are_in_cpu, wanted, strict=True)]
        end = num_leading(held)
        if end == 0:
            return None
        in_cpu = tuple(k for k, a in zip(wanted[:end], are_in_cpu, strict=False) if a)
        claim = Claim(tenant_of(cache_salt))
        self._rank.engine.cpu.note([PrefixUse(claim, in_cpu, may_write=True)])
        tiers = tuple(Tier.CPU if in_cpu else Tier.REDIS for in_cpu in are_in_cpu[:end])
        decision = self._policy.decide(
            context_tokens, max(num_tokens, context_tokens + 1), wanted[:end], tiers
        )
        logger.debug("%s", decision)
        if decision.num_chunks == 0:
            return None
        load = wanted[: decision.num_chunks]
        return LoadPlan(first, load, tiers[: len(load)], decision.deadline_seconds, claim)

    def load(self, plan: LoadPlan, part: PagedPart, blocks: Sequence[int], skipped: int = 0) -> int:
        """Load the plan's chunks. Returns how many leading ones arrived in ``blocks``, verified.

        ``blocks``: of the plan's chunks, without the first ``skipped`` blocks. Waits until the
        plan's deadline. Raises :class:`StuckCopyError`.
        """
        self._last_job += 1
        stores = [self._index.planned_job(key) for key in plan.keys]
        job = LoadJob(
            job_id=self._last_job,
            request_id=f"load {self._last_job}",
            runs=(_run_of(plan.keys, plan.first, blocks, skipped),),
            deadline_seconds=plan.deadline_seconds,
            may_fetch=Tier.REDIS in plan.tiers,
            after_job=max(stores),
            claim=plan.claim,
        )
        with self._may_be_interrupted():
            self._policy.load_planned(job, plan.tiers)
            self._rank.jobs.submit(job, self._rank.copier.fence(), parts=(part,))
            result = self._wait_for(job)
            self._policy.load_ended(job.job_id, [result])
        self._count(
            hit_chunks=result.num_chunks,
            redis_chunks=plan.tiers[: result.num_chunks].count(Tier.REDIS),
            lost_chunks=len(plan.keys) - result.num_chunks,
        )
        return result.num_chunks

    def forward_begins(self, num_tokens: int, context_tokens: int) -> None:
        """A forward pass of ``num_tokens`` behind ``context_tokens`` is about to begin."""
        self._end_interrupted()
        is_worth_it = num_tokens >= _MIN_TIMED_TOKENS
        self._rank.timer.start(PrefillWork(num_tokens, context_tokens) if is_worth_it else None)

    # -- after it ------------------------------------------------------------------------------

    def forward_ended(self) -> None:
        """The forward pass has run or, on CUDA, been queued."""
        self._rank.timer.stop()

    def num_storable(self, num_tokens: int, num_prompt_tokens: int) -> int:
        """Chunks to store of a sequence of ``num_tokens``, the restored ones included."""
        if not self._config.store_generated:
            num_tokens = min(num_tokens, num_prompt_tokens)
        return num_tokens // self._config.chunk_size

    def store(
        self,
        keys: Sequence[bytes],
        first: int,
        part: PagedPart,
        blocks: Sequence[int],
        cache_salt: str | None,
    ) -> None:
        """Store consecutive chunks from number ``first`` on. Their ``blocks`` must not change
        before :meth:`finish_stores` returns."""
        self._learn()
        if all(self._index.has_each(keys)):
            return
        self._last_job += 1
        job = StoreJob(
            job_id=self._last_job,
            request_id=f"store {self._last_job}",
            runs=(_run_of(keys, first, blocks),),
            redis_keys=None if self._config.redis_admission == "all" else frozenset(),
            claim=Claim(tenant_of(cache_salt)),
        )
        with self._may_be_interrupted():
            self._index.plan(keys, job.job_id)
            gate = UnwrittenGate(part.groups[0].owners)
            self._rank.jobs.submit(job, self._rank.copier.fence(), gate=gate, parts=(part,))

    def finish_stores(self) -> None:
        """Wait until all stores are copied; after ``load_deadline_seconds`` the rest is dropped."""
        with self._may_be_interrupted():
            self._rank.jobs.finish_stores(self._config.load_deadline_seconds)
        self._learn()

    def close(self) -> None:
        """Bounded: 5 s each for stores, the probe, the lanes and queued writes to Redis."""
        seconds = limits.SHUTDOWN_SECONDS
        self._rank.jobs.finish_stores(seconds)
        self._learn()
        are_ended = self._rank.stop(seconds)
        if self._lookup is not None:
            self._lookup.close()
        self._rank.close(seconds, unmap=are_ended)

    # -- jobs ----------------------------------------------------------------------------------

    @contextmanager
    def _may_be_interrupted(self) -> Iterator[None]:
        """End all jobs if the ``with`` body raises, since the caller may reuse their KV blocks."""
        self._end_interrupted()
        self._is_unfinished = True
        try:
            yield
        except BaseException:
            self._end_interrupted()
            raise
        self._is_unfinished = False

    def _end_interrupted(self) -> None:
        """End the jobs that an interrupted ``with`` body has left. The next pass does this, too,
        since an interrupt may also arrive here."""
        if not self._is_unfinished:
            return
        are_ended = self._rank.jobs.cancel_all(limits.SHUTDOWN_SECONDS)
        self._index.forget_planned()
        self._policy.forget_loads()
        self._is_unfinished = False
        if not are_ended:
            raise StuckCopyError(_STUCK)

    def _wait_for(self, job: LoadJob) -> JobResult:
        until = self._clock() + job.deadline_seconds + limits.SHUTDOWN_SECONDS
        while True:
            for ended, result in self._settle():
                if ended is job:
                    return result
            left = until - self._clock()
            if left <= 0:
                raise StuckCopyError(_STUCK)
            self._rank.jobs.wait_for_result(left)

    def _settle(self) -> list[tuple[Job, JobResult]]:
        """Jobs that have ended since the last call."""
        ended = self._rank.jobs.take_ended()
        self._index.apply(0, self._rank.engine.cpu.take_events())
        for job, result in ended:
            if isinstance(job, StoreJob):
                self._index.settle(job.keys, job.job_id)
                self._count(stored_chunks=result.num_chunks)
        return ended

    # -- observations --------------------------------------------------------------------------

    def _learn(self) -> None:
        """Process results of jobs, forward passes and probes since the last call."""
        self._settle()
        probe, timer = self._rank.probe, self._rank.timer
        report = RankReport(0, (), (), forwards=timer.take(), measured=probe.take())
        self._policy.observe_reports([report])
        if self._policy.probes.take():
            probe.request()

    def _ask_redis(
        self, keys: tuple[bytes, ...], are_in_cpu: list[bool], context_tokens: int, num_tokens: int
    ) -> Collection[bytes]:
        """The keys missing in the CPU tier that Redis holds, if it answers in time."""
        missing = [key for key, in_cpu in zip(keys, are_in_cpu, strict=True) if not in_cpu]
        if self._lookup is None or not missing:
            return frozenset()
        expected = self._lookup.expected_seconds
        seconds = self._policy.lookup_seconds(context_tokens, num_tokens, expected)
        if seconds == 0.0:
            self._lookup.try_soon()
            return frozenset()
        pending = self._lookup.submit(missing)
        answer = pending.answer(min(seconds, limits.LOOKUP_DEADLINE_SECONDS))
        if answer is None:
            pending.cancel()
            return frozenset()
        return answer

    def _count(self, **more: int) -> None:
        counts = self.counts
        self.counts = replace(
            counts, **{name: getattr(counts, name) + number for name, number in more.items()}
        )


def _run_of(keys: Sequence[bytes], first: int, blocks: Sequence[int], skipped: int = 0) -> PartRun:
    chunks = tuple(range(first, first + len(keys)))
    return PartRun(0, tuple(keys), chunks, (tuple(blocks),), skipped)


class UnwrittenGate(StepGate):
    """Passes a copy of ``tensors`` only if they were not written to since construction, according
    to torch's version counters."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tuple(tensors)
        self._writes = writes_of(tensors)

    def passes(self, cancelled: threading.Event) -> bool:
        return super().passes(cancelled) and self._writes == writes_of(self._tensors)


def writes_of(tensors: Sequence[torch.Tensor | None]) -> list[int]:
    """Version counters; 0 for tensors made in inference mode, which have none."""
    return [0 if each is None or each.is_inference() else each._version for each in tensors]
