"""Messages between the scheduler side and the workers: plain frozen data, once per engine step.

The scheduler side plans jobs (:class:`StepPlan`). Every rank runs all jobs and reports
(:class:`RankReport`). Block ids are listed per KV cache group. Job ids grow in planning order,
across all kinds of jobs; a load without chunks has a negative id. Durations are in seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

from lmcache_connector.kv_parts.part import BlockIds


class Tier(Enum):
    """A place below the paged cache that holds chunks. A load tries the tiers in this order. The
    values are metric labels."""

    CPU = "cpu"
    PEER = "peer"
    REDIS = "redis"

    @classmethod
    def last_of(cls, tiers: Iterable[Tier]) -> Tier:
        """The tier of ``tiers`` that loads try last; the CPU tier if ``tiers`` is empty."""
        return max(tiers, key=_IN_ORDER.index, default=cls.CPU)


_IN_ORDER = tuple(Tier)  # iterating over an Enum is slow


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """A LoRA adapter: vLLM's number for it, and the digest of its files."""

    number: int
    digest: str


@dataclass(frozen=True, slots=True)
class LoadedAdapterList:
    """The LoRA adapters in one rank's memory, as pairs of number and digest.

    A digest of ``None`` means that the loaded content is unknown. ``answered``: the last question
    that this list answers. ``number`` counts the rank's lists from 1. ``replaced``: adapters that
    were in memory at or after the last list and are gone, in the order in which they left.
    """

    answered: int
    digests: tuple[tuple[int, str | None], ...] = ()
    number: int = 0
    replaced: tuple[tuple[int, str | None], ...] = ()

    def digest_of(self, number: int, default: str | None = None) -> str | None:
        """The digest of adapter ``number``; ``default`` if the adapter is not loaded."""
        return next((digest for each, digest in self.digests if each == number), default)


@dataclass(frozen=True, slots=True)
class WeightsInMemory:
    """The weights in one rank's memory, its drafter's included.

    ``version``: the rank's :class:`ChangeCount`. ``digest`` is ``None`` while the rank reads them,
    and describes their content only if ``is_visible``. ``first_digest``: digest of the weights
    loaded at start; ``None`` if they changed before they were read. ``answered``: the last question
    answered. ``form``: how vLLM stores the weights, and on which hardware.
    ``loaded_after``: the weights were read from disk after this Unix time.
    """

    version: int = 0
    answered: int = 0
    digest: str | None = ""
    first_digest: str | None = ""
    is_visible: bool = True
    form: str = ""
    loaded_after: float = float("inf")


@dataclass(frozen=True, slots=True)
class Claim:
    """How the CPU tier retains a request's chunks: see :mod:`lmcache_connector.retention`.

    ``tenant``: digest of the request's salt, empty without a salt. ``pin``: keep the chunks while
    pins are within their limits. ``ttl_seconds``: how long the request needs the chunks; ``None``
    if unknown. ``priority``: each unit doubles how long the chunks may stay unused.
    """

    tenant: bytes = b""
    pin: bool = False
    ttl_seconds: float | None = None
    priority: int = 0


@dataclass(frozen=True, slots=True)
class PrefixUse:
    """The prompt of a request contains the chunks ``keys``, and every chunk before them.
    ``may_write``: chunks that Redis lacks may be written to it."""

    claim: Claim
    keys: tuple[bytes, ...]
    may_write: bool = False


@dataclass(frozen=True, slots=True)
class PartRun:
    """Chunks of one part, ascending (a load's: consecutive), and the blocks to copy from or to.

    ``keys[i]`` names the stored data of chunk i: see :mod:`lmcache_connector.kv_parts.part`.
    ``chunks[i]`` is the index of chunk i in its request. ``block_ids[g]`` lists the blocks of all
    chunks in the part's g-th KV cache group, equally many per chunk. A load (or a tail's
    store) leaves out ``skip_blocks`` blocks at its start, which vLLM has or does not need. If
    ``tail_tokens`` is set, the last chunk is a tail of so many tokens, with blocks for just these.
    ``parents[i]`` is the key of the last chunk before chunk i with the same owner, or empty;
    ``parents`` is empty for parts whose chunks are usable without the chunks before them.
    """

    part: int
    keys: tuple[bytes, ...]
    chunks: tuple[int, ...]
    block_ids: BlockIds
    skip_blocks: int = 0
    parents: tuple[bytes, ...] = ()
    tail_tokens: int = 0


