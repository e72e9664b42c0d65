"""What the two sides of the connector tell each other: plain frozen data, once per engine step.

The scheduler side plans jobs (:class:`StepPlan`), the worker side of every rank runs them and
reports (:class:`RankReport`). Block ids are listed per KV cache group. Job ids grow in the order in
which jobs were planned, over loads and stores together. All durations are in seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from lmcache_connector.kv_parts.part import BlockIds


class Tier(Enum):
    """A place below the paged cache that holds chunks, in the order in which a load asks them. The
    values are labels of metrics."""

    CPU = "cpu"
    PEER = "peer"
    REDIS = "redis"

    @classmethod
    def last_of(cls, tiers: Iterable[Tier]) -> Tier:
        """The one of ``tiers`` that is asked last; the CPU tier if there are none."""
        return max(tiers, key=tuple(cls).index, default=cls.CPU)


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """A LoRA adapter: the number vLLM knows it by, and the digest of its files."""

    number: int
    digest: str


@dataclass(frozen=True, slots=True)
class LoadedAdapterList:
    """The LoRA adapters one rank has in memory, as pairs of number and digest.

    ``None`` as a digest: what was loaded is not known. ``question``: the last one this answers.
    ``number``: lists of a rank count from 1. ``replaced``: what was in memory under these numbers
    at the last list or since, and is no more, in this order.
    """

    question: int
    digests: tuple[tuple[int, str | None], ...] = ()
    number: int = 0
    replaced: tuple[tuple[int, str | None], ...] = ()

    def digest_of(self, number: int, default: str | None = None) -> str | None:
        """``default`` for an adapter that is not loaded."""
        return next((digest for each, digest in self.digests if each == number), default)


@dataclass(frozen=True, slots=True)
class WeightsInMemory:
    """The weights one rank has in memory, its drafter's included.

    ``version`` counts the calls that may have changed them. ``digest`` is ``None`` while they are
    being read; it says nothing about their content unless ``is_visible``. ``first_digest``: of
    those that were loaded at start; ``None`` if they were changed before they were read.
    ``question``: the last one this answers. ``form``: how vLLM keeps them, and on what machine.
    ``loaded_after``: they were read from the disk after this time, in seconds since 1970.
    """

    version: int = 0
    question: int = 0
    digest: str | None = ""
    first_digest: str | None = ""
    is_visible: bool = True
    form: str = ""
    loaded_after: float = float("inf")


@dataclass(frozen=True, slots=True)
class Claim:
    """For whom the CPU tier keeps chunks, and how: see :mod:`lmcache_connector.retention`.

    ``tenant`` is a digest of the request's salt, empty without one. ``pin``: keep them while
    pins are within their limits. ``ttl_seconds``: how long this request needs them; ``None``: that
    is not known. ``priority``: each step doubles how long they may stay unused.
    """

    tenant: bytes = b""
    pin: bool = False
    ttl_seconds: float | None = None
    priority: int = 0


@dataclass(frozen=True, slots=True)
class PrefixUse:
    """A request has these chunks in its prompt, and all those they build on."""

    claim: Claim
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class PartRun:
    """Chunks of one part of the model, in order, and the blocks they are copied from or to.

    ``keys[i]`` names what is stored of chunk i: see :mod:`lmcache_connector.kv_parts.part`.
    ``chunks[i]`` is the place of chunk i in its request. ``block_ids[g]`` lists the blocks of all
    chunks in the part's g-th KV cache group one after the other, equally many per chunk. A load
    leaves the first ``skip_blocks`` of the first chunk out: vLLM has them, or needs none. With
    ``tail_tokens`` the last chunk is a tail, and has blocks for so many tokens.
    ``parents[i]`` is the key of the chunk before chunk i, empty for a prompt's first; there are
    none in parts whose chunks are of use without those before.
    """

    part: int
    keys: tuple[bytes, ...]
    chunks: tuple[int, ...]
    block_ids: BlockIds
    skip_blocks: int = 0
    parents: tuple[bytes, ...] = ()
    tail_tokens: int = 0


class _Runs:
    """What a job has with its runs."""

    __slots__ = ()
    runs: tuple[PartRun, ...]

    @property
    def keys(self) -> tuple[bytes, ...]:
        """Of all runs, one after the other."""
        if len(self.runs) == 1:
            return self.runs[0].keys
        return tuple(key for run in self.runs for key in run.keys)

    @property
    def blocks(self) -> frozenset[int]:
        """All blocks that are read or written."""
        return frozenset(i for run in self.runs for ids in run.block_ids for i in ids)


@dataclass(frozen=True, slots=True)
class StoreJob(_Runs):
    """Copy full chunks out of the paged cache.

    ``redis_keys`` names the chunks that shall go on to Redis, copied by this job or not; ``None``
    means those it copies. A rank that has not loaded ``adapter`` copies nothing. ``is_awaited``:
    another instance waits for what it stores.
    """

    job_id: int
    request_id: str
    runs: tuple[PartRun, ...]
    redis_keys: frozenset[bytes] | None = None
    adapter: AdapterRef | None = None
    claim: Claim = Claim()
    is_awaited: bool = False


@dataclass(frozen=True, slots=True)
class AuditJob(StoreJob):
    """Read one chunk out of the paged cache as a store does, and compare it with what a tier holds
    under that key; keep nothing. ``may_fetch``: the CPU tier may not have it. The tier may take
    ``deadline_seconds``.
    """

    may_fetch: bool = False
    deadline_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class PeerSource:
    """An instance that a request names to load from: its rank 0 serves at ``host`` and ``port``,
    and vLLM calls it ``engine_id``. ``is_trusted``: what it sends was computed for its key, and may
    be kept and passed on."""

    host: str
    port: int
    num_ranks: int
    is_trusted: bool
    engine_id: str = ""


@dataclass(frozen=True, slots=True)
class TransferUpdate:
    """News of a KV transfer from here to whoever asks for ``transfer_id``.

    It is of the chunks under ``keys``, and of those in earlier and later updates. ``ends_after``:
    these stores bring the last of it; ``None``: more may come. ``held_request``: the blocks of this
    request are vLLM's again once these stores have ended on all ranks.
    """

    transfer_id: str
    keys: tuple[bytes, ...] = ()
    ends_after: frozenset[int] | None = None
    held_request: str = ""


@dataclass(frozen=True, slots=True)
class LoadJob(_Runs):
    """Copy consecutive chunks into the paged cache, run after run.

    ``may_fetch``: some chunk may have to come from Redis or a peer. ``after_job``: the last
    planned store that this load relies on (0: none). ``after_passes``: forward passes of earlier
    steps may still use the blocks, or the step zeroes them before its own. ``source``: the only
    instance to fetch from. ``in_step``: all chunks are in memory, and the forward pass of the step
    reads them.
    """

    job_id: int
    request_id: str
    runs: tuple[PartRun, ...]
    deadline_seconds: float
    may_fetch: bool
    after_job: int
    after_passes: bool = False
    claim: Claim = Claim()
    source: PeerSource | None = None
    in_step: bool = False


@dataclass(frozen=True, slots=True)
class PrefetchJob(_Runs):
    """Bring chunks from Redis or peers to the CPU tier for a request that waits in vLLM's queue.

    No blocks are touched: ``block_ids`` of the runs are empty. It gives way to all loads for
    ``deadline_seconds``, and may then take as long. What comes is ``tenant``'s, see
    :class:`Claim`.
    """

    job_id: int
    request_id: str
    runs: tuple[PartRun, ...]
    deadline_seconds: float
    tenant: bytes = b""


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """What one forward pass computes of prompts: ``num_tokens`` tokens after ``context_tokens``.

    Several prompts count as one that reads as much KV. ``running_requests`` others decode in the
    same pass.
    """

    num_tokens: int
    context_tokens: int
    running_requests: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """All jobs of one engine step.

    ``cancelled_loads`` are jobs whose requests were aborted, or whose cache was reset, and
    prefetches that nobody waits for any more. ``unwanted``: chunks that prefetches have brought,
    or shall have, for requests that did not use them.
    ``vacated_stores`` are jobs of earlier steps whose blocks this one may overwrite, and none
    before it does. ``idle``: the step runs no forward pass. ``prefill``: the forward pass is worth
    timing. ``probe``: Redis' speed is worth measuring again. ``wanted``: chunks in memory that
    Redis should have as well. ``uses``: of chunks in memory by requests that are new.
    ``adapter_question``: list the LoRA adapters in memory (0: no need). ``heard_adapters``: of
    each rank, the number of the last such list that was known when this was planned.
    ``weights_question``: read the weights in memory again (0: no need). ``heard_weights``: of each
    rank, the version of its weights that was known when this was planned.
    ``heard_leaving``: of each rank, the reports of leaving chunks that were known when this was
    planned; empty: as many as before. ``transfers``: in the order they happened. ``starts_over``:
    all jobs of earlier plans are cancelled, and nobody wants to hear of them.
    """

    loads: tuple[LoadJob, ...] = ()
    stores: tuple[StoreJob, ...] = ()
    cancelled_loads: tuple[int, ...] = ()
    vacated_stores: tuple[int, ...] = ()
    idle: bool = False
    prefill: PrefillWork | None = None
    probe: bool = False
    wanted: tuple[bytes, ...] = ()
    uses: tuple[PrefixUse, ...] = ()
    prefetches: tuple[PrefetchJob, ...] = ()
    unwanted: tuple[bytes, ...] = ()
    adapter_question: int = 0
    heard_adapters: tuple[int, ...] = ()
    weights_question: int = 0
    heard_weights: tuple[int, ...] = ()
    heard_leaving: tuple[int, ...] = ()
    transfers: tuple[TransferUpdate, ...] = ()
    starts_over: bool = False

    @property
    def has_earlier_work(self) -> bool:
        """Whether a job must wait for the forward passes of earlier steps, and for those alone."""
        return any(
            isinstance(job, StoreJob) or job.after_passes for job in self.loads_and_earlier_stores()
        )

    def loads_and_earlier_stores(self) -> list[LoadJob | StoreJob]:
        """In the order they were planned. A load may rely on a store planned before it.

        Such a store is of a finished request: its forward passes ran in earlier steps.
        """
        if not self.loads:
            return []
        jobs: list[LoadJob | StoreJob] = [job for job in self.loads if not job.in_step]
        jobs += [job for job in self.stores if job.job_id < self._last_load]
        return sorted(jobs, key=lambda job: job.job_id)

    def loads_in_step(self) -> list[LoadJob]:
        """What must be there before the forward pass."""
        return [job for job in self.loads if job.in_step]

    def later_stores(self) -> list[StoreJob]:
        """Stores that may need this step's forward pass."""
        return [job for job in self.stores if job.job_id > self._last_load]

    @property
    def _last_load(self) -> int:
        return self.loads[-1].job_id if self.loads else 0


