"""Compute or load, for the scheduler side: feeds measurements to the cost model, and queries it.

Measurements come from:

- engine start: every rank times a load from memory (the self-test) and from Redis (a probe), and
  reports both before the first request (:meth:`LoadPolicy.observe_measured`);
- every load and store, which reports its service time and its queueing time. Queueing
  does not count as the tier's: how long stores delay loads that need them is learned separately;
- the scheduler side, which times steps by its own calls: it plans a step when one has ended;
- the worker, which times each forward pass that computes a few dozen prompt tokens or more. The
  scheduler side cannot: with asynchronous scheduling it hears of a step while the next one runs;
- probes: while requests hit in Redis but do not load from it, or look up chunks though Redis stalls
  or was last measured over a minute ago, the worker now and then reads a few values of its own, so
  that no request must find out whether Redis is fast again. Only loads measure the speed of peers.

A lookup in Redis or peers costs time too, hit or miss. A request waits for the answer only for a
small share of its prompt's compute, and not at all if the last answer of every tier took longer. A
request that must ask again loses a step, however soon the answer comes: a step longer than this
wait is lost only for an expected hit that saves more.

Runs on the scheduler thread only. Pure: time comes from ``clock``, in seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from lmcache_connector.cost_model.cost_model import MIN_GAIN_SHARE, CostModel
from lmcache_connector.cost_model.decision import LoadDecision, LoadOffer
from lmcache_connector.cost_model.steps import StoreBacklog
from lmcache_connector.kv_parts.part import part_of
from lmcache_connector.plans import (
    Fetched,
    JobResult,
    LoadJob,
    Outcome,
    PrefillWork,
    RankReport,
    Tier,
)

_FRESH_SECONDS = 60.0
"""Redis is probed for requests that could use it if its last measurement is older."""
_MIN_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 2.0, 60.0
"""Pause between two probes; doubles while probes change nothing."""


class ProbePace:
    """Decides when to probe Redis. ``clock`` is monotonic, in seconds. ``is_wanted`` is a plain
    attribute, cheap to poll every step."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._next_at = -inf
        self._pause = _MIN_PAUSE_SECONDS
        self.is_wanted = False

    def want(self) -> None:
        """A request would use Redis if Redis were fast."""
        self.is_wanted = True

    def restart(self) -> None:
        """A probe has ended a stall: the next probes may come soon."""
        self._pause = _MIN_PAUSE_SECONDS

    def take(self) -> bool:
        """Whether to probe now; called once per step."""
        if not self.is_wanted:
            return False
        self.is_wanted = False
        now = self._clock()
        if now < self._next_at:
            return False
        self._next_at = now + self._pause
        self._pause = min(2 * self._pause, _MAX_PAUSE_SECONDS)
        return True


LOOKUP_SHARE = 0.04
"""Longest wait for a lookup, as a share of the prompt's compute."""
MIN_LOOKUP_SECONDS = 0.002
"""Two thread switches and a round trip on one host; even a short prompt can afford this wait."""
_IN_STEP_SHARE = 0.2
"""Longest delay of a step by copies for requests that begin with it, as a share of the step."""
_MAX_IN_STEP_SECONDS = 0.05
"""Longest copy inside a step, even an empty one: a request that arrives meanwhile waits."""
_LATE_WEIGHT = 0.3
"""Weight of the last load from memory in the average delay of loads behind their prediction.

Without this, where every load begins 20 ms late, each hit of 512 tokens (17 ms of compute, 3 ms of
copies) took 1.59 times as long as recompute; with it, all after the first four take 1.00."""
_FORGET_LATE_SECONDS = 60.0
"""Without a load from memory for so long, loads are assumed to begin on time again."""


@dataclass(frozen=True, slots=True)
class _Running:
    """An open load. ``fetches``: chunks that memory lacks, with their tiers. ``num_bytes``: per
    tier, on the rank with the largest share. ``wait_seconds``: predicted queueing time. A queued
    load can be late by ``deadline_seconds`` at most."""

    fetches: tuple[tuple[bytes, Tier], ...]
    num_bytes: dict[Tier, int]
    wait_seconds: float
    deadline_seconds: float


