"""What the scheduler side knows of one request, and the settings it works by."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Literal

from lmcache_connector.keys.request_keys import RequestKeys
from lmcache_connector.kv_parts.hit import is_prefix_only
from lmcache_connector.kv_parts.part import Part, Rule
from lmcache_connector.lookup.background_lookup import RequestLookup
from lmcache_connector.plans import Claim, LoadJob, PeerSource, PrefetchJob

RedisAdmission = Literal["all", "reused"]
"""See `ConnectorConfig.redis_admission`."""


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """What the scheduler side needs of the configuration. Sizes in tokens, times in seconds."""

    chunk_size: int
    parts: tuple[Part, ...]  # those every chunk is needed of come first
    world_size: int
    loads: bool  # kv_role consumer or both
    stores: bool  # kv_role producer or both
    store_generated: bool = True
    redis_admission: RedisAdmission = "all"
    weak_block_hashes: bool = False  # vLLM's block hashes are not cryptographic
    load_deadline_seconds: float = 10.0
    step_wait_seconds: float = 0.001  # for answers, of all requests together
    num_batches: int = 1  # steps under way at once
    window_interval: int | None = None  # None: eight windows
    has_rings: bool = False  # vLLM has none of a block's latest tokens after a hit inside it
    lookahead: int = 0  # the KV of a token follows from so many tokens after it too
    prefetch_bytes: int = 0  # per rank, fetched ahead for requests that wait
    drafted_len: int | None = None  # no drafter computes a step with a longer request; None: always

    @property
    def is_prefix_only(self) -> bool:
        return is_prefix_only(self.parts)

    @property
    def has_tails(self) -> bool:
        """A state has a snapshot at the end of a chunk, and of nothing behind it."""
        return not self.has_rings and all(part.rule is not Rule.STATE for part in self.parts)


@dataclass(frozen=True, slots=True)
class Transfer:
    """A request that is handed over: another instance is to have its KV, or has computed it."""

    stores: bool = False
    loads: bool = False

    @classmethod
    def of(cls, params: object, settings: SchedulerSettings) -> Transfer:
        """By its ``kv_transfer_params``, as NIXL's routers send them."""
        if not isinstance(params, dict):
            return NO_TRANSFER
        stores, loads = params.get("do_remote_decode"), params.get("do_remote_prefill")
        return cls(settings.stores and stores is True, settings.loads and loads is True)


NO_TRANSFER: Final = Transfer()


@dataclass(slots=True)
class LoadState:
    """The load of a request. Written by the :class:`LoadPlanner`.

    ``end``: the chunk where the load ends, once that is decided, with ``decided_from`` tokens
    computed. ``offered_from``: computed tokens
    when it was offered to vLLM. ``fetched_tokens``: of the load planned last, those that memory
    lacked. ``is_second``: one has failed before. ``num_firm``: leading chunks of the hit that were
    firm when that was decided. ``in_step``: it was offered to be made inside the step.
    """

    is_allowed: bool = True
    end: int | None = None
    decided_from: int = 0
    deadline_seconds: float = 0.0
    offered_from: int = 0
    job: LoadJob | None = None
    fetched_tokens: int = 0
    is_second: bool = False
    num_firm: int = 0
    in_step: bool = False

    def restart(self) -> None:
        self.end = None

    def reset(self) -> None:
        """Its keys name nothing that is stored."""
        self.is_allowed = False
        self.end = None


@dataclass(slots=True)
class WitnessState:
    """How far a request is witnessed. Written by the :class:`BlockWitness`.

    ``num_tokens`` may count drafts that will be rejected; ``None``: the request has not been
    scheduled since it began, or began again. The blocks that the leading ``num_vouched`` tokens
    fill are vouched for. Up to ``due_at`` tokens, steps that go on computing it change no more
    than ``num_tokens``.
    ``has_gap``: it went on from tokens that are not witnessed.
    """

    num_tokens: int | None = None
    num_vouched: int = 0
    due_at: int = 0
    has_gap: bool = False

    def restart(self) -> None:
        self.reset()
        self.has_gap = False

    def reset(self) -> None:
        """Its blocks belong to keys of before. What is computed behind a gap stays so."""
        self.num_tokens = None
        self.num_vouched = self.due_at = 0


@dataclass(slots=True)
class StoreState:
    """The stores of a request. Written by the :class:`StorePlanner`.

    Chunks before ``next_chunk`` have been planned, or were there. Chunks before ``num_sighted``
    have been counted as wanted, once however often they are planned.
    ``junction``: the chunk before which others that share the request's beginning will want its
    windows to end. ``has_tail``: the tail has been planned.
    """

    next_chunk: int = 0
    has_tail: bool = False
    num_sighted: int = 0
    junction: int = 0
    job_ids: set[int] = field(default_factory=set)

    def restart(self) -> None:
        self.next_chunk, self.has_tail = 0, False


@dataclass(frozen=True, slots=True)
class AuditSubject:
    """What a first audit is due for. ``kinds``: of the request. ``is_own``: this instance computed
    the chunk itself."""

    root: bytes
    kinds: tuple[bool, ...]
    is_own: bool


@dataclass(slots=True)
class AuditState:
    """The audit of a request. Written by the :class:`Auditor`.

    ``chunk`` is left to compute, and compared with what is stored under ``key``; ``None``: no
    audit, or none any more. ``is_computing``: its forward passes have begun.
    """

    is_decided: bool = False
    chunk: int | None = None
    key: bytes = b""
    may_fetch: bool = False
    subject: AuditSubject | None = None
    is_computing: bool = False

    def drop(self) -> None:
        """Nothing is to be audited any more. ``key`` stays: the chunk is not to be stored."""
        self.is_decided, self.chunk = True, None


@dataclass(slots=True)
class AheadState:
    """What is fetched ahead for a request that waits. Written by the :class:`Prefetcher`.

    ``jobs``: those that have not ended, with the bytes they may bring. ``keys``: all that is to be
    in memory when the request is scheduled. ``held_bytes``: what ended jobs may have brought.
    """

    jobs: dict[int, tuple[PrefetchJob, int]] = field(default_factory=dict)
    keys: tuple[bytes, ...] = ()
    held_bytes: int = 0


@dataclass(slots=True)
class RequestState:
    """Everything known about one request. Owned by the scheduler side, on its one thread.
    ``claim``: how it asks for its chunks to be kept. ``source``: the instance that they come from.
    """

    request: Any
    keys: RequestKeys
    claim: Claim = field(default_factory=Claim)
    transfer: Transfer = NO_TRANSFER
    lookup: RequestLookup = field(init=False)
    load: LoadState = field(default_factory=LoadState)
    witness: WitnessState = field(default_factory=WitnessState)
    store: StoreState = field(default_factory=StoreState)
    audit: AuditState = field(default_factory=AuditState)
    ahead: AheadState = field(default_factory=AheadState)
    is_finished: bool = False
    source: PeerSource | None = None

    def __post_init__(self) -> None:
        self.lookup = RequestLookup(self.request, self.keys)

    def restart(self) -> None:
        """The request was preempted: it is computed, or loaded, from its first token again."""
        self.load.restart()
        self.witness.restart()
        self.store.restart()

    def reset(self, keys: RequestKeys) -> None:
        """An audit found other KV: the request goes on under other keys."""
        self.keys = keys
        self.lookup.reset(keys)
        self.load.reset()
        self.witness.reset()
        self.store.restart()

    @property
    def has_jobs(self) -> bool:
        return self.load.job is not None or bool(self.store.job_ids or self.ahead.jobs)