class Outcome(Enum):
    """How a job ended."""

    DONE = "done"
    MISSING = "missing"
    """Loads: a chunk was not there, or not sound. Stores: no memory for all chunks."""
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class LayerDifference:
    """How far one half (0: K, 1: V) of a layer of a chunk is from another's, over a rank's heads.

    Sums of squares: of the difference, and of the elements that were computed and that are stored.
    """

    layer: int
    half: int
    difference: float
    computed: float
    stored: float


@dataclass(frozen=True, slots=True)
class Fetched:
    """What one tier brought for a job, or to be measured, and in what time. ``has_failed``: it was
    too slow, or broke; that a chunk was missing is no failure."""

    tier: Tier
    num_bytes: int
    seconds: float
    has_failed: bool = False


class _Fetches:
    """What a job has with what was ``fetched`` for it."""

    __slots__ = ()
    fetched: tuple[Fetched, ...]

    @property
    def fetched_bytes(self) -> int:
        return sum(each.num_bytes for each in self.fetched)

    @property
    def fetch_seconds(self) -> float:
        return sum(each.seconds for each in self.fetched)

    @property
    def has_fetch_failed(self) -> bool:
        return any(each.has_failed for each in self.fetched)


@dataclass(frozen=True, slots=True)
class JobResult(_Fetches):
    """How a job ended on one rank: its first ``num_chunks`` chunks, ``num_bytes`` in all, arrived
    within ``seconds`` of running, after ``waited_seconds`` of waiting for others.

    What was ``fetched`` is part of both. ``differences`` are what an audit found.
    """

    job_id: int
    outcome: Outcome
    num_chunks: int
    num_bytes: int
    seconds: float
    fetched: tuple[Fetched, ...] = ()
    differences: tuple[LayerDifference, ...] = ()
    waited_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """A chunk entered or left the CPU tier of a rank. ``is_leaving``: it will be evicted before
    long, unless it is used again."""

    key: bytes
    admitted: bool
    is_leaving: bool = False