class LoadPolicy:
    """Decides which hits to load, and learns from jobs, forward passes and probes.

    A chunk has ``chunk_tokens`` tokens, and ``value_bytes`` per part of the model on the rank with
    the largest share. Loads need every chunk of the first ``num_prefix_parts`` parts. A prompt
    passes ``num_stages`` pipeline stages one after the other. ``clock`` is monotonic, in seconds.
    ``remote_tiers``: the configured tiers below the CPU tier. ``probes``: when to measure Redis.
    ``stores``: open stores, which the scheduler side reports to it.
    """

    def __init__(
        self,
        model: CostModel,
        chunk_tokens: int,
        value_bytes: Sequence[int],
        clock: Callable[[], float],
        num_stages: int = 1,
        num_prefix_parts: int = 1,
        remote_tiers: Sequence[Tier] = (Tier.REDIS,),
    ) -> None:
        self.model = model
        self.remote_tiers = remote_tiers
        self._chunk_tokens = chunk_tokens
        self._num_prefix_parts = num_prefix_parts
        self.learn_sizes(value_bytes)
        self._clock = clock
        self._num_stages = num_stages
        self.forget_all()
        self._late_seconds, self._late_at = 0.0, -inf
        self.probes = ProbePace(clock)

    def forget_all(self) -> None:
        """Drop all requests and jobs; measurements stay."""
        self._running: dict[int, _Running] = {}
        self._queued_bytes = dict.fromkeys(Tier, 0)
        self._fetching: Counter[tuple[bytes, Tier]] = Counter()
        self.stores = StoreBacklog(self._clock)
        self._num_requests = 0
        self._waiting: set[str] = set()
        self._prompt_tokens = 0  # left of requests that run or begin
        self._num_admitted, self._copy_seconds = 0, 0.0  # in the step being planned

    def learn_sizes(self, value_bytes: Sequence[int]) -> None:
        """Set the bytes per chunk of each part, as the ranks report them, before any decision."""
        self._value_bytes = tuple(value_bytes)
        self._chunk_bytes = sum(value_bytes[: self._num_prefix_parts])

    # -- decisions -----------------------------------------------------------------------------

    def decide(
        self,
        context_tokens: int,
        prompt_tokens: int,
        keys: Sequence[bytes],
        tiers: Sequence[Tier],
        ends: Sequence[int] = (),
        other_bytes: Callable[[int], Mapping[Tier, int]] | None = None,
        after_job: int = 0,
        num_firm: int = 0,
    ) -> LoadDecision:
        """Decide how much of one request's hit to load.

        The hit begins with the chunk that holds token ``context_tokens``. ``tiers`` has
        one entry per chunk, ``keys`` one per chunk and prefix part. ``ends`` and ``other_bytes``:
        see :class:`LoadOffer`. ``after_job``: the last store that the load depends on.
        ``num_firm``: how many chunks may be loaded inside the step.
        """
        queued = dict(self._queued_bytes)
        # Chunks that other loads fetch already will be copied from memory.
        for tier in self.remote_tiers if self._fetching else ():
            shared = self.bytes_of([key for key in keys if (key, tier) in self._fetching])
            queued[tier] = max(0, queued[tier] - shared)
        is_recent = self._clock() - self._late_at < _FORGET_LATE_SECONDS
        late_seconds = self._late_seconds if is_recent else 0.0
        step_seconds = self._step_seconds()
        decision = self.model.decide(
            LoadOffer(
                context_tokens=context_tokens,
                prompt_tokens=prompt_tokens,
                chunk_tokens=self._chunk_tokens,
                chunk_bytes=self._chunk_bytes,
                tiers=tuple(tiers),
                queued_bytes=queued,
                wait_seconds=late_seconds + self.stores.wait_seconds(after_job),
                step_seconds=step_seconds,
                num_waiting=max(1, len(self._waiting)),
                ends=ends,
                other_bytes=other_bytes,
                num_firm=num_firm,
                in_step_seconds=self._in_step_seconds() if num_firm else 0.0,
            )
        )
        if Tier.REDIS in tiers[decision.num_chunks :]:
            self.probes.want()
        return decision

    def lookup_seconds(
        self,
        context_tokens: int,
        prompt_tokens: int,
        expected_seconds: Mapping[Tier, float],
    ) -> float:
        """Seconds to wait for the lookup of a prompt; 0: do not wait. ``expected_seconds``: of
        a lookup in each tier with servers, as far as known."""
        if self.model.mode == "always":
            return inf
        if Tier.REDIS in self.remote_tiers:
            is_old = self._clock() - self.model.tiers[Tier.REDIS].heard_at > _FRESH_SECONDS
            if is_old or self.model.is_stalled(Tier.REDIS):
                self.probes.want()
        usable = self._usable_tiers
        if not usable:
            return 0.0
        compute = self.model.compute_seconds(context_tokens, prompt_tokens)
        if compute is None:
            return inf
        longest = max(LOOKUP_SHARE * compute, MIN_LOOKUP_SECONDS)
        quickest = min((s for t, s in expected_seconds.items() if t in usable), default=0.0)
        return longest if quickest <= longest else 0.0

    def compute_seconds(self, start: int, end: int) -> float:
        """Time to compute these tokens; infinite if unknown or if every hit is loaded."""
        seconds = self.model.compute_seconds(start, end)
        return inf if seconds is None or self.model.mode == "always" else seconds

    def is_worth_a_step(
        self,
        context_tokens: int,
        prompt_tokens: int,
        num_bytes: int,
        found_share: float,
        left_seconds: float,
    ) -> bool:
        """Whether a request whose lookup is unanswered should skip this step and ask again.

        ``context_tokens``: tokens computed or known to be in a tier. ``num_bytes``: size of the
        chunks asked for. ``found_share``: share of chunks found by recent lookups.
        ``left_seconds``: rest of the wait that :meth:`lookup_seconds` allows.
        """
        lost_seconds = (self._step_seconds() or 0.0) / max(1, len(self._waiting))
        if lost_seconds <= left_seconds:
            return True
        asked = context_tokens, prompt_tokens, num_bytes
        gains = (self._gain_seconds(tier, *asked) for tier in self._usable_tiers)
        return found_share * max(gains, default=0.0) > lost_seconds

    def pays_from(self, tier: Tier, start: int, end: int, num_bytes: int) -> bool:
        """Whether loading tokens ``[start, end)`` from the tier is faster than computing them
        beside the running steps, as far as known."""
        gain_seconds = self._gain_seconds(tier, start, end, num_bytes)
        return gain_seconds >= 0 and not self.model.is_stalled(tier)

    def fits_in_step(self, num_bytes: int) -> bool:
        """Whether a load from memory costs less inside the step being planned than beside it."""
        return self.model.load_seconds(Tier.CPU, num_bytes) <= self._in_step_seconds()

    def bytes_of(self, keys: Collection[bytes]) -> int:
        """Size of the data stored under these keys, on the rank with the largest share."""
        sizes = self._value_bytes
        if len(sizes) == 1:
            return len(keys) * sizes[0]
        return sum(sizes[part_of(key, len(sizes))] for key in keys)

    # -- measurements --------------------------------------------------------------------------

    def step_planned(self, num_requests: int, prompt_tokens: int, *, has_prefill: bool) -> None:
        """A step of ``num_requests`` is planned; ``prompt_tokens`` of their prompts remain.
        ``has_prefill``: the step computes many prompt tokens, or loads."""
        now, follows = self._clock(), self._num_requests > 0
        self.model.steps.planned(now, follows=follows, has_prefill=has_prefill)
        self._num_requests, self._prompt_tokens = num_requests, prompt_tokens
        self._num_admitted, self._copy_seconds = 0, 0.0

    def request_arrived(self, request_id: str) -> None:
        self._waiting.add(request_id)

    def request_admitted(self, request_id: str, num_tokens: int) -> None:
        """The step being planned begins a prompt of which ``num_tokens`` remain to compute."""
        self._waiting.discard(request_id)
        self._prompt_tokens += num_tokens
        self._num_admitted += 1

    def request_ended(self, request_id: str, num_requests: int) -> None:
        """``num_requests`` of the last step still run."""
        self._waiting.discard(request_id)
        self._num_requests = num_requests

    @property
    def num_open(self) -> int:
        """Stores, and loads beside the steps, that have not ended."""
        return len(self.stores) + len(self._running)

    def load_planned(self, job: LoadJob, tiers: Sequence[Tier]) -> None:
        """``tiers``: the tier of each of the job's chunks."""
        places = list(zip(job.keys, tiers, strict=True))
        num_bytes = {
            tier: self.bytes_of([key for key, each in places if each is tier]) for tier in Tier
        }
        fetches = tuple(place for place in places if place[1] is not Tier.CPU)
        copy_seconds = self._queued_bytes[Tier.CPU] * self.model.tiers[Tier.CPU].seconds_per_byte
        wait_seconds = copy_seconds + self.stores.wait_seconds(job.after_job)
        self._running[job.job_id] = _Running(fetches, num_bytes, wait_seconds, job.deadline_seconds)
        self._fetching.update(fetches)
        for tier, count in num_bytes.items():
            self._queued_bytes[tier] += count

    def load_planned_in_step(self, num_bytes: int) -> None:
        """Every request of the step being planned waits for this copy."""
        self._copy_seconds += self.model.load_seconds(Tier.CPU, num_bytes)

    def load_ended(self, job_id: int, results: Sequence[JobResult]) -> None:
        """A load beside the steps has ended."""
        running = self._running.pop(job_id)
        for tier, count in running.num_bytes.items():
            self._queued_bytes[tier] -= count
        self._fetching.subtract(running.fetches)
        for fetch in running.fetches:
            if not self._fetching[fetch]:
                del self._fetching[fetch]
        slowest = self.observe_load(results)
        if not running.fetches:
            late = max(0.0, slowest.waited_seconds - running.wait_seconds)
            late = min(late, running.deadline_seconds)  # beyond it, a forward pass delayed the load
            self._late_seconds += _LATE_WEIGHT * (late - self._late_seconds)
            self._late_at = self._clock()

    def forget_loads(self) -> None:
        """No load runs any more, and results may be lost."""
        self._running.clear()
        self._fetching.clear()
        self._queued_bytes = dict.fromkeys(Tier, 0)

    def observe_reports(self, reports: Sequence[RankReport]) -> None:
        """Forward passes and probes of one step. The slowest rank counts."""
        slowest: dict[PrefillWork, float] = {}
        for forward in (each for report in reports for each in report.forwards):
            slowest[forward.work] = max(forward.seconds, slowest.get(forward.work, 0.0))
        for work, seconds in slowest.items():
            in_all = seconds * self._num_stages
            self.model.observe_prefill(work.num_tokens, work.context_tokens, in_all)
        if any(report.measured for report in reports):
            self.observe_measured([report.measured for report in reports])

    def observe_measured(self, ranks: Sequence[Sequence[Fetched]]) -> None:
        """Measurements of each rank, at its start or by a probe. The slowest rank counts."""
        for tier in Tier:
            by_rank = ([each for each in rank if each.tier is tier] for rank in ranks)
            if found := [loads for loads in by_rank if loads]:
                self._measured(tier, min(found, key=_slowness))

    # -- details -------------------------------------------------------------------------------

    @property
    def _usable_tiers(self) -> list[Tier]:
        """Remote tiers that are not known to have stalled."""
        return [tier for tier in self.remote_tiers if not self.model.is_stalled(tier)]

    def _step_seconds(self) -> float | None:
        """Length of the steps after the one being planned; ``None`` if nothing runs in them. The
        remaining prompt tokens are computed in this step and, if too many, in later ones."""
        if not (self._num_requests or self._prompt_tokens):
            return None
        limit = self.model.max_step_tokens
        return self.model.step_seconds(min(limit, max(0, self._prompt_tokens - limit)))

    def _in_step_seconds(self) -> float:
        """The longest copy worth making inside the step being planned.

        A copy delays every request of the step by its duration. A load beside the steps instead
        costs its own request the next step and the steps that every load costs. Copies of up to a
        fifth of the step delay tokens less than the prompts of other new requests do.
        """
        others, limit = self._num_requests + self._num_admitted, self.model.max_step_tokens
        if not others:
            return _MAX_IN_STEP_SECONDS
        tokens, next_seconds = min(limit, self._prompt_tokens), self._step_seconds()
        lost_seconds = self.model.steps.lost_seconds(next_seconds) + (next_seconds or 0.0)
        small_seconds = _IN_STEP_SHARE * self.model.step_seconds(tokens) - self._copy_seconds
        return min(max(small_seconds, lost_seconds / (1 + others)), _MAX_IN_STEP_SECONDS)

    def _gain_seconds(self, tier: Tier, start: int, end: int, num_bytes: int) -> float:
        """Time saved by loading ``num_bytes`` from the tier, without a queue, instead of computing
        tokens ``[start, end)`` beside the steps that run now, less the error of predictions.
        Negative if compute is faster; infinite if unknown, or if every hit is loaded."""
        compute_seconds = self.compute_seconds(start, end)
        load_seconds = self.model.load_seconds(tier, num_bytes)
        if inf in (compute_seconds, load_seconds):
            return inf
        lost_seconds = self.model.steps.wait_seconds(load_seconds, self._step_seconds())
        lost_seconds -= load_seconds
        price_seconds = load_seconds + lost_seconds / max(1, len(self._waiting))
        return compute_seconds * (1 - MIN_GAIN_SHARE) - price_seconds

    def observe_load(self, results: Sequence[JobResult]) -> JobResult:
        """Learn from a load, beside the steps or inside one. The rank that failed, or else the
        slowest, counts; returns its result. The copy's time counts as the tier's, even if the load
        was cut off, because deadlines include it."""
        result = max(results, key=lambda each: (each.has_fetch_failed, each.seconds))
        copy_seconds = max(0.0, result.seconds - result.fetch_seconds)
        measured = [each for each in result.fetched if each.num_bytes or each.has_failed]
        now = self._clock()
        for fetched in measured:
            share = min(1.0, fetched.num_bytes / max(1, result.num_bytes))
            seconds = fetched.seconds + share * copy_seconds
            speed = self.model.tiers[fetched.tier]
            note = speed.cut_off if fetched.has_failed else speed.arrived
            note(now, fetched.num_bytes, seconds)
        if not measured and result.outcome is Outcome.DONE and result.num_bytes > 0:
            self.model.tiers[Tier.CPU].arrived(now, result.num_bytes, copy_seconds)
        return result

    def _measured(self, tier: Tier, loads: Sequence[Fetched]) -> None:
        """Learn from a measurement. Adds the time of the copy that follows each fetch."""
        if loads[0].has_failed:
            self.model.tiers[tier].cut_off(self._clock(), 0, loads[0].seconds)
            return
        per_byte = 0.0 if tier is Tier.CPU else self.model.tiers[Tier.CPU].seconds_per_byte
        brought = [each for each in loads if each.num_bytes]
        if brought and self.model.is_stalled(tier):
            self.probes.restart()
        copied = [(each.num_bytes, each.seconds + each.num_bytes * per_byte) for each in brought]
        self.model.tiers[tier].measured(self._clock(), copied)


def _slowness(loads: Sequence[Fetched]) -> tuple[bool, float]:
    """Sort key for ranks' measurements of one tier, slowest first."""
    return not loads[0].has_failed, loads[0].num_bytes / max(loads[0].seconds, 1e-6)
