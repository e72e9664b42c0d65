"""Compute or load, as the scheduler side asks it: keeps the cost model supplied with measurements.

Where they come from:

- at start every rank times a load from memory (the self-test) and from Redis (a probe), and hands
  both over before the first request (:meth:`LoadPolicy.observe_measured`);
- every load and store reports the time it was served and the time it waited before. The waiting is
  not the tier's: how long stores keep loads waiting that rely on them is learned on its own;
- how long steps last, the scheduler side sees by its own calls: it plans one when one has ended;
- the worker times each forward pass that computes a few dozen prompt tokens or more. The
  scheduler side cannot: with asynchronous scheduling it hears of a step while the next one runs;
- while Redis is not loaded from although requests ask for what it holds, the worker reads a few
  values of its own now and then. No request is ever slowed down to find out whether Redis is back.
  Peers are not probed: loads alone tell how fast they are.

Waiting for Redis or peers to say what they hold costs time too, hit or miss. They are waited for
only as long as a small share of the prompt's own compute, and not at all where the last answer of
each took longer. A request that is to be asked again loses a step, however soon the answer comes:
longer steps are lost only where the hit that may be expected gains more.

Redis is measured for its own sake while requests would use it and nobody knows its speed.

Runs on the scheduler thread only. Pure: time comes from ``clock``, in seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from lmcache_connector.cost_model.cost_model import CostModel
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
    StoreJob,
    Tier,
)

_FRESH_SECONDS = 60.0
"""After that long without news from Redis, requests that could use it have it probed."""
_MIN_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 2.0, 60.0
"""Between two probes; doubles while they change nothing."""


class ProbePace:
    """``clock`` gives seconds, monotonic. ``is_wanted``: a plain attribute, cheap to
    look at in every step."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heard_at = self._next_at = -inf
        self._pause = _MIN_PAUSE_SECONDS
        self.is_wanted = False

    def heard(self) -> None:
        """Something was learned of Redis, by a probe or not."""
        self._heard_at = self._clock()

    def request_if_stale(self, *, is_bad: bool) -> None:
        """``is_bad``: what was heard last. It is asked again, and so is what was heard long ago."""
        if is_bad or self._clock() - self._heard_at > _FRESH_SECONDS:
            self.want()

    def want(self) -> None:
        """Whoever asks would use Redis, if it were quick."""
        self.is_wanted = True

    def restart(self) -> None:
        """A probe has changed what is known: the next ones may come soon."""
        self._pause = _MIN_PAUSE_SECONDS

    def take(self) -> bool:
        """Whether to probe now, asked once per step."""
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
"""Of a prompt's compute: the longest wait for Redis to say what it holds."""
_MIN_LOOKUP_SECONDS = 0.002
"""Two thread switches and a round trip on one host; prompts this cheap lose nothing that shows."""
_IN_STEP_SHARE = 0.2
"""Of a step, what copies may add to it for the sake of requests that begin with it."""
_MAX_IN_STEP_SECONDS = 0.05
"""Of one copy, though nothing runs: a request that comes meanwhile would wait for it."""
_LATE_WEIGHT = 0.3
"""Of the last load from memory, in how much longer than predicted they wait for their turn."""
_FORGET_LATE_SECONDS = 60.0
"""After that long without a load from memory, none is taken to wait longer than predicted."""


@dataclass(frozen=True, slots=True)
class _Running:
    """A load on its way. ``fetches``: chunks that memory lacks, and the tiers that bring them.
    ``num_bytes``: of the rank with the largest part, per tier. ``wait_seconds``: predicted before
    it begins. Waiting for its turn it is not late by more than ``deadline_seconds``."""

    fetches: tuple[tuple[bytes, Tier], ...]
    num_bytes: dict[Tier, int]
    wait_seconds: float
    deadline_seconds: float


