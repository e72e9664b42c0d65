"""What the scheduler side knows of one request, and the settings it works by."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lmcache_connector.keys.request_keys import RequestKeys
from lmcache_connector.plans import LoadJob
from lmcache_connector.scheduler.background_lookup import PendingLookup


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """What the scheduler side needs of the configuration. Sizes in tokens, times in seconds."""

    chunk_size: int
    block_sizes: tuple[int, ...]  # per KV cache group
    world_size: int
    loads: bool  # kv_role consumer or both
    stores: bool  # kv_role producer or both
    store_generated: bool = True
    redis_only_reused: bool = False
    load_deadline_seconds: float = 10.0
    lookup_wait_seconds: float = 0.001


@dataclass(slots=True)
class RequestState:
    """Everything known about one request. Owned by the scheduler side, on its one thread."""

    request: Any
    keys: RequestKeys
    next_store_chunk: int = 0
    sighted_chunks: int = 0  # counted once, however often they are planned
    lookup: PendingLookup | None = None
    asked_at: float = 0.0
    lookup_until: float | None = None  # set when the request first waits for it
    lookup_chunks: tuple[int, ...] = ()
    redis_chunks: frozenset[int] = frozenset()
    offered_from: int = 0
    load_end: int | None = None  # chunk where the load ends, once decided
    deadline_seconds: float = 0.0
    may_load: bool = True
    may_store: bool = True
    load_job: LoadJob | None = None
    store_jobs: set[int] = field(default_factory=set)
    finished: bool = False
    counted: bool = False  # as looked up
    redis_hit_tokens: int = 0  # of the planned load
