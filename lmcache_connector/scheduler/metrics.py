"""What the scheduler side tells ``/metrics``: its counters, as increments since it last did.

Asked after every engine step. While requests run, most of those cost one look at the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from lmcache_connector.metrics.increments import CountIncrements
from lmcache_connector.metrics.samples import Samples

if TYPE_CHECKING:
    from lmcache_connector.scheduler.counters import SchedulerCounters
    from lmcache_connector.storage.redis.circuit_breaker import CircuitState

_SCHEDULER = "scheduler"
_REFRESH_SECONDS = 0.1
# (counter of the scheduler side, metric, labels)
_COUNTS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("cpu_lookups", "lookups", ("cpu",)),
    ("redis_lookups", "lookups", ("redis",)),
    ("cpu_lookup_hits", "lookup_hits", ("cpu",)),
    ("redis_lookup_hits", "lookup_hits", ("redis",)),
    ("lookups_given_up", "lookups_given_up", ()),
    ("queried_tokens", "queried_tokens", ()),
    ("cpu_hit_tokens", "hit_tokens", ("cpu",)),
    ("redis_hit_tokens", "hit_tokens", ("redis",)),
    ("declined_tokens", "declined_tokens", ()),
    ("probes", "probes", ()),
    ("load_jobs", "load_jobs", ()),
    ("store_jobs", "store_jobs", ()),
    ("recomputed_tokens", "recomputed_tokens", ()),
    ("saved_tokens", "prefill_saved_tokens", ()),
    ("saved_seconds", "prefill_saved_seconds", ()),
)
_COUNTS_BY_LABEL = (("decisions", "decisions"),)


class SchedulerMetrics:
    """``read_lookups()``: seconds of the questions to Redis answered since the last call.
    ``read_servers()``: the circuit states of the servers asked, as ``(node, state)``.
    ``is_idle()``: no request runs, so there may be no next step to tell what is new."""

    def __init__(
        self,
        counters: SchedulerCounters,
        is_idle: Callable[[], bool],
        clock: Callable[[], float],
        read_lookups: Callable[[], Sequence[float]] = tuple,
        read_servers: Callable[[], Iterable[tuple[str, CircuitState]]] = tuple,
    ) -> None:
        self._increments = CountIncrements(counters, _COUNTS, _COUNTS_BY_LABEL)
        self._is_idle = is_idle
        self._clock = clock
        self._look_at = float("-inf")
        self._read_lookups = read_lookups
        self._read_servers = read_servers
        self._last_servers: tuple[tuple[str, CircuitState], ...] = ()

    def take(self) -> Samples | None:
        """What is new since the last call; ``None`` if nothing is, or it can wait."""
        now = self._clock()
        if now < self._look_at and not self._is_idle():
            return None
        self._look_at = now + _REFRESH_SECONDS
        samples = Samples()
        if self._increments.take_into(samples):
            self._take_servers(samples)
        for seconds in self._read_lookups():
            samples.observe("lookup_seconds", "redis", value=seconds)
        return None if samples.is_empty else samples

    def _take_servers(self, samples: Samples) -> None:
        servers = tuple(self._read_servers())
        if servers != self._last_servers:
            for node, state in servers:
                samples.set("circuit_state", _SCHEDULER, node, value=state.value)
            self._last_servers = servers
