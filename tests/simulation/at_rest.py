"""What must agree whenever an engine is at rest: no request, job or report is under way.

The scheduler's index, what every rank's memory holds, who owns it, what is pinned, and what routers
were told: each is kept by another part of the product, from what the others report.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from lmcache_connector.plans import JobResult, LoadJob, Outcome, StoreJob
from lmcache_connector.retention.ledger import PIN_SECONDS
from tests.simulation.kernel import SimulationFailure
from tests.simulation.known import OFF
from tests.simulation.rank import Rank

_NEVER = float("inf")


class RouterView:
    """What a router knows of one engine's lower tiers: stands in the place of vLLM's publisher.
    Chunks that part inside have blocks in common: ``tiers`` counts how often each is there."""

    def __init__(self) -> None:
        self.tiers: dict[str, Counter[Any]] = defaultdict(Counter)

    def publish(self, batch: Any) -> None:
        for event in batch.events:
            if not isinstance(event, BlockStored | BlockRemoved) or event.medium in (None, "GPU"):
                continue
            tier, blocks = self.tiers[event.medium], Counter(event.block_hashes)
            if isinstance(event, BlockRemoved) and not tier >= blocks:
                raise SimulationFailure(f"EVENTS: blocks left {event.medium} that were not there")
            tier.update(blocks) if isinstance(event, BlockStored) else tier.subtract(blocks)

    def get_publisher_config(self) -> None:
        """There is none."""

    def shutdown(self) -> None:
        """Nothing is open."""


@dataclass
class _Pinning:
    keys: tuple[bytes, ...]
    seconds: float
    results: list[JobResult] = field(default_factory=list)


class AtRest:
    """Of one engine. ``now`` in its methods is simulated time."""

    def __init__(self, ranks: Sequence[Rank], index: Any, view: RouterView | None) -> None:
        self._ranks = ranks
        self._index = index
        self._view = view
        self._blocks_of: dict[bytes, tuple[Any, ...]] = {}
        self._tenant_of: dict[bytes, str] = {}
        self._is_reset = False
        self._pinning: dict[int, _Pinning] = {}
        self._pinned: dict[bytes, float] = {}
        self._held: set[bytes] = set()  # pinned, and there when we looked last
        self.num_pinned = 0

    # -- what happens in between -------------------------------------------------------------------

    def named(self, key: bytes, tenant: bytes, blocks: Iterable[Any]) -> None:
        """A chunk that a job moves, whose it is, and what vLLM calls its blocks."""
        self._blocks_of[key] = tuple(map(maybe_convert_block_hash, blocks))
        self._tenant_of[key] = tenant[:1].hex() or "none"

    def planned(self, job: LoadJob | StoreJob) -> None:
        if job.claim.pin:
            seconds = min(PIN_SECONDS, job.claim.ttl_seconds or _NEVER)
            self._pinning[job.job_id] = _Pinning(job.keys, seconds)

    def reported(self, result: JobResult, now: float) -> None:
        pinning = self._pinning.get(result.job_id)
        if pinning is None:
            return
        pinning.results.append(result)
        if len(pinning.results) == len(self._ranks):
            del self._pinning[result.job_id]
            if all(each.outcome is Outcome.DONE for each in pinning.results):
                took = max(each.seconds + each.waited_seconds for each in pinning.results)
                until = now - took + pinning.seconds
                for key in pinning.keys:
                    self._pinned[key] = max(until, self._pinned.get(key, 0.0))

    def evicted_all(self) -> None:
        self._pinned.clear()
        self._held.clear()

    def reset(self) -> None:
        self._is_reset = True

    # -- what must hold ----------------------------------------------------------------------------

    def check(self, now: float) -> None:
        """Raises :class:`SimulationFailure`. Nothing is looked at that takes a step to be told."""
        if any(rank.has_news for rank in self._ranks):
            return
        held = [rank.keys_in_memory() for rank in self._ranks]
        by_all, by_some = set.intersection(*held), set.union(*held)
        self._check_index(by_all, by_some)
        for rank, keys in zip(self._ranks, held, strict=True):
            self._check_owners(rank, keys)
        self._check_pins(by_all, now)
        if self._view is not None:
            self._check_view(self._view.tiers["CPU"], by_all)

    def _check_index(self, by_all: set[bytes], by_some: set[bytes]) -> None:
        keys = sorted(by_some | self._blocks_of.keys())
        answers = zip(keys, self._index.has_each(keys), strict=True)
        found = {key for key, is_found in answers if is_found}
        if "index" not in OFF and (found != by_all or len(self._index) != len(by_some)):
            raise SimulationFailure(
                f"INDEX lost {len(by_all - found)} chunks that all ranks hold, and has"
                f" {len(found - by_all)} that they do not; {len(self._index)} of {len(by_some)}"
            )

    def _check_owners(self, rank: Rank, keys: set[bytes]) -> None:
        owners = Counter(self._tenant_of[key] for key in keys if key in self._tenant_of)
        told = {name: size // rank.chunk_bytes for name, size in rank.holdings.tenant_bytes if size}
        if told != owners:
            raise SimulationFailure(f"OWNERS: rank {rank.rank} tells {told}, and holds {owners}")

    def _check_pins(self, by_all: set[bytes], now: float) -> None:
        self._pinned = {key: until for key, until in self._pinned.items() if until > now}
        if lost := {key for key in self._held if key in self._pinned} - by_all:
            raise SimulationFailure(f"PINS: {len(lost)} chunks went before their time")
        pinned = self._pinned.keys() & by_all
        sizes = {rank.holdings.pinned_bytes // rank.chunk_bytes for rank in self._ranks}
        # What had gone before its job could pin it, or found no room, is not pinned.
        self._held = pinned if sizes == {len(pinned)} else set()
        self.num_pinned = max(self.num_pinned, len(self._held))

    def _check_view(self, told: Counter[Any], by_all: set[bytes]) -> None:
        blocks = Counter(block for key in by_all for block in self._blocks_of.get(key, ()))
        # After a reset, blocks have their names still, and chunks from before have not.
        may_miss = self._is_reset or "routers miss" in OFF
        if told - blocks or (blocks - told and not may_miss):
            raise SimulationFailure(
                f"EVENTS: routers miss {(blocks - told).total()} blocks, and know"
                f" {(told - blocks).total()} that are not there"
            )
