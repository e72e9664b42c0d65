"""What must agree whenever an engine is at rest: no request, job or report is under way.

The scheduler's index, what every rank's memory holds, who owns it, what is pinned, and what routers
were told: each is kept by another part of the product, from what the others report.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from tests.simulation.kernel import SimulationFailure
from tests.simulation.rank import Rank


class RouterView:
    """What a router knows of one engine's lower tiers: stands in the place of vLLM's publisher.
    Chunks whose tokens differ late share blocks: ``tiers`` counts how often each is there."""

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


class AtRest:
    """Of one engine. ``shares``: each chunk is in the memory of one rank, for all."""

    def __init__(
        self, ranks: Sequence[Rank], index: Any, view: RouterView | None, *, shares: bool
    ) -> None:
        self._shares = shares
        self._ranks = ranks
        self._index = index
        self._view = view
        self._blocks_of: dict[bytes, tuple[Any, ...]] = {}
        self._tenant_of: dict[bytes, str] = {}
        self._is_reset = False
        self._pins: list[dict[bytes, float]] = [
            {} for _ in ranks
        ]  # until when, as of the last rest
        self.num_pinned = 0

    # -- what happens in between -------------------------------------------------------------------

    def named(self, key: bytes, tenant: bytes, blocks: Iterable[Any]) -> None:
        """A chunk that a job moves, whose it is, and what vLLM calls its blocks."""
        self._blocks_of[key] = tuple(map(maybe_convert_block_hash, blocks))
        self._tenant_of[key] = tenant[:1].hex() or "none"

    def evicted_all(self) -> None:
        for pins in self._pins:
            pins.clear()

    def reset(self) -> None:
        self._is_reset = True

    # -- what must hold ----------------------------------------------------------------------------

    def check(self, now: float) -> None:
        """``now``: on the engine's clock. Raises :class:`SimulationFailure`, unless a rank has
        something left to report with its next step."""
        if any(rank.has_updates for rank in self._ranks):
            return
        held = [rank.keys_in_memory() for rank in self._ranks]
        by_all, by_some = set.intersection(*held), set.union(*held)
        if self._shares:
            if by_all:
                raise SimulationFailure(f"ONCE: {len(by_all)} chunks are in the memory of all")
            by_all = self._known(by_some)  # what a rank failed to read is forgotten
        self._check_index(by_all, by_some if not self._shares else by_all)
        for number, keys in enumerate(held):
            self._check_owners(self._ranks[number], keys)
            self._check_pins(number, now)
        if self._view is not None:
            self._check_view(self._view.tiers["CPU"], by_all)

    def _known(self, keys: set[bytes]) -> set[bytes]:
        ordered = sorted(keys)
        held = zip(ordered, self._index.has_each(ordered), strict=True)
        return {key for key, is_held in held if is_held}

    def _check_index(self, by_all: set[bytes], by_some: set[bytes]) -> None:
        keys = sorted(by_some | self._blocks_of.keys())
        answers = zip(keys, self._index.has_each(keys), strict=True)
        found = {key for key, is_found in answers if is_found}
        if found != by_all or len(self._index._holders) != len(by_some):
            raise SimulationFailure(
                f"INDEX lost {len(by_all - found)} chunks that all ranks hold, and has"
                f" {len(found - by_all)} that they do not;"
                f" {len(self._index._holders)} of {len(by_some)}"
            )

    def _check_owners(self, rank: Rank, keys: set[bytes]) -> None:
        owners = Counter(self._tenant_of[key] for key in keys if key in self._tenant_of)
        told = {name: size // rank.chunk_bytes for name, size in rank.holdings.tenant_bytes if size}
        if told != owners:
            raise SimulationFailure(f"OWNERS: rank {rank.rank} tells {told}, and holds {owners}")

    def _check_pins(self, number: int, now: float) -> None:
        """No claim shortens another: a pinned chunk stays pinned for as long as it was to be."""
        before, pins = self._pins[number], self._ranks[number].pins()
        if lost := [k for k, until in before.items() if until > max(now, pins.get(k, 0.0))]:
            raise SimulationFailure(f"PINS: {len(lost)} chunks were let go before their time")
        self._pins[number] = pins
        self.num_pinned = max(self.num_pinned, len(pins))

    def _check_view(self, told: Counter[Any], by_all: set[bytes]) -> None:
        blocks = Counter(block for key in by_all for block in self._blocks_of.get(key, ()))
        # After a reset, blocks keep their names, but chunks from before count no more.
        if told - blocks or (blocks - told and not self._is_reset):
            raise SimulationFailure(
                f"EVENTS: routers miss {(blocks - told).total()} blocks, and know"
                f" {(told - blocks).total()} that are not there"
            )