@dataclass(frozen=True, slots=True)
class ForwardTime:
    """How long a forward pass with that work took."""

    work: PrefillWork
    seconds: float


@dataclass(frozen=True, slots=True)
class RankStart:
    """What one rank found out when it started.

    ``configuration``: digests of the model's configuration, part by part and sorted by name, as
    this rank sees it once its model is built. ``layer_widths``: of the layers of each part of its
    KV, in bytes per token and head. ``measured``: of the CPU tier by the self-test, of Redis by a
    probe. ``formats``: how those of the first part are stored. Of layers
    that share a KV cache group the scheduler's process sees one. ``changes_at``: where its
    :class:`ChangeCount` is; empty if it makes no loads inside a step. ``reads``: the ranks whose
    memory it reads; what they store it does not.
    """

    configuration: tuple[tuple[str, str], ...]
    measured: tuple[Fetched, ...] = ()
    layer_widths: tuple[tuple[int, ...], ...] = ()
    formats: tuple[str, ...] = ()
    changes_at: str = ""
    reads: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank did since its last report.

    ``start`` comes once, with the first report or soon after. ``events`` are in the order they
    happened; some tell of chunks that are leaving in the ``num_leaving``-th such report of the
    rank, in none if that is 0.
    ``measured``: by a probe. ``written`` lists chunks whose values this rank
    has put into Redis, or found there; it is filled only if KV cache events are wanted.
    ``adapters``: since the last report some were loaded, or asked for. ``weights``: likewise, those
    in memory may have changed, or are known now. ``num_changes``: the rank's :class:`ChangeCount`,
    with all that it has counted told here or before.
    """

    rank: int
    events: tuple[CacheEvent, ...]
    results: tuple[JobResult, ...]
    forwards: tuple[ForwardTime, ...] = ()
    measured: tuple[Fetched, ...] = ()
    written: tuple[bytes, ...] = ()
    adapters: LoadedAdapterList | None = None
    weights: WeightsInMemory | None = None
    start: RankStart | None = None
    num_leaving: int = 0
    num_changes: int = 0


ReportT_co = TypeVar("ReportT_co", covariant=True)


@dataclass(frozen=True, slots=True)
class StepOutput(Generic[ReportT_co]):
    """What one rank has to tell after a step: requests by id to vLLM, a report to the other side.

    ``finished_sending``: nothing reads the blocks that were kept for them any more.
    ``finished_recving``: their loads have ended, well or not. ``report`` is ``None`` if there is no
    news.
    """

    finished_sending: frozenset[str] = frozenset()
    finished_recving: frozenset[str] = frozenset()
    report: ReportT_co | None = None
