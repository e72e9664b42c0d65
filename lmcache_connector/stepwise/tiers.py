"""The tiers, for an engine that waits for its loads.

The engine's thread looks chunks up, decides, and waits for a load, within its deadline. Stores run
behind it. All of it is what vLLM's workers and scheduler use, but for the two sides and the plans
between them: here both are one thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lmcache_connector.config import limits
from lmcache_connector.config.tiered import ConnectorConfig
from lmcache_connector.copy_kv_blocks.copier import make_copier
from lmcache_connector.cost_model.cost_model import CostModel
from lmcache_connector.cost_model.load_policy import LoadPolicy
from lmcache_connector.keys.prefix_hash import PrefixHasher
from lmcache_connector.lookup.background_lookup import BackgroundLookup, Pending
from lmcache_connector.lookup.chunk_index import ChunkIndex
from lmcache_connector.plans import (
    Calibration,
    JobResult,
    LoadJob,
    Outcome,
    PartRun,
    PrefillWork,
    RankReport,
    StoreJob,
    TransferTime,
)
from lmcache_connector.stepwise.unwritten_gate import UnwrittenGate
from lmcache_connector.storage.geometry import PartGeometries
from lmcache_connector.worker.forward_timer import ForwardTimer
from lmcache_connector.worker.job_queue import JobQueue
from lmcache_connector.worker.lmcache_engine import LMCacheEngineAdapter
from lmcache_connector.worker.lmcache_start import EngineSettings
from lmcache_connector.worker.paged_part import PagedPart
from lmcache_connector.worker.reconciler import Pace
from lmcache_connector.worker.redis_probe import NoProbe, RedisProbe
from lmcache_connector.worker.self_test import SelfTestError, run_self_test
from lmcache_connector.worker.waiting_jobs import QueuedJob

if TYPE_CHECKING:
    from lmcache_connector.storage.redis.tier import RedisTier

logger = logging.getLogger(__name__)

_NUM_PROBE_CHUNKS = 8
_FIRST_PROBE_SECONDS = 2.0
# As long as vLLM's workers leave the cores to what follows a forward pass.
_STORE_DELAY_SECONDS = 0.03
_MIN_TIMED_TOKENS = 32
_MAX_HOLD_SECONDS = 10.0
"""Nobody says that a forward pass has failed."""


class StuckCopyError(RuntimeError):
    """A load did not end long after its deadline: its blocks must not be used or reused."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Since the start, in chunks of ``chunk_size`` tokens. ``redis_chunks`` are those of
    ``hit_chunks`` that Redis held; ``lost_chunks`` were to be loaded and did not arrive in time, or
    not sound."""

    lookups: int = 0
    hit_chunks: int = 0
    redis_chunks: int = 0
    lost_chunks: int = 0
    stored_chunks: int = 0
    chunk_size: int = 0

    @property
    def hit_tokens(self) -> int:
        """Tokens that were restored."""
        return self.hit_chunks * self.chunk_size


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What is worth loading: ``keys`` of consecutive chunks from number ``first`` on."""

    first: int
    keys: tuple[bytes, ...]
    redis_keys: tuple[bytes, ...]
    deadline_seconds: float

    @property
    def stop(self) -> int:
        """One past the last chunk."""
        return self.first + len(self.keys)


