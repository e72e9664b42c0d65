"""Engine start on the scheduler side: waits for the ranks' reports that chunk keys depend on.

A model may change its configuration while it is built, which with several ranks happens in their
processes only. So every rank reports its configuration with its first step. Until all have
reported, no request gets keys; vLLM asks again, for a bounded time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from lmcache_connector.keys.prefix_hash import PrefixHasher
from lmcache_connector.plans import Fetched, RankReport, RankStart

logger = logging.getLogger(__name__)

_WAIT_SECONDS = 10.0


@dataclass(eq=False)
class EngineStart:
    """Makes the hasher once all ``world_size`` ranks have reported the same configuration.

    ``make_hasher`` takes the configuration: digests by name. ``learn`` first gets the reports if
    they contain more than the scheduler's process knows. If they disagree, or are silent for ten
    seconds while one waits, requests bypass the connector until all agree; the error is logged.
    """

    world_size: int
    make_hasher: Callable[[Mapping[str, str]], PrefixHasher]
    clock: Callable[[], float]
    learn: Callable[[Sequence[RankStart]], None] = lambda starts: None

    def __post_init__(self) -> None:
        self.hasher: PrefixHasher | None = None
        self.configuration: dict[str, str] = {}
        self._starts: dict[int, RankStart] = {}
        self._deadline: float | None = None  # set when the first request waits
        self._is_given_up = False

    @property
    def known_hasher(self) -> PrefixHasher:
        assert self.hasher is not None, "no request has a state before the ranks have reported"
        return self.hasher

    def is_awaited(self) -> bool:
        """Whether a request must wait for the hasher; if not, it bypasses the connector."""
        if self._is_given_up:
            return False
        if self._deadline is None:
            self._deadline = self.clock() + _WAIT_SECONDS
        if self.clock() < self._deadline:
            return True
        missing = sorted(set(range(self.world_size)) - self._starts.keys())
        self._give_up(f"ranks {missing} have not reported within {_WAIT_SECONDS:g} s of a request")
        return False

    def update(self, reports: Iterable[RankReport]) -> tuple[tuple[Fetched, ...], ...]:
        """Process start reports. Returns the measurements of all ranks once all have reported."""
        new = {report.rank: report.start for report in reports if report.start is not None}
        self._starts |= new
        if not new or len(self._starts) < self.world_size:
            return ()
        starts = [self._starts[rank] for rank in sorted(self._starts)]
        if differing := _differing(starts):
            self._give_up(f"ranks see different configurations: they differ in {differing}")
        else:
            # Kinds of layers have entries of their own, which some pipeline stages lack.
            if all(start.layer_widths for start in starts):
                self.learn(starts)
            self.configuration = dict(sorted({e for start in starts for e in start.configuration}))
            self.hasher = self.make_hasher(self.configuration)
        return tuple(start.measured for start in starts)

    def _give_up(self, why: str) -> None:
        self._is_given_up = True
        logger.error("LMCacheTieredConnector: all requests bypass the KV cache tiers: %s", why)


def _differing(starts: list[RankStart]) -> str:
    """Names of the configuration's entries that differ between ranks that have them."""
    found: dict[str, set[str]] = {}
    for start in starts:
        for name, digest in start.configuration:
            found.setdefault(name, set()).add(digest)
    return ", ".join(sorted(name for name, digests in found.items() if len(digests) > 1))
