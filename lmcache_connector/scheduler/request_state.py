"""Everything the scheduler side knows of one request, and the scheduler side's settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from lmcache_connector.keys.request_keys import RequestKeys
from lmcache_connector.kv_parts.hit import is_prefix_only
from lmcache_connector.kv_parts.part import BlockIds, Part, Rule, parents_of_part
from lmcache_connector.lookup.background_lookup import RequestLookup
from lmcache_connector.plans import Claim, LoadJob, PartRun, PeerSource

RedisAdmission = Literal["all", "reused"]
"""See `ConnectorConfig.redis_admission`."""


StateOffer = tuple[int, int, int]
"""A recurrent state that vLLM has kept: KV cache group, block, tokens that the state has seen."""


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """The configuration of the scheduler side. Sizes in tokens, times in seconds."""

    chunk_size: int
    parts: tuple[Part, ...]  # those with full attention come first
    world_size: int
    loads: bool  # kv_role consumer or both
    stores: bool  # kv_role producer or both
    store_generated: bool = True
    redis_admission: RedisAdmission = "all"
    weak_block_hashes: bool = False  # vLLM's block hashes are not cryptographic
    load_deadline_seconds: float = 10.0
    step_wait_seconds: float = 0.001  # per step, to wait for answers for all requests
    others_wait: bool = False  # data-parallel engines of a MoE model make each step together
    num_batches: int = 1  # steps in flight at once
    window_interval: int | None = None  # None: eight windows
    has_rings: bool = False  # after a hit inside a block, vLLM lacks the block's latest tokens
    lookahead: int = 0  # the KV of a token also depends on so many tokens after it
    drafted_len: int | None = None  # one with KV skips steps with a longer request; None: no such
    adapters_leak: bool = False  # into requests without an adapter, from others of their step
    is_mm_prefix_lm: bool = False  # an image's tokens attend to later ones of the image

    @property
    def is_prefix_only(self) -> bool:
        return is_prefix_only(self.parts)

    @property
    def has_tails(self) -> bool:
        """Whether a chunk may be a tail: states have snapshots at chunk ends only."""
        return not self.has_rings and all(part.rule is not Rule.STATE for part in self.parts)


@dataclass(frozen=True, slots=True)
class Transfer:
    """A request's role in KV transfers: another instance loads its KV, or has computed it."""

    stores: bool = False
    loads: bool = False

    @classmethod
    def of(cls, params: object, settings: SchedulerSettings) -> Transfer:
        """From ``kv_transfer_params`` in the form that NIXL's routers send."""
        if not isinstance(params, dict):
            return NO_TRANSFER
        stores, loads = params.get("do_remote_decode"), params.get("do_remote_prefill")
        return cls(settings.stores and stores is True, settings.loads and loads is True)


NO_TRANSFER: Final = Transfer()


@dataclass(slots=True)
class LoadState:
    """The load of a request. Written by the :class:`LoadPlanner`.

    ``end``: chunk before which the load ends, decided with ``decided_from`` tokens computed and
    ``num_firm`` leading chunks of the hit firm. ``offered_from``: computed tokens when the load was
    offered. ``fetched_tokens``: tokens of the last planned load that memory lacked. ``is_second``:
    a load has failed before. ``in_step``: offered as a load inside the step.
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


@dataclass(slots=True)
class WitnessState:
    """How far a request is witnessed. Written by the :class:`BlockWitness`.

    ``num_tokens`` may include drafts that will be rejected; ``None``: the request has not been
    scheduled since it began, or began again. The blocks that the first ``num_vouched`` tokens fill
    are vouched for. Below ``due_at`` tokens, further steps change only ``num_tokens``. ``has_gap``:
    compute continued from tokens that are not witnessed. ``has_evicted``: unvouched
    blocks of vLLM's hit have left vLLM's prefix cache. ``unnamed``: recurrent states
    as vLLM has offered them, whose keys depend on an unknown token.
    """

    num_tokens: int | None = None
    num_vouched: int = 0
    due_at: int = 0
    has_gap: bool = False
    has_evicted: bool = False
    unnamed: list[StateOffer] = field(default_factory=list)

    def restart(self) -> None:
        self.reset()
        self.has_gap = False

    def reset(self) -> None:
        """The blocks belong to the former keys. A gap stays a gap."""
        self.num_tokens = None
        self.num_vouched = self.due_at = 0
        self.unnamed.clear()


@dataclass(slots=True)
class StoreState:
    """The stores of a request. Written by the :class:`StorePlanner`.

    Chunks before ``next_chunk`` are planned or stored. Chunks before ``num_counted`` are counted
    for admission to Redis, once even if planned again. ``junction``: the number of leading chunks
    after which requests that share them will need windows. ``has_tail``: the tail is planned.
    """

    next_chunk: int = 0
    has_tail: bool = False
    num_counted: int = 0
    junction: int = 0

    def restart(self) -> None:
        self.next_chunk, self.has_tail = 0, False


@dataclass(frozen=True, slots=True)
class AuditSubject:
    """Each subject gets a first audit. ``kinds``: has images, has embeddings. ``is_own``: this
    instance computed the chunk."""

    root: bytes
    kinds: tuple[bool, ...]
    is_own: bool


@dataclass(slots=True)
class AuditState:
    """The audit of a request. Written by the :class:`Auditor`.

    ``chunk`` is left to compute, and compared with the copy stored under ``key``; ``None``: no
    audit. ``is_computing``: the chunk's forward passes have begun. ``round``: how often the
    weights had been in doubt when the job was planned.
    """

    is_decided: bool = False
    chunk: int | None = None
    key: bytes = b""
    may_fetch: bool = False
    subject: AuditSubject | None = None
    is_computing: bool = False
    round: int = 0

    def close(self) -> None:
        """No further audit. ``key`` stays, so that the chunk is not stored."""
        self.is_decided, self.chunk = True, None


@dataclass(slots=True)
class RequestState:
    """Everything known about one request. Used on the scheduler thread only. ``claim``: how the
    CPU tier retains its chunks. ``source``: the instance that sends its KV."""

    request: Any
    keys: RequestKeys
    claim: Claim = field(default_factory=Claim)
    transfer: Transfer = NO_TRANSFER
    lookup: RequestLookup = field(init=False)
    load: LoadState = field(default_factory=LoadState)
    witness: WitnessState = field(default_factory=WitnessState)
    store: StoreState = field(default_factory=StoreState)
    audit: AuditState = field(default_factory=AuditState)
    source: PeerSource | None = None

    def __post_init__(self) -> None:
        self.lookup = RequestLookup(self.request, self.keys)

    def restart(self) -> None:
        """The request was preempted: it starts again from its first token."""
        self.lookup.is_counted = False  # what it loads again is counted again
        self.load.restart()
        self.witness.restart()
        self.store.restart()

    def reset(self, keys: RequestKeys) -> None:
        """An audit found a mismatch: the request continues under other ``keys``."""
        self.keys = keys
        self.lookup.reset(keys)
        self.witness.reset()
        self.store.restart()

    def run(
        self,
        parts: Sequence[Part],
        number: int,
        chunks: Sequence[int],
        keys: Sequence[bytes],
        block_ids: BlockIds,
        num_owners: int,
        **more: int,
    ) -> PartRun:
        """The run of ``chunks`` of part ``number``, stored under ``keys``."""
        parents = parents_of_part(parts, number, self.keys.keys, chunks, keys, num_owners)
        return PartRun(number, tuple(keys), tuple(chunks), block_ids, parents=parents, **more)