class _Runs:
    """Properties of a job with runs."""

    __slots__ = ()
    runs: tuple[PartRun, ...]

    @property
    def keys(self) -> tuple[bytes, ...]:
        """Keys of all runs, concatenated."""
        if len(self.runs) == 1:
            return self.runs[0].keys
        return tuple(key for run in self.runs for key in run.keys)

    @property
    def blocks(self) -> frozenset[int]:
        """Every block that the job reads or writes."""
        return frozenset(i for run in self.runs for ids in run.block_ids for i in ids)


@dataclass(frozen=True, slots=True)
class StoreJob(_Runs):
    """Copy full chunks, or a tail, out of the paged cache.

    ``redis_keys``: chunks to write on to Redis, whether or not this job copies them; ``None``: the
    chunks that it copies. A rank that has not loaded ``adapter`` copies nothing. ``is_awaited``:
    another instance waits for the stored chunks.
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
    """Read one chunk out of the paged cache and compare it with the chunk that a tier holds under
    the same key; store nothing. ``may_fetch``: the CPU tier may lack the chunk. The tier has
    ``deadline_seconds`` once the blocks are copied.
    """

    may_fetch: bool = False
    deadline_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class PeerSource:
    """The instance that a request names as its KV source: its rank 0 serves at ``host`` and
    ``port``, and vLLM calls it ``engine_id``. ``is_trusted``: chunks from it were computed for
    their keys, and may be kept and passed on."""

    host: str
    port: int
    num_ranks: int
    is_trusted: bool
    engine_id: str = ""


@dataclass(frozen=True, slots=True)
class TransferUpdate:
    """Progress of KV transfer ``transfer_id`` from this instance to the one that asks for it.

    ``keys`` adds chunks to those of earlier updates. ``ends_after``: stores that complete the
    transfer; ``None``: more updates may come. ``held_request``: vLLM gets the blocks of this
    request back once these stores have ended on all ranks.
    """

    transfer_id: str
    keys: tuple[bytes, ...] = ()
    ends_after: frozenset[int] | None = None
    held_request: str = ""


@dataclass(frozen=True, slots=True)
class LoadJob(_Runs):
    """Copy consecutive chunks into the paged cache, run after run.

    ``may_fetch``: some chunk may have to come from Redis or a peer. ``after_job``: the last
    planned store that this load depends on (0: none). ``after_passes``: wait for the forward passes
    of earlier steps, which may use the blocks, or for the step's zeroing of the blocks. ``source``:
    the only instance to fetch from. ``in_step``: all chunks are in memory, and the step's forward
    pass reads them.
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
class PrefillWork:
    """Prompt tokens of one forward pass: ``num_tokens`` tokens after ``context_tokens``.

    Several prompts count as one that reads as much KV.
    """

    num_tokens: int
    context_tokens: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """All jobs of one engine step.

    ``cancelled_loads``: loads of requests that were aborted or whose keys are void.
    ``vacated_stores``: stores of earlier steps whose blocks this step, and none before it, may
    overwrite. ``idle``: the step runs no forward pass.
    ``prefill``: the work of the forward pass, if worth timing. ``probe``: measure Redis again.
    ``uses``: chunks in memory that new requests use.

    ``adapter_question``: list the LoRA adapters in memory (0: no question).
    ``weights_question``: read the weights in memory again (0: no question). ``acked_adapters``,
    ``acked_weights``, ``acked_leaving``: per rank, the number of the last adapter list, the weights
    version and the number of reports of leaving chunks known at planning time; an empty
    ``acked_leaving`` repeats the previous one. ``transfers``: in the order they happened.
    ``starts_over``: cancel all jobs of earlier plans and report none of them. ``asks_again``:
    report the start, the weights and the adapters again.
    """

    loads: tuple[LoadJob, ...] = ()
    stores: tuple[StoreJob, ...] = ()
    cancelled_loads: tuple[int, ...] = ()
    vacated_stores: tuple[int, ...] = ()
    idle: bool = False
    prefill: PrefillWork | None = None
    probe: bool = False
    uses: tuple[PrefixUse, ...] = ()
    adapter_question: int = 0
    acked_adapters: tuple[int, ...] = ()
    weights_question: int = 0
    acked_weights: tuple[int, ...] = ()
    acked_leaving: tuple[int, ...] = ()
    transfers: tuple[TransferUpdate, ...] = ()
    starts_over: bool = False
    asks_again: bool = False

    @property
    def has_earlier_work(self) -> bool:
        """Whether a job waits for the forward passes of earlier steps, but not of this one."""
        return any(
            isinstance(job, StoreJob) or job.after_passes for job in self.loads_and_earlier_stores()
        )

    def loads_and_earlier_stores(self) -> list[LoadJob | StoreJob]:
        """Asynchronous loads, and stores planned before the last load, in planning order. A load
        may need such a store: the store's request has finished, its passes ran in earlier steps."""
        if not self.loads:
            return []
        jobs: list[LoadJob | StoreJob] = [job for job in self.loads if not job.in_step]
        jobs += [job for job in self.stores if job.job_id < self._last_load]
        return sorted(jobs, key=lambda job: job.job_id)

    def loads_in_step(self) -> list[LoadJob]:
        """Loads that must end before the forward pass."""
        return [job for job in self.loads if job.in_step]

    def later_stores(self) -> list[StoreJob]:
        """Stores that may copy KV of this step's forward pass."""
        return [job for job in self.stores if job.job_id > self._last_load]

    @property
    def _last_load(self) -> int:
        return self.loads[-1].job_id if self.loads else 0


