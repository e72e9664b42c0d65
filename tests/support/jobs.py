"""Jobs of models that have one part, that part on one rank, and settings of its CPU tier."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from lmcache_connector.config.tiered import ConnectorConfig
from lmcache_connector.kv_layout.topology import GroupLayers, PartLayout
from lmcache_connector.kv_parts.part import BlockIds, Part, Rule
from lmcache_connector.plans import LoadJob, PartRun, StoreJob
from lmcache_connector.storage.geometry import ChunkGeometry
from lmcache_connector.worker.job_queue import Job, QueuedJob


def store_job(
    job_id: int,
    request_id: str,
    keys: tuple[bytes, ...],
    block_ids: BlockIds,
    chunks: Sequence[int] | None = None,
    job_type: type[StoreJob] = StoreJob,
    **more: Any,
) -> StoreJob:
    """``chunks``: where they are in their request; ``None``: they are its first."""
    run = PartRun(0, keys, tuple(chunks or range(len(keys))), block_ids)
    return job_type(job_id, request_id, (run,), **more)


def load_job(
    job_id: int,
    request_id: str,
    keys: tuple[bytes, ...],
    block_ids: BlockIds,
    *,
    deadline_seconds: float = 1.0,
    may_fetch: bool = False,
    after_job: int = 0,
    skip_blocks: int = 0,
) -> LoadJob:
    """The first chunks of a request."""
    run = PartRun(0, keys, tuple(range(len(keys))), block_ids, skip_blocks)
    return LoadJob(job_id, request_id, (run,), deadline_seconds, may_fetch, after_job)


def at_once(job: Job) -> QueuedJob:
    """As the job queue hands it to a lane, without a forward pass to wait for."""
    return QueuedJob(job, None, time.monotonic())


def one_part(geometry: ChunkGeometry, block_size: int) -> tuple[PartLayout, ...]:
    """A model of one full-attention group, whose layers are called ``layers.0`` and so on."""
    places = tuple(range(len(geometry.layer_widths)))
    group = GroupLayers(tuple(f"layers.{place}" for place in places), places)
    part = Part(Rule.PREFIX, (0,), block_size, 0)
    heads = len(geometry.shards)
    return (PartLayout(part, (group,), (geometry,), heads, planes=(), formats=()),)


def tier_config(rank_gib: float, **settings: Any) -> ConnectorConfig:
    """Of one rank that shares with no other engine, with as much or little memory as it says.
    Tenants are guaranteed nothing."""
    alone = {"host_sharing": False, "tenant_share": 1.0, "pin_share": 0.0}
    return ConnectorConfig().model_copy(update={"cpu_gib": rank_gib, **alone, **settings})
