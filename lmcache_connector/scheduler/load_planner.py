"""Decides how much of a request's hit to load, and plans the load job."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from lmcache_connector.cost_model.policy import LoadPolicy
from lmcache_connector.kv_parts.blocks import BlocksInUse, blocks_between
from lmcache_connector.kv_parts.hit import Hit, chunks_to_load, first_token_to_load
from lmcache_connector.kv_parts.part import BlockTables, Rule, keys_of_part
from lmcache_connector.lookup.chunk_index import ChunkIndex
from lmcache_connector.lookup.hit_finder import HitElsewhere
from lmcache_connector.metrics.samples import Tally
from lmcache_connector.plans import JobResult, LoadJob, Outcome, PartRun, Tier
from lmcache_connector.scheduler.request_state import RequestState, SchedulerSettings
from lmcache_connector.vllm_compat.short_loads import ShortLoad

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class LoadPlanner:
    """Plans to load the part of a hit that ``policy`` finds faster to load than to compute.

    Owns the load part of every request's state.
    """

    settings: SchedulerSettings
    index: ChunkIndex
    policy: LoadPolicy
    tally: Tally
    new_job_id: Callable[[], int]

    def offer(
        self, state: RequestState, num_computed_tokens: int, hit: Hit, *, may_be_in_step: bool
    ) -> int:
        """How many tokens after the computed ones to load. Sets ``load.in_step``: whether to load
        them inside the step being planned, if ``may_be_in_step``.

        The decision stands until the request is preempted, or until the computed tokens or the
        chunks loadable inside the step change.
        """
        load = state.load
        num_firm = self._num_firm(state, num_computed_tokens, hit) if may_be_in_step else 0
        decided = load.decided_from, load.num_firm
        if hit and (load.end is None or decided != (num_computed_tokens, num_firm)):
            self._decide(state, num_computed_tokens, hit, num_firm)
        end = hit.stop if load.end is None else hit.up_to(load.end).stop
        end_token = state.keys.end_of(end)
        keys = self._keys_of(state, num_computed_tokens, end_token)
        load.in_step = (
            load.job is None  # else no job is planned, and vLLM would count on it
            and 0 < end - hit.first <= num_firm
            and self.index.num_firm(keys) == len(keys)
            and self.policy.fits_in_step(self.policy.bytes_of(keys))
        )
        if load.in_step:  # for loads between steps, vLLM itself recomputes the last token
            end_token = min(end_token, state.request.num_tokens - 1)
        num_tokens = end_token - num_computed_tokens
        # At a border of chunked attention no KV is needed, and vLLM would wait for a load without
        # chunks.
        if num_tokens <= 0 or not keys:
            return 0
        load.offered_from = num_computed_tokens
        if load.is_second:
            # One retry only: whenever vLLM admits a load, it reserves blocks for requests whose
            # load has failed, and might never admit another load of such a request.
            load.is_allowed = False
        return num_tokens

    def pays(self, state: RequestState, num_computed_tokens: int, hit: HitElsewhere) -> bool:
        """Whether to load ``hit``, which is longer than what the request's source offers."""
        end = min(state.keys.end_of(hit.stop), state.request.num_tokens)
        num_bytes = self.policy.bytes_of(hit.missing)
        return all(
            self.policy.pays_from(tier, num_computed_tokens, end, num_bytes) for tier in hit.tiers
        )

    def plan(
        self, state: RequestState, block_ids: BlockTables, num_tokens: int, in_use: BlocksInUse
    ) -> LoadJob:
        """The load of the ``num_tokens`` that vLLM accepted of the offer, into the request's blocks
        (per KV cache group), some of which may be ``in_use``."""
        load, chunk_size = state.load, self.settings.chunk_size
        end_token = load.offered_from + num_tokens
        if load.in_step and end_token == state.request.num_tokens - 1:
            end_token = min(-(-end_token // chunk_size) * chunk_size, end_token + 1)
        runs = self._runs(state, block_ids, end_token)
        keys = tuple(key for run in runs for key in run.keys)
        is_fetched = any(tier is not Tier.CPU for tier in self._tiers(state, keys))
        return LoadJob(
            job_id=self.new_job_id(),
            request_id=state.request.request_id,
            runs=runs,
            deadline_seconds=load.deadline_seconds,
            may_fetch=is_fetched,
            after_job=max(map(self.index.planned_job, keys)),
            after_passes=not load.in_step
            and in_use.includes_any({i for run in runs for ids in run.block_ids for i in ids}),
            claim=state.claim,
            source=state.source if is_fetched else None,
            in_step=load.in_step,
        )

    def planned(self, state: RequestState, job: LoadJob, num_tokens: int) -> None:
        """Account for ``job``, planned for ``num_tokens``. For the request, a load inside the step
        ends at once."""
        load, tiers = state.load, self._tiers(state, job.keys)
        if job.in_step:
            self.policy.load_planned_in_step(self.policy.bytes_of(job.keys))
            self.tally.count("loads_in_step")
            self._count_saved(load.offered_from, load.offered_from + num_tokens)
            num_tokens = state.keys.end_of(job.runs[-1].chunks[-1] + 1) - load.offered_from
        else:
            load.job = job
            if job.source is None:  # a named source says nothing about other peers
                self.policy.load_planned(job, tiers)
        self.tally.count("load_jobs")
        by_chunk: dict[int, Tier] = {}
        for chunk, tier in zip((i for run in job.runs for i in run.chunks), tiers, strict=True):
            by_chunk[chunk] = Tier.last_of((tier, by_chunk.get(chunk, Tier.CPU)))
        load.fetched_tokens, num_chunks = 0, Counter(by_chunk.values())
        for tier in (Tier.PEER, Tier.REDIS):
            num_here = min(
                num_tokens - load.fetched_tokens, num_chunks[tier] * self.settings.chunk_size
            )
            self.tally.count("hit_tokens", tier.value, amount=num_here)
            load.fetched_tokens += num_here
        self.tally.count("hit_tokens", Tier.CPU.value, amount=num_tokens - load.fetched_tokens)

    def ended(
        self, state: RequestState, job: LoadJob, num_chunks: int, results: Sequence[JobResult]
    ) -> ShortLoad | None:
        """All ranks have reported; the job's first ``num_chunks`` chunks arrived on each.

        A model with more than full attention cannot use an incomplete load: the request begins
        again, and if chunks were merely missing, one more load may be offered.
        """
        load, keys = state.load, state.keys
        load.job = None
        if job.source is None:
            self.policy.load_ended(job.job_id, results)
        if state.request.is_finished():  # aborted: nothing is recomputed or saved
            return None
        first = load.offered_from // self.settings.chunk_size
        end = keys.end_of(job.runs[-1].chunks[-1] + 1)
        is_whole = num_chunks == len(job.keys)
        if not is_whole:
            stop = first + num_chunks if self.settings.is_prefix_only else first
            self.tally.count("recomputed_tokens", amount=end - keys.end_of(stop))
            end = keys.end_of(stop)
        self._count_saved(load.offered_from, end)
        if job.source is not None:
            num_tokens = min(max(0, end - load.offered_from), load.fetched_tokens)
            self.tally.count("p2p_hit_tokens", amount=num_tokens)
            self.tally.count("p2p_received_bytes", amount=sum(r.fetched_bytes for r in results))
            seconds = max(result.fetch_seconds for result in results)
            self.tally.count("p2p_receive_seconds", amount=seconds)
            if not is_whole:
                self.tally.count("p2p_failed_loads", "missing")
        if is_whole:
            return None
        # Do not retry a tier that failed: recompute this request.
        may_try_again = load.is_allowed and not self.settings.is_prefix_only
        were_missing = all(each.outcome in (Outcome.DONE, Outcome.MISSING) for each in results)
        load.is_allowed = may_try_again and not load.is_second and were_missing
        load.is_second = True
        if load.is_allowed:
            load.end = None
        if not self.settings.is_prefix_only:
            return ShortLoad(state.request, 0)
        return ShortLoad(state.request, max(load.offered_from, end))

    def _keys_of(self, state: RequestState, start: int, end_token: int) -> list[bytes]:
        """Keys that a load of tokens ``[start, end_token)`` reads."""
        parts, size, keys = self.settings.parts, self.settings.chunk_size, state.keys.loadable
        return [
            key
            for number, part in enumerate(parts)
            if (chunks := chunks_to_load(part, size, start, end_token))
            for key in keys_of_part(keys[chunks.start : chunks.stop], number, len(parts))
        ]

    def _num_firm(self, state: RequestState, num_computed_tokens: int, hit: Hit) -> int:
        """How many chunks from the hit's first one may be loaded inside the step; 0 for models
        with states, as vLLM copies states before any load runs."""
        if (
            not hit
            or state.transfer.loads
            or any(p.rule is Rule.STATE for p in self.settings.parts)
        ):
            return 0
        keys = self._keys_of(state, num_computed_tokens, state.keys.end_of(hit.stop))
        num_firm = self.index.num_firm(keys)
        if num_firm == len(keys):
            return hit.stop - hit.first
        return num_firm if self.settings.is_prefix_only else 0

    def _runs(
        self, state: RequestState, block_ids: BlockTables, end_token: int
    ) -> tuple[PartRun, ...]:
        """The runs of a load up to ``end_token``. States and windows come first, because the rest
        is useless without them."""
        parts, chunk_size = self.settings.parts, self.settings.chunk_size
        start, end, keys = state.load.offered_from, -(-end_token // chunk_size), state.keys.loadable
        tail, runs = state.keys.loaded_tail, []
        for number, part in reversed(list(enumerate(parts))):
            chunks = chunks_to_load(part, chunk_size, start, end_token)
            if not chunks:
                continue
            first = first_token_to_load(part, start, end_token)
            skipped = (first - chunks.start * chunk_size) // part.block_size
            run = state.run(
                parts,
                number,
                chunks,
                keys_of_part(keys[chunks.start : end], number, len(parts)),
                blocks_between(part, block_ids, first, end_token),
                self.index.num_owners(number),
                skip_blocks=0 if part.rule is Rule.STATE else skipped,
                tail_tokens=end_token % chunk_size if tail and tail.chunk in chunks else 0,
            )
            runs.append(run)
        return tuple(runs)

    def _decide(
        self, state: RequestState, num_computed_tokens: int, hit: Hit, num_firm: int
    ) -> None:
        load, request = state.load, state.request
        load.end, load.deadline_seconds = hit.stop, self.settings.load_deadline_seconds
        load.decided_from, load.num_firm = num_computed_tokens, num_firm
        if num_computed_tokens >= request.num_tokens or state.transfer.loads:
            return  # a transferred prompt is never computed again
        keys = [
            keys_of_part(state.keys.keys[hit.first : hit.stop], i, len(self.settings.parts))
            for i, part in enumerate(self.settings.parts)
            if part.rule is Rule.PREFIX
        ]
        by_part = [self._tiers(state, each) for each in keys]
        more: dict[str, Any] = {}
        if not self.settings.is_prefix_only:
            more["ends"] = [end - hit.first for end in hit.ends]
            more["other_bytes"] = partial(self._other_bytes, state, num_computed_tokens, hit.first)
        all_keys = [key for each in keys for key in each]
        decision = self.policy.decide(
            num_computed_tokens,
            request.num_tokens,
            all_keys,
            list(map(Tier.last_of, zip(*by_part, strict=True)))
            or [Tier.CPU] * (hit.stop - hit.first),
            after_job=max(map(self.index.planned_job, all_keys), default=0),
            num_firm=num_firm,
            **more,
        )
        load.end = hit.first + decision.num_chunks
        load.deadline_seconds = decision.deadline_seconds
        declined = (hit.stop - load.end) * self.settings.chunk_size
        self.tally.count("decisions", decision.reason.value)
        self.tally.count("declined_tokens", amount=declined)
        logger.debug("Request %s: %s", request.request_id, decision)

    def _other_bytes(
        self, state: RequestState, num_computed_tokens: int, first: int, num_chunks: int
    ) -> dict[Tier, int]:
        """Bytes of windows and states that a load ending ``num_chunks`` after chunk ``first``
        needs, by tier."""
        parts, end = self.settings.parts, first + num_chunks
        found = dict.fromkeys(Tier, 0)
        for number, part in enumerate(parts):
            if part.rule is Rule.PREFIX:
                continue
            size = self.settings.chunk_size
            chunks = chunks_to_load(part, size, num_computed_tokens, end * size)
            keys = keys_of_part(state.keys.keys[chunks.start : end], number, len(parts))
            for key, tier in zip(keys, self._tiers(state, keys), strict=True):
                found[tier] += self.policy.bytes_of((key,))
        return found

    def _tiers(self, state: RequestState, keys: Sequence[bytes]) -> list[Tier]:
        """The tier that each key is expected in."""
        place_of = state.lookup.place_of
        in_cpu = self.index.has_each(keys)
        return [Tier.CPU if held else place_of(k) for k, held in zip(keys, in_cpu, strict=True)]

    def _count_saved(self, start: int, end: int) -> None:
        """Tokens ``[start, end)`` were loaded instead of computed."""
        if end <= start:
            return
        seconds = self.policy.model.compute_seconds(start, end)
        self.tally.count("prefill_saved_tokens", amount=end - start)
        self.tally.count("prefill_saved_seconds", amount=seconds or 0.0)