class Outcome(Enum):
    DONE = "done"
    MISSING = "missing"
    """A load's chunk was absent, corrupt or unreadable, or a load or store lacked memory."""
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class LayerDifference:
    """Difference between a computed and a stored chunk in one half (0: K, 1: V) of a layer.

    Sums of squares over a rank's heads: of the differences, and of the elements on either side.
    """

    layer: int
    half: int
    difference: float
    computed: float
    stored: float


@dataclass(frozen=True, slots=True)
class Fetched:
    """Bytes that one tier delivered for a job or a probe, and the time it took. ``has_failed``: the
    tier was too slow or broke; a missing chunk is not a failure. ``lacks_next``: the tier has
    answered that it does not have the chunk that follows."""

    tier: Tier
    num_bytes: int
    seconds: float
    has_failed: bool = False
    lacks_next: bool = False


@dataclass(frozen=True, slots=True)
class JobResult:
    """How a job ended on one rank: its first ``num_chunks`` chunks, ``num_bytes`` in all, arrived
    in ``seconds`` of running, after ``waited_seconds`` behind other jobs.

    ``num_bytes`` and ``seconds`` include ``fetched``. ``copy_seconds``: of copies into the paged
    cache, some of them made while chunks were fetched. ``differences``: the findings of an audit.
    """

    job_id: int
    outcome: Outcome
    num_chunks: int
    num_bytes: int
    seconds: float
    fetched: tuple[Fetched, ...] = ()
    differences: tuple[LayerDifference, ...] = ()
    waited_seconds: float = 0.0
    copy_seconds: float = 0.0

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
class CacheEvent:
    """A chunk entered or left the CPU tier of a rank. ``is_leaving``: the chunk will be evicted
    soon unless it is used again."""

    key: bytes
    admitted: bool
    is_leaving: bool = False


@dataclass(frozen=True, slots=True)
class ForwardTime:
    """How long the forward pass of ``work`` took."""

    work: PrefillWork
    seconds: float


@dataclass(frozen=True, slots=True)
class RankStart:
    """What one rank found out when it started.

    ``configuration``: digests of the model's configuration as this rank sees it after building the
    model, sorted by name. ``layer_widths``: bytes per token and head, for each layer of each part;
    the scheduler's process sees only one of the layers that share a KV cache group. ``measured``:
    the CPU tier by the self-test, Redis by a probe. ``formats``: storage formats of the first
    part's layers. ``changes_at``: path of the rank's :class:`ChangeCount`; empty if it makes no
    loads inside a step. ``reads``: ranks whose memory this rank reads, and whose chunks it
    therefore does not store.
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

    ``start`` comes with or soon after the first report, and again if asked for. ``events`` are in
    order of occurrence. ``num_leaving`` numbers the rank's reports of leaving chunks, from 1; it is
    0 in others. ``measured``: by a probe. ``written``: chunks whose values this rank has put into
    or found in Redis; filled only if KV cache events are on. ``adapters``: set if adapters were
    loaded or asked for. ``weights``: set if the weights may have changed or were read.
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


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one rank returns after a step: request ids to vLLM, reports to the scheduler side.

    ``finished_sending``: nothing reads the kept blocks of these requests any more.
    ``finished_recving``: the loads of these requests have ended, well or not. ``reports`` is empty
    if there is nothing to tell.
    """

    finished_sending: frozenset[str] = frozenset()
    finished_recving: frozenset[str] = frozenset()
    reports: tuple[RankReport, ...] = ()

    def after(self, lost: StepOutput) -> StepOutput:
        """This output and that of an earlier step, which vLLM has lost. vLLM may have processed
        later ones, so the lost one's chunks count as leaving until they are reported again."""
        return StepOutput(
            lost.finished_sending | self.finished_sending,
            lost.finished_recving | self.finished_recving,
            tuple(map(_told_late, lost.reports)) + self.reports,
        )


def _told_late(report: RankReport) -> RankReport:
    return replace(report, events=tuple(replace(e, is_leaving=True) for e in report.events))
