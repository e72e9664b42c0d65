"""An instance in simulated time: real prefill and link speeds that the cost model must find out."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from lmcache_connector.cost_model.cost_model import CostModel
from lmcache_connector.cost_model.decision import LoadDecision, LoadOffer
from lmcache_connector.plans import Tier

CHUNK_TOKENS = 256
CHUNK_BYTES = 2 << 20
PROMPT_TOKENS = 23 * CHUNK_TOKENS + 100
LOCAL_BYTES_PER_SECOND = 5e9


@dataclass
class Link:
    """A tier as it is; ``stalls`` brings nothing, ever."""

    bytes_per_second: float
    latency_seconds: float = 0.0
    stalls: bool = False

    def arrivals(self, num_chunks: int, noise: float) -> list[float]:
        """Seconds until each chunk is there."""
        if self.stalls:
            return [math.inf] * num_chunks
        return [
            noise * (self.latency_seconds + n * CHUNK_BYTES / self.bytes_per_second)
            for n in range(1, num_chunks + 1)
        ]


@dataclass
class Outcome:
    """One request: its decision, and its time to first token over recompute and over the best."""

    decision: LoadDecision
    vs_recompute: float
    vs_best: float


@dataclass
class SimulatedInstance:
    """``noise`` is the standard deviation of the logarithm of a load's seconds."""

    links: dict[Tier, Link]
    noise: float = 0.05
    seed: int = 0
    now: float = 0.0
    model: CostModel = field(init=False)
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.model = CostModel(
            clock=lambda: self.now, rng=random.Random(self.seed + 1), max_deadline_seconds=10.0
        )

    def calibrate(self) -> None:
        for source, link in self.links.items():
            if not link.stalls:
                self.model.calibrate(source, link.bytes_per_second, link.latency_seconds)

    def compute_seconds(self, start: int, end: int) -> float:
        return (end - start) * (1.2e-4 + 3e-9 * (start + end) / 2)

    def cold_requests(self, count: int) -> None:
        for _ in range(count):
            self._compute(0)

    def request(self, sources: tuple[Tier, ...]) -> Outcome:
        """One prompt with hits in ``sources``: decide, load to the deadline, compute the rest."""
        offer = LoadOffer(0, PROMPT_TOKENS, CHUNK_TOKENS, CHUNK_BYTES, sources)
        decision = self.model.decide(offer)
        waited, num_loaded = self._load(sources[: decision.num_chunks], decision.deadline_seconds)
        self.now += waited
        seconds = waited + self._compute(offer.tokens_after(num_loaded) if num_loaded else 0)
        recompute = self.compute_seconds(0, PROMPT_TOKENS)
        return Outcome(decision, seconds / recompute, seconds / self._best_seconds(offer))

    def requests(self, count: int, sources: tuple[Tier, ...]) -> list[Outcome]:
        return [self.request(sources) for _ in range(count)]

    def _load(self, sources: tuple[Tier, ...], deadline: float) -> tuple[float, int]:
        waited, num_loaded = 0.0, 0
        for source in Tier:
            asked = sources.count(source)
            if not asked:
                continue
            noise = math.exp(self.rng.gauss(0, self.noise))
            arrivals = self.links[source].arrivals(asked, noise)
            left = deadline - waited
            in_time = sum(seconds <= left for seconds in arrivals)
            num_loaded += in_time
            if in_time < asked:
                self.model.observe_load_failed(source, left, in_time * CHUNK_BYTES)
                return deadline, num_loaded
            self.model.observe_load(source, asked * CHUNK_BYTES, arrivals[-1])
            waited += arrivals[-1]
        return waited, num_loaded

    def _compute(self, start: int) -> float:
        seconds = self.compute_seconds(start, PROMPT_TOKENS)
        self.now += seconds
        self.model.observe_prefill(PROMPT_TOKENS - start, start, seconds)
        return seconds

    def _best_seconds(self, offer: LoadOffer) -> float:
        """What somebody who knows the links would have needed, without noise."""
        best = self.compute_seconds(0, PROMPT_TOKENS)
        for num_chunks in range(1, len(offer.sources) + 1):
            load = sum(
                self.links[source].arrivals(count, 1.0)[-1]
                for source in Tier
                if (count := offer.sources[:num_chunks].count(source))
            )
            rest = self.compute_seconds(offer.tokens_after(num_chunks), PROMPT_TOKENS)
            best = min(best, load + rest)
        return best