class Tiers:
    """The CPU tier and Redis behind it, of one rank.

    ``part`` is a cache that holds one chunk or more; the self-test writes to it, and leaves it as
    it was. ``probe_root`` names the model. Runs on the engine's thread. Raises ``ConfigError`` or
    ``SelfTestError`` for what cannot be used.
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
        self._part = part
        self._device = part.groups[0].device
        self.chunk_bytes = part.geometry.chunk_bytes
        self.counts = Counts(chunk_size=config.chunk_size)
        self._copier = make_copier(self._device)
        self._timer = ForwardTimer(self._copier.fence, clock)
        self._tier = _redis_tier(config, part)
        settings = EngineSettings(
            rank=0,
            world_size=1,
            rank_gib=config.rank_gib,
            overrides=config.lmcache,
            pace=Pace.for_lifetime(config.redis_ttl_seconds),
        )
        self._engine = LMCacheEngineAdapter(settings, [part], self._copier, self._tier)
        self._index = ChunkIndex(1)
        self._lookup = _background_lookup(config, part, clock)
        self._policy = LoadPolicy(
            CostModel(clock, config.load_deadline_seconds, config.compute_or_load),
            config.chunk_size,
            [self.chunk_bytes],
            clock,
        )
        self._probe = self._make_probe(probe_root)
        try:
            self._calibrate()
        except SelfTestError:
            self._engine.close(0.0)
            raise
        on_cpu = self._device.type == "cpu"
        self._jobs = JobQueue(
            self._run,
            1 if self._tier is not None else 0,
            clock,
            _STORE_DELAY_SECONDS if on_cpu else 0.0,
        )
        self._parts_of_jobs: dict[int, PagedPart] = {}
        self._gates: dict[int, UnwrittenGate] = {}
        self._last_job = 0

    def __str__(self) -> str:
        """What is in effect; no secrets."""
        config, redis = self._config, self._config.redis_tier_config()
        return (
            f"CPU tier {config.cpu_gib:g} GiB, "
            f"{f'Redis {redis.address}' if redis else 'no Redis (redis_url is not set)'}, "
            f"namespace {config.namespace}, chunks of {config.chunk_size} tokens, "
            f"{self.chunk_bytes / 2**20:.2f} MiB, compute_or_load {config.compute_or_load}"
        )

    # -- before the forward pass ---------------------------------------------------------------

    def plan(self, keys: Sequence[bytes], context_tokens: int, num_tokens: int) -> LoadPlan | None:
        """What to load of a sequence of ``num_tokens``, whose first ``context_tokens`` are there;
        ``None``: nothing. ``keys`` are those of all its chunks that may be loaded."""
        first = context_tokens // self._config.chunk_size
        self._learn()
        self._count(lookups=1)
        wanted = tuple(keys[first:])
        are_in_cpu = self._index.has_each(wanted)
        in_redis = self._ask_redis(wanted, are_in_cpu, context_tokens, num_tokens)
        held = [a or key in in_redis for a, key in zip(are_in_cpu, wanted, strict=True)]
        end = held.index(False) if False in held else len(held)
        if end == 0:
            return None
        self._engine.want([k for k, a in zip(wanted[:end], are_in_cpu, strict=False) if a])
        decision = self._policy.decide(
            context_tokens, max(num_tokens, context_tokens + 1), wanted[:end], are_in_cpu[:end]
        )
        logger.debug("%s", decision)
        if decision.num_chunks == 0:
            return None
        load = wanted[: decision.num_chunks]
        redis_keys = [k for k, a in zip(load, are_in_cpu, strict=False) if not a]
        return LoadPlan(first, load, tuple(redis_keys), decision.deadline_seconds)

    def load(self, plan: LoadPlan, part: PagedPart, blocks: Sequence[int], skipped: int = 0) -> int:
        """How many leading chunks of the plan arrived in ``blocks`` of ``part``, whole and sound.

        ``blocks`` are those of all chunks, but for the first ``skipped``. Waits up to the plan's
        deadline. Raises :class:`StuckCopyError`.
        """
        self._last_job += 1
        stores = [self._index.planned_job(key) for key in plan.keys]
        job = LoadJob(
            job_id=self._last_job,
            request_id=f"load {self._last_job}",
            runs=(_run_of(plan.keys, plan.first, blocks, skipped),),
            deadline_seconds=plan.deadline_seconds,
            needs_redis=bool(plan.redis_keys),
            after_job=max(stores),
        )
        self._policy.load_planned(job, plan.redis_keys)
        self._submit(job, part)
        result = self._wait_for(job)
        self._policy.load_ended(job.job_id, [result])
        self._count(
            hit_chunks=result.num_chunks,
            redis_chunks=sum(key in plan.redis_keys for key in plan.keys[: result.num_chunks]),
            lost_chunks=len(plan.keys) - result.num_chunks,
        )
        return result.num_chunks

    def forward_begins(self, num_tokens: int, context_tokens: int) -> None:
        """Right before the forward pass, which computes so many tokens after so many."""
        is_worth_it = num_tokens >= _MIN_TIMED_TOKENS
        self._hold_writes(self._clock() + _MAX_HOLD_SECONDS)
        self._timer.start(PrefillWork(num_tokens, context_tokens, 0) if is_worth_it else None)

    # -- after it ------------------------------------------------------------------------------

    def forward_ended(self) -> None:
        """Right after the forward pass was run or, on CUDA, queued."""
        self._timer.stop()
        self._hold_writes(self._clock())

    def store(
        self, keys: Sequence[bytes], first: int, part: PagedPart, blocks: Sequence[int]
    ) -> None:
        """Store consecutive chunks from number ``first`` on, which lie in ``blocks`` of ``part``
        and stay as they are until the store has ended: see :meth:`finish_stores`."""
        self._learn()
        if all(self._index.has_each(keys)):
            return
        self._last_job += 1
        job = StoreJob(
            job_id=self._last_job,
            request_id=f"store {self._last_job}",
            runs=(_run_of(keys, first, blocks),),
            redis_keys=None if self._config.redis_admission == "all" else frozenset(),
        )
        self._index.plan(keys, job.job_id)
        self._gates[job.job_id] = UnwrittenGate(part.groups[0].owners)
        self._submit(job, part)

    def finish_stores(self) -> None:
        """Wait until all that is to be stored has been copied; what takes too long is dropped."""
        self._jobs.finish_stores(self._config.load_deadline_seconds)
        self._learn()

    def close(self) -> None:
        """Bounded: queued writes to Redis get 5 s, and what is stored as much."""
        seconds = limits.SHUTDOWN_SECONDS
        self._jobs.finish_stores(seconds)
        self._learn()
        self._probe.close(seconds)
        if not self._jobs.close(seconds):
            logger.warning("A KV transfer did not stop within %.1f s; leaving it behind", seconds)
        if self._lookup is not None:
            self._lookup.close()
        self._engine.close(seconds)
        self._copier.close()

    # -- jobs ----------------------------------------------------------------------------------

    def _submit(self, job: LoadJob | StoreJob, part: PagedPart) -> None:
        self._parts_of_jobs[job.job_id] = part
        self._jobs.submit(job, self._copier.fence())

    def _run(self, queued: QueuedJob) -> JobResult:
        """On a lane's thread."""
        started, job = self._clock(), queued.job
        parts = [self._parts_of_jobs[job.job_id]]
        if isinstance(job, StoreJob):
            gate = self._gates[job.job_id]
            moved = self._engine.store(job, queued.fence, queued.cancelled, gate, parts)
        else:
            assert isinstance(job, LoadJob)  # no request waits in a queue here
            moved = self._engine.load(job, queued.fence, queued.cancelled, queued.deadline, parts)
        is_whole = moved.num_chunks == moved.num_keys
        return JobResult(
            job_id=job.job_id,
            outcome=Outcome.DONE if is_whole else Outcome.MISSING,
            num_chunks=moved.num_chunks,
            num_bytes=moved.num_bytes,
            redis_bytes=moved.redis_bytes,
            seconds=self._clock() - started,
            redis_seconds=moved.redis_seconds,
            redis_failed=moved.redis_failed,
        )

    def _wait_for(self, job: LoadJob) -> JobResult:
        until = self._clock() + job.deadline_seconds + limits.SHUTDOWN_SECONDS
        while True:
            for ended in self._settle():
                if ended.job is job and ended.result is not None:
                    return ended.result
            left = until - self._clock()
            if left <= 0:
                self._jobs.cancel([job.job_id])
                raise StuckCopyError("a load of KV does not end; its memory must not be used")
            self._jobs.wait_for_result(left)

    def _settle(self) -> list[QueuedJob]:
        """Jobs that have ended since the last call."""
        ended = self._jobs.take_ended()
        self._index.apply(0, self._engine.take_events())
        for each in ended:
            self._parts_of_jobs.pop(each.job.job_id, None)
            self._gates.pop(each.job.job_id, None)
            if isinstance(each.job, StoreJob):
                self._index.settle(each.job.keys, each.job.job_id)
                self._count(stored_chunks=each.result.num_chunks if each.result else 0)
        return ended

    # -- what is known -------------------------------------------------------------------------

    def _learn(self) -> None:
        """What jobs, forward passes and probes have told since the last call."""
        self._settle()
        report = RankReport(0, (), (), forwards=self._timer.take(), redis=self._probe.take())
        self._policy.observe_reports([report])
        if self._policy.take_probe():
            self._probe.request()

    def _ask_redis(
        self, keys: tuple[bytes, ...], are_in_cpu: list[bool], context_tokens: int, num_tokens: int
    ) -> frozenset[bytes]:
        """Which of the keys that memory lacks Redis holds, as far as it says so in time."""
        missing = [key for key, in_cpu in zip(keys, are_in_cpu, strict=True) if not in_cpu]
        if self._lookup is None or not missing:
            return frozenset()
        last_seconds = self._lookup.last_seconds
        seconds = self._policy.lookup_seconds(context_tokens, num_tokens, last_seconds)
        if seconds == 0.0:
            return frozenset()
        pending = self._lookup.submit(missing)
        answer = pending.wait(min(seconds, limits.LOOKUP_DEADLINE_SECONDS))
        if isinstance(answer, Pending):
            pending.cancel()
            return frozenset()
        return answer.keys

    def _make_probe(self, root: Mapping[str, object]) -> RedisProbe | NoProbe:
        if self._tier is None or self._config.compute_or_load == "always":
            return NoProbe()
        size = self._config.chunk_size
        hasher = PrefixHasher(root, size, self._config.hash_key_bytes)
        keys = [hasher.root_key({"probe": i}) for i in range(_NUM_PROBE_CHUNKS)]
        return RedisProbe(self._tier, keys, self._clock)

    def _calibrate(self) -> None:
        found = run_self_test(self._engine, [self._part], self._clock)
        local = TransferTime(found.num_bytes, found.load_seconds) if found else None
        until = self._clock() + _FIRST_PROBE_SECONDS
        while self._probe.is_busy and self._clock() < until:
            time.sleep(0.01)
        self._policy.calibrate([Calibration(local, self._probe.first(_FIRST_PROBE_SECONDS))])

    def _hold_writes(self, until: float) -> None:
        """On CPU, the cores that write compute the model."""
        if self._tier is not None and self._device.type == "cpu":
            self._tier.hold_writes(until)

    def _count(self, **more: int) -> None:
        counts = self.counts
        self.counts = replace(
            counts, **{name: getattr(counts, name) + number for name, number in more.items()}
        )


def _run_of(keys: Sequence[bytes], first: int, blocks: Sequence[int], skipped: int = 0) -> PartRun:
    chunks = tuple(range(first, first + len(keys)))
    return PartRun(0, tuple(keys), chunks, (tuple(blocks),), skipped)


def _redis_tier(config: ConnectorConfig, part: PagedPart) -> RedisTier | None:
    tier_config = config.redis_tier_config()
    if tier_config is None:
        return None
    # Imported here: without a Redis tier its modules are not needed.
    from lmcache_connector.storage.redis.tier import RedisTier

    return RedisTier(tier_config, PartGeometries((part.geometry,)))


def _background_lookup(
    config: ConnectorConfig, part: PagedPart, clock: Callable[[], float]
) -> BackgroundLookup | None:
    tier_config = config.redis_tier_config()
    if tier_config is None:
        return None
    from lmcache_connector.storage.redis.lookup import RedisLookup

    redis = RedisLookup(tier_config, [PartGeometries((part.geometry,))])
    return BackgroundLookup(redis, limits.LOOKUP_DEADLINE_SECONDS, clock)
