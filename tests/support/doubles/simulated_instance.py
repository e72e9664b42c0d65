"""An instance in simulated time: its prefill and its tiers have speeds that the policy must find
out, from its start, its loads and its probes."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from lmcache_connector.cost_model.cost_model import CostModel
from lmcache_connector.cost_model.decision import LoadDecision
from lmcache_connector.cost_model.policy import LoadPolicy
from lmcache_connector.plans import (
    Fetched,
    ForwardTime,
    JobResult,
    Outcome,
    PrefillWork,
    RankReport,
    Tier,
)
from tests.support.jobs import load_job

CHUNK_TOKENS = 256
CHUNK_BYTES = 2 << 20
PROMPT_TOKENS = 23 * CHUNK_TOKENS + 100
CPU_BYTES_PER_SECOND = 5e9
_KEYS = [bytes([n]) * 32 for n in range(PROMPT_TOKENS // CHUNK_TOKENS)]
_PROBE_CHUNKS = 8
_PROBE_PATIENCE_SECONDS = 1.0


@dataclass(frozen=True)
class TrueSpeed:
    """A tier as it is. If it ``stalls``, nothing ever comes."""

    bytes_per_second: float
    latency_seconds: float = 0.0
    stalls: bool = False

    def arrivals(self, num_chunks: int, noise: float = 1.0) -> list[float]:
        """Seconds until each chunk is there."""
        if self.stalls:
            return [math.inf] * num_chunks
        return [
            noise * (self.latency_seconds + n * CHUNK_BYTES / self.bytes_per_second)
            for n in range(1, num_chunks + 1)
        ]

    def seconds(self, num_chunks: int, noise: float = 1.0) -> float:
        return self.arrivals(num_chunks, noise)[-1] if num_chunks else 0.0

    def probe(self, noise: float) -> tuple[Fetched, ...]:
        in_time = [
            seconds
            for seconds in self.arrivals(_PROBE_CHUNKS, noise)
            if seconds <= _PROBE_PATIENCE_SECONDS
        ]
        if not in_time:
            return (Fetched(Tier.REDIS, 0, _PROBE_PATIENCE_SECONDS, True),)
        reads = dict.fromkeys((len(in_time), 1))
        return tuple(Fetched(Tier.REDIS, n * CHUNK_BYTES, in_time[n - 1]) for n in reads)


@dataclass(frozen=True)
class SimulatedRequest:
    """One request: its decision, and its time to first token over recompute and over the best."""

    decision: LoadDecision
    vs_recompute: float
    vs_best: float


@dataclass
class SimulatedInstance:
    """``noise`` is the standard deviation of the logarithm of a load's seconds."""

    tiers: dict[Tier, TrueSpeed]
    noise: float = 0.05
    seed: int = 0
    now: float = 0.0
    policy: LoadPolicy = field(init=False)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        model = CostModel(lambda: self.now, max_deadline_seconds=10.0)
        self.policy = LoadPolicy(model, CHUNK_TOKENS, (CHUNK_BYTES,), lambda: self.now)
        self._job_id = 0
        self._probes: list[tuple[float, tuple[Fetched, ...]]] = []

    def calibrate(self) -> None:
        """As at the start: the self-test copies one chunk, the probe reads Redis."""
        copied = Fetched(Tier.CPU, CHUNK_BYTES, self.tiers[Tier.CPU].seconds(1))
        self.policy.observe_measured([(copied, *self.tiers[Tier.REDIS].probe(1.0))])

    def compute_seconds(self, start: int, end: int) -> float:
        return (end - start) * (1.2e-4 + 3e-9 * (start + end) / 2)

    def cold_requests(self, count: int) -> None:
        for _ in range(count):
            self._compute(0)

    def request(self, hit: tuple[Tier, ...]) -> SimulatedRequest:
        """One prompt with a hit: decide, load to the deadline, compute the rest."""
        decision = self.policy.decide(0, PROMPT_TOKENS, _KEYS[: len(hit)], hit)
        self._step_probe()
        seconds, num_loaded = 0.0, 0
        if decision.num_chunks:
            seconds, num_loaded = self._load(decision, hit[: decision.num_chunks])
        self.now += seconds
        seconds += self._compute(num_loaded * CHUNK_TOKENS)
        recompute = self.compute_seconds(0, PROMPT_TOKENS)
        return SimulatedRequest(decision, seconds / recompute, seconds / self._best_seconds(hit))

    def requests(self, count: int, hit: tuple[Tier, ...]) -> list[SimulatedRequest]:
        return [self.request(hit) for _ in range(count)]

    def _load(self, decision: LoadDecision, tiers: tuple[Tier, ...]) -> tuple[float, int]:
        """Seconds and chunks. Redis is cut off at the deadline; a copy, once begun, is finished."""
        num_cpu, num_redis = tiers.count(Tier.CPU), tiers.count(Tier.REDIS)
        keys = tuple(_KEYS[: len(tiers)])
        self._job_id += 1
        self.policy.load_planned(
            load_job(
                self._job_id,
                "r",
                keys,
                ((),),
                deadline_seconds=decision.deadline_seconds,
                may_fetch=True,
            ),
            tiers,
        )
        arrivals = self.tiers[Tier.REDIS].arrivals(num_redis, self._some_noise())
        fetched = [seconds for seconds in arrivals if seconds <= decision.deadline_seconds]
        cut_off = len(fetched) < num_redis
        redis_seconds = decision.deadline_seconds if cut_off else max(fetched, default=0.0)
        num_loaded = num_cpu + len(fetched)
        seconds = redis_seconds + self.tiers[Tier.CPU].seconds(num_loaded, self._some_noise())
        result = JobResult(
            job_id=self._job_id,
            outcome=Outcome.DEADLINE if cut_off else Outcome.DONE,
            num_chunks=num_loaded,
            num_bytes=num_loaded * CHUNK_BYTES,
            seconds=seconds,
            fetched=(Fetched(Tier.REDIS, len(fetched) * CHUNK_BYTES, redis_seconds, cut_off),)
            if num_redis
            else (),
        )
        self.policy.load_ended(self._job_id, [result])
        return seconds, num_loaded

    def _compute(self, start: int) -> float:
        seconds = self.compute_seconds(start, PROMPT_TOKENS)
        self.now += seconds
        forward = ForwardTime(PrefillWork(PROMPT_TOKENS - start, start), seconds)
        self.policy.observe_reports([RankReport(0, (), (), (forward,)), *self._probe_reports()])
        return seconds

    def _step_probe(self) -> None:
        """A probe runs beside the requests, and reports once it has ended."""
        if self.policy.probes.take():
            measured = self.tiers[Tier.REDIS].probe(self._some_noise())
            self._probes.append((self.now + sum(m.seconds for m in measured), measured))

    def _probe_reports(self) -> Iterator[RankReport]:
        while self._probes and self._probes[0][0] <= self.now:
            yield RankReport(0, (), (), measured=self._probes.pop(0)[1])

    def _some_noise(self) -> float:
        return math.exp(self._rng.gauss(0, self.noise))

    def _best_seconds(self, hit: tuple[Tier, ...]) -> float:
        """What somebody who knows the tiers would have needed, without noise."""
        best = self.compute_seconds(0, PROMPT_TOKENS)
        for num_chunks in range(1, len(hit) + 1):
            fetch = self.tiers[Tier.REDIS].seconds(hit[:num_chunks].count(Tier.REDIS))
            copy = self.tiers[Tier.CPU].seconds(num_chunks)
            rest = self.compute_seconds(num_chunks * CHUNK_TOKENS, PROMPT_TOKENS)
            best = min(best, fetch + copy + rest)
        return best


def calibrate(
    model: CostModel, tier: Tier, bytes_per_second: float, latency_seconds: float = 0.0
) -> None:
    """As the self-test or a probe would, without noise."""
    sizes = (1 << 30, 1 << 20)
    loads = [(n, latency_seconds + n / bytes_per_second) for n in sizes]
    model.tiers[tier].measured(model._clock(), loads)