class LoadPolicy:
    """Decides which hits to load, and learns from what jobs, forward passes and probes took.

    A chunk has ``chunk_tokens`` tokens. What is stored of it for each of the model's parts has
    ``value_bytes``, on the rank with the largest share; the first ``num_prefix_parts`` are needed
    of every chunk. A prompt passes ``num_stages`` of a pipeline one after the other. ``clock``
    gives seconds, monotonic. ``remote_tiers``: those behind the CPU tier that there are.
    ``probes``: when the workers shall measure Redis.
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
        """No request waits or runs, and no job is under way. What was measured stays."""
        self._running: dict[int, _Running] = {}
        self._queued_bytes = dict.fromkeys(Tier, 0)
        self._fetching: Counter[tuple[bytes, Tier]] = Counter()
        self._stores = StoreBacklog(self._clock)
        self._num_requests = 0
        self._waiting: set[str] = set()
        self._prompt_tokens = 0  # left of the requests that run, and of those that begin
        self._num_admitted, self._copy_seconds = 0, 0.0  # by the step being planned

    def learn_sizes(self, value_bytes: Sequence[int]) -> None:
        """What values of each part take, once that is known better. Before any decision."""
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
        """Decide one request, once.

        Its hit chunks are those from the one that holds token ``context_tokens`` on. ``tiers`` says
        of each where it is; ``keys`` name what is stored of them. ``ends`` and ``other_bytes``: see
        :class:`LoadOffer`. ``after_job``: the last store that the load relies on. ``num_firm``: so
        many of the chunks may be loaded inside the step.
        """
        queued = dict(self._queued_bytes)
        # What others fetch already is waited for, and copied from memory then.
        for tier in self.remote_tiers if self._fetching else ():
            shared = sum(self.bytes_of(key) for key in keys if (key, tier) in self._fetching)
            queued[tier] = max(0, queued[tier] - shared)
        step_seconds = self._step_seconds()
        decision = self.model.decide(
            LoadOffer(
                context_tokens=context_tokens,
                prompt_tokens=prompt_tokens,
                chunk_tokens=self._chunk_tokens,
                chunk_bytes=self._chunk_bytes,
                tiers=tuple(tiers),
                queued_bytes=queued,
                running_requests=self._num_requests,
                wait_seconds=self._wait_seconds(after_job),
                step_seconds=step_seconds,
                waiting_requests=self._num_others,
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
        last_lookup_seconds: Mapping[Tier, float],
    ) -> float:
        """Seconds to wait for Redis and peers to say what they hold of a prompt; 0: do not ask. The
        last answer of each took ``last_lookup_seconds``."""
        if self.model.mode == "always":
            return inf
        if Tier.REDIS in self.remote_tiers:
            self.probes.request_if_stale(is_bad=self.model.is_stalled(Tier.REDIS))
        usable = self._usable_tiers
        if not usable:
            return 0.0
        compute = self.model.compute_seconds(context_tokens, prompt_tokens, self._num_requests)
        if compute is None:
            return inf
        longest = max(LOOKUP_SHARE * compute, _MIN_LOOKUP_SECONDS)
        quickest = min(last_lookup_seconds.get(tier, 0.0) for tier in usable)
        return longest if quickest <= longest else 0.0

    def compute_seconds(self, start: int, end: int) -> float:
        """What tokens ``[start, end)`` take beside what runs now; infinite where that is not known,
        or loads never give way to it."""
        seconds = self.model.compute_seconds(start, end, self._num_requests)
        return inf if seconds is None or self.model.mode == "always" else seconds

    def is_worth_a_step(
        self,
        context_tokens: int,
        prompt_tokens: int,
        num_bytes: int,
        found_share: float,
        left_seconds: float,
    ) -> bool:
        """Whether a request whose look-up has no answer yet does better to be asked again with the
        next step than to begin with this one.

        ``context_tokens``: computed, or known to be in a tier. ``num_bytes``: of what was asked
        for; ``found_share`` of such things was held lately. ``left_seconds``: what
        :meth:`lookup_seconds` allows it to wait yet.
        """
        lost_seconds = (self._step_seconds() or 0.0) / (1 + self._num_others)
        if lost_seconds <= left_seconds:
            return True
        asked = context_tokens, prompt_tokens, num_bytes
        gains = (self._gain_seconds(tier, *asked) for tier in self._usable_tiers)
        return found_share * max(gains, default=0.0) > lost_seconds

    @property
    def are_tiers_stalled(self) -> bool:
        """Nothing came lately from any tier behind the CPU tier."""
        return not self._usable_tiers

    def fetchable_bytes_in(self, seconds: float) -> int:
        """What the slowest tier in use brings in that time, as far as is known; 2**62 if nothing
        is."""
        speeds = (self.model.bytes_per_second(tier) for tier in self._usable_tiers)
        return int(min(min(speeds, default=0.0) * seconds, float(1 << 62)))

    def pays_from_memory(self, start: int, end: int, num_bytes: int) -> bool:
        """Whether tokens ``[start, end)`` are quicker loaded from memory than computed, beside the
        steps that run now."""
        return self._gain_seconds(Tier.CPU, start, end, num_bytes) >= 0

    def fits_in_step(self, num_bytes: int) -> bool:
        """Whether a load from memory costs less inside the step being planned than beside it."""
        return self.model.load_seconds(Tier.CPU, num_bytes) <= self._in_step_seconds()

    def bytes_of(self, key: bytes) -> int:
        """Of what is stored under a key, on the rank with the largest share."""
        return self._value_bytes[part_of(key, len(self._value_bytes))]

    # -- measurements --------------------------------------------------------------------------

    def step_planned(self, num_requests: int, prompt_tokens: int, *, has_prefill: bool) -> None:
        """``num_requests`` run in this step, which leaves ``prompt_tokens`` of their prompts to
        later ones. ``has_prefill``: it computes many, or loads."""
        now, follows = self._clock(), self._num_requests > 0
        self.model.steps.planned(now, follows=follows, has_prefill=has_prefill)
        self._num_requests, self._prompt_tokens = num_requests, prompt_tokens
        self._num_admitted, self._copy_seconds = 0, 0.0

    def request_arrived(self, request_id: str) -> None:
        """It waits to be computed, or to be loaded first."""
        self._waiting.add(request_id)

    def request_admitted(self, request_id: str, num_tokens: int) -> None:
        """The step being planned begins to compute a prompt, of which so much is left."""
        self._waiting.discard(request_id)
        self._prompt_tokens += num_tokens
        self._num_admitted += 1

    def request_ended(self, request_id: str, num_requests: int) -> None:
        """``num_requests`` of the last step's run still."""
        self._waiting.discard(request_id)
        self._num_requests = num_requests

    def store_planned(self, job: StoreJob) -> None:
        self._stores.planned(job.job_id)

    def store_ended(self, job_id: int, results: Sequence[JobResult]) -> None:
        """All ranks have reported; the slowest counts. Without results, no rank has heard of it."""
        self._stores.ended(job_id, [r.waited_seconds + r.seconds for r in results])

    def load_planned(self, job: LoadJob, tiers: Sequence[Tier]) -> None:
        """``job`` is on its way. ``tiers``: where each of its chunks is."""
        places = list(zip(job.keys, tiers, strict=True))
        num_bytes = dict.fromkeys(Tier, 0)
        for key, tier in places:
            num_bytes[tier] += self.bytes_of(key)
        fetches = tuple(place for place in places if place[1] is not Tier.CPU)
        wait_seconds = self._queued_bytes[Tier.CPU] / self.model.bytes_per_second(
            Tier.CPU
        ) + self._stores.wait_seconds(job.after_job)
        self._running[job.job_id] = _Running(fetches, num_bytes, wait_seconds, job.deadline_seconds)
        self._fetching.update(fetches)
        for tier, count in num_bytes.items():
            self._queued_bytes[tier] += count

    def load_planned_in_step(self, num_bytes: int) -> None:
        """All in the step being planned wait for its copy."""
        self._copy_seconds += self.model.load_seconds(Tier.CPU, num_bytes)

    def load_ended_in_step(self, results: Sequence[JobResult]) -> None:
        """All ranks have reported. The slowest counts."""
        self._observe_load(max(results, key=lambda result: result.seconds))

    def load_ended(self, job_id: int, results: Sequence[JobResult]) -> None:
        """All ranks have reported. The one that failed, or else the slowest, counts."""
        running = self._running.pop(job_id)
        for tier, count in running.num_bytes.items():
            self._queued_bytes[tier] -= count
        self._fetching.subtract(running.fetches)
        for fetch in running.fetches:
            if not self._fetching[fetch]:
                del self._fetching[fetch]
        slowest = max(results, key=lambda r: (r.has_fetch_failed, r.seconds))
        if not running.fetches:
            late = max(0.0, slowest.waited_seconds - running.wait_seconds)
            late = min(late, running.deadline_seconds)  # the rest was one long forward pass
            self._late_seconds += _LATE_WEIGHT * (late - self._late_seconds)
            self._late_at = self._clock()
        self._observe_load(slowest)

    def prefetch_ended(self, results: Sequence[JobResult]) -> None:
        """All ranks have reported. How fast it was says nothing of loads, which go first; that
        a tier failed does."""
        for fetched in (each for result in results for each in result.fetched):
            if fetched.has_failed:
                self._heard_of(fetched.tier)
                self.model.observe_load_failed(fetched.tier, fetched.seconds, fetched.num_bytes)

    def observe_reports(self, reports: Sequence[RankReport]) -> None:
        """Forward passes and probes of one step. The slowest rank counts."""
        slowest: dict[PrefillWork, float] = {}
        for forward in (each for report in reports for each in report.forwards):
            slowest[forward.work] = max(forward.seconds, slowest.get(forward.work, 0.0))
        for work, seconds in slowest.items():
            self.model.observe_prefill(
                work.num_tokens,
                work.context_tokens,
                seconds * self._num_stages,
                work.running_requests,
            )
        self.observe_measured([report.measured for report in reports])

    def observe_measured(self, ranks: Sequence[Sequence[Fetched]]) -> None:
        """What each rank has loaded for its own sake, at its start or by a probe. Of each tier the
        slowest rank counts."""
        for tier in Tier:
            by_rank = ([each for each in rank if each.tier is tier] for rank in ranks)
            if found := [loads for loads in by_rank if loads]:
                self._measured(tier, min(found, key=_slowness))

    # -- details -------------------------------------------------------------------------------

    @property
    def _usable_tiers(self) -> list[Tier]:
        """Those behind the CPU tier that brought something lately, as far as is known."""
        return [tier for tier in self.remote_tiers if not self.model.is_stalled(tier)]

    @property
    def _num_others(self) -> int:
        """Requests that wait beside the one in question."""
        return max(0, len(self._waiting) - 1)

    def _step_seconds(self) -> float | None:
        """Of the steps that follow the one being planned; ``None`` if nothing runs in them. What
        is left of prompts then comes to an end in this one, or goes on."""
        if not (self._num_requests or self._prompt_tokens):
            return None
        limit = self.model.max_step_tokens
        return self.model.step_seconds(min(limit, max(0, self._prompt_tokens - limit)))

    def _in_step_seconds(self) -> float:
        """The longest copy that is worth making inside the step being planned.

        It costs each request of the step as long as it takes. Beside the steps, the load would cost
        its own request the next step, and those that no load avoids. Copies of a fifth of the step
        together delay a token less than the prompts do that others begin with.
        """
        others, limit = self._num_requests + self._num_admitted, self.model.max_step_tokens
        if not others:
            return _MAX_IN_STEP_SECONDS
        tokens, next_seconds = min(limit, self._prompt_tokens), self._step_seconds()
        lost_seconds = self.model.steps.lost_seconds(next_seconds) + (next_seconds or 0.0)
        small_seconds = _IN_STEP_SHARE * self.model.step_seconds(tokens) - self._copy_seconds
        return min(max(small_seconds, lost_seconds / (1 + others)), _MAX_IN_STEP_SECONDS)

    def _gain_seconds(self, tier: Tier, start: int, end: int, num_bytes: int) -> float:
        """Beside the steps that run now."""
        now = (self._num_requests, self._step_seconds(), self._num_others)
        return self.model.gain_seconds(tier, start, end, num_bytes, *now)

    def _wait_seconds(self, after_job: int) -> float:
        """Before a load can begin, apart from the loads ahead of it."""
        late = self._late_seconds if self._clock() - self._late_at < _FORGET_LATE_SECONDS else 0.0
        return late + self._stores.wait_seconds(after_job)

    def _observe_load(self, result: JobResult) -> None:
        """What was fetched had to be copied too, in whatever time that took: deadlines count
        it, so a load that was cut off counts it as well."""
        copy_seconds = max(0.0, result.seconds - result.fetch_seconds)
        telling = [each for each in result.fetched if each.num_bytes or each.has_failed]
        for fetched in telling:
            share = min(1.0, fetched.num_bytes / max(1, result.num_bytes))
            seconds = fetched.seconds + share * copy_seconds
            self._heard_of(fetched.tier)
            if fetched.has_failed:
                self.model.observe_load_failed(fetched.tier, seconds, fetched.num_bytes)
            else:
                self.model.observe_load(fetched.tier, fetched.num_bytes, seconds)
        if not telling and result.outcome is Outcome.DONE and result.num_bytes > 0:
            self.model.observe_load(Tier.CPU, result.num_bytes, copy_seconds)

    def _heard_of(self, tier: Tier) -> None:
        if tier is Tier.REDIS:
            self.probes.heard()

    def _measured(self, tier: Tier, loads: Sequence[Fetched]) -> None:
        """A load is a fetch and then a copy: the copy's time is added to what was measured."""
        self._heard_of(tier)
        if loads[0].has_failed:
            self.model.observe_load_failed(tier, loads[0].seconds)
            return
        copy_speed = inf if tier is Tier.CPU else self.model.bytes_per_second(Tier.CPU)
        brought = [each for each in loads if each.num_bytes]
        if brought and self.model.is_stalled(tier):
            self.probes.restart()
        copied = [(each.num_bytes, each.seconds + each.num_bytes / copy_speed) for each in brought]
        self.model.observe_measured(tier, copied)


def _slowness(loads: Sequence[Fetched]) -> tuple[bool, float]:
    """Orders what ranks have measured of one tier, the slowest first."""
    return not loads[0].has_failed, loads[0].num_bytes / max(loads[0].seconds, 1e-6)
