"""Audits: recompute one chunk of a hit, and compare the chunk with its stored copy.

The last chunk of an audited hit is not loaded. In a hit with images, the audited chunk is the last
one that contains image tokens: a later one would be recomputed from the images' KV as loaded::

    |-- vLLM has these --|---- loaded ----| audited |-- computed --|
    0            num_computed          chunk      hit end      num_tokens

An :class:`AuditJob` reads the chunk's blocks after the forward passes that fill them, under the
same rules as a store. The chunk itself is not stored, so that it cannot replace the tier's copy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import KW_ONLY, dataclass
from itertools import chain

from lmcache_connector.audit.verdicts import AuditSampler, ChunkError, NoiseGauge, Verdict, combine
from lmcache_connector.bounded import Latest
from lmcache_connector.kv_parts.blocks import are_there, blocks_between
from lmcache_connector.kv_parts.hit import Hit
from lmcache_connector.kv_parts.part import BlockTables, part_key
from lmcache_connector.lookup.chunk_index import ChunkIndex
from lmcache_connector.metrics.samples import Tally
from lmcache_connector.plans import AuditJob, JobResult, LoadJob, StoreJob
from lmcache_connector.scheduler.request_state import AuditSubject, RequestState, SchedulerSettings
from lmcache_connector.scheduler.store_planner import adapter_of

logger = logging.getLogger(__name__)

_DEADLINE_SECONDS = 1.0
"""How long an audit may wait for a slow Redis: a pause of the engine waits for open audits."""
_MAX_OWN_CHUNKS = 1 << 16
"""About 10 MB."""


@dataclass(eq=False)
class Auditor:
    """Chooses chunks to audit, plans the jobs, and judges the results.

    Owns the audit part of every request's state. ``model`` names the model in log lines.
    """

    settings: SchedulerSettings
    index: ChunkIndex
    sampler: AuditSampler
    noise: NoiseGauge
    tally: Tally
    _: KW_ONLY
    model: str

    def __post_init__(self) -> None:
        # The latest chunks that this instance computed and stored.
        self._own: Latest[bytes, None] = Latest(_MAX_OWN_CHUNKS)
        self._round = 0  # number of calls of `doubt`
        self._largest_error = 0.0

    # -- choosing ------------------------------------------------------------------------------

    def cut(self, state: RequestState, num_computed_tokens: int, hit: Hit) -> Hit:
        """The part of the hit that may be loaded. Decided once per request."""
        audit = state.audit
        if hit and not audit.is_decided:
            audit.is_decided = True
            self._choose(state, num_computed_tokens, hit)
        return hit if audit.chunk is None else hit.up_to(audit.chunk)

    def _choose(self, state: RequestState, num_computed_tokens: int, hit: Hit) -> None:
        chunk = self._chunk_to_audit(state, hit)
        if chunk * self.settings.chunk_size < num_computed_tokens:
            return  # vLLM has part of the chunk, so the whole chunk would not be computed
        if chunk > hit.first and chunk not in hit.ends:
            return  # no load may end before it
        # The model's first part is audited, and stands for the others.
        key = part_key(state.keys.keys[chunk], 0, len(self.settings.parts))
        is_own = key in self._own and key in self.index
        identity = state.keys.identity
        kinds = bool(identity.multimodal), identity.embeds_digest is not None
        subject = AuditSubject(identity.kv_root, kinds, is_own)
        if self.sampler.wants(subject):
            audit = state.audit
            audit.chunk, audit.key, audit.subject = chunk, key, subject
            audit.may_fetch = key not in self.index
            self.sampler.begin(subject)

    def _chunk_to_audit(self, state: RequestState, hit: Hit) -> int:
        size = self.settings.chunk_size
        touched = (
            min((span.end - 1) // size, hit.stop - 1)
            for span in state.keys.identity.multimodal
            if span.start < hit.stop * size and span.end > hit.first * size
        )
        return max(touched, default=hit.stop - 1)

    # -- jobs ----------------------------------------------------------------------------------

    def learn(self, job: LoadJob | StoreJob) -> None:
        """Track which chunks in the CPU tier this instance computed, from the planned ``job``."""
        if isinstance(job, AuditJob):
            return
        if isinstance(job, StoreJob):
            for key in job.keys:
                self._own[key] = None
        elif job.may_fetch:
            for key, is_held in zip(job.keys, self.index.has_each(job.keys), strict=True):
                if not is_held:
                    self._own.pop(key, None)

    def is_due(self, state: RequestState, num_witnessed_tokens: int) -> bool:
        """Whether the step being planned completes the audited chunk. The request's first call ends
        the audit if vLLM has part of the chunk. ``num_witnessed_tokens``: at the step's end."""
        audit, size = state.audit, self.settings.chunk_size
        if audit.chunk is None:
            return False
        if not audit.is_computing:
            audit.is_computing = True
            if state.request.num_computed_tokens > audit.chunk * size:
                self.drop(state)  # vLLM has part of the chunk, and did not compute it
                return False
        return num_witnessed_tokens >= (audit.chunk + 1) * size

    def plan(
        self, state: RequestState, job_id: int, resolve_block_ids: Callable[[], BlockTables]
    ) -> AuditJob | None:
        """The job that compares the chunk, which this step completes; ``None`` if blocks of the
        chunk have left the window."""
        audit, part, size = state.audit, self.settings.parts[0], self.settings.chunk_size
        assert audit.chunk is not None
        start = audit.chunk * size
        blocks = blocks_between(part, resolve_block_ids(), start, start + size)
        if not are_there(blocks, size // part.block_size):
            self.drop(state)
            return None
        place = self.settings.parts, 0, (audit.chunk,), (audit.key,)
        job = AuditJob(
            job_id=job_id,
            request_id=state.request.request_id,
            runs=(state.run(*place, blocks, self.index.num_owners(0)),),
            redis_keys=frozenset(),
            adapter=adapter_of(state),
            claim=state.claim,
            may_fetch=audit.may_fetch,
            deadline_seconds=_DEADLINE_SECONDS,
        )
        audit.round = self._round
        audit.close()
        return job

    def drop(self, state: RequestState) -> None:
        """End the request's audit: the request will not compute the chunk."""
        audit = state.audit
        if audit.chunk is not None and audit.subject is not None:
            self.sampler.end(audit.subject, is_answered=False)
        audit.close()

    def forget_all(self) -> None:
        """End all audits without a verdict, and give every subject a first audit again."""
        self.doubt()
        self.forget()

    def doubt(self) -> None:
        """The weights may have changed: audits in progress are inconclusive."""
        self._round += 1
        self.sampler.abandon()

    def forget(self) -> None:
        """The weights have changed: every subject gets a first audit again."""
        self.sampler.forget()

    # -- results -------------------------------------------------------------------------------

    def ended(
        self, state: RequestState, job: AuditJob, results: Collection[JobResult]
    ) -> bytes | None:
        """Count and log the verdict, once all ranks have reported or none was asked. Returns the
        root on a mismatch: KV loaded under it may be wrong."""
        subject, kind = state.audit.subject, state.keys.identity.kind
        assert subject is not None
        is_current = state.audit.round == self._round
        is_own = job.keys[0] in self._own and not any(each.fetched_bytes for each in results)
        verdict, found = Verdict.INCONCLUSIVE, [result.differences for result in results]
        error: ChunkError | None = None
        if is_current and found and all(found):
            error = combine(chain.from_iterable(found))
            verdict = self.noise.judge(error, is_own=is_own)
        if is_current:
            is_answered = verdict is not Verdict.INCONCLUSIVE and is_own == subject.is_own
            self.sampler.end(subject, is_answered=is_answered)
        self.tally.count("audits", verdict.value)
        if error is not None:
            self._largest_error = max(self._largest_error, error.largest)
            self.tally.set("audit_error", "last", value=error.largest)
            self.tally.set("audit_error", "largest", value=self._largest_error)
            self._log(kind, verdict, error)
        return subject.root if verdict is Verdict.MISMATCH else None

    def _log(self, kind: str, verdict: Verdict, error: ChunkError) -> None:
        num_samples = self.noise.num_samples
        if verdict is not Verdict.MISMATCH:
            logger.info(
                "Audit of a %s request: %s, %s; noise samples: %d",
                kind, verdict.value, error, num_samples,
            )  # fmt: skip
        else:
            logger.error(
                "Audit: the KV stored for a %s request of %s is not what this instance computes: "
                "%s; the limit of the median is %.2g, from %d noise samples. This instance shares "
                "no KV of this model and adapter any more. Earlier hits may have been wrong: see "
                "'An audit found a mismatch' in the troubleshooting guide.",
                kind, self.model, error, self.noise.limit(), num_samples,
            )  # fmt: skip
