"""Decides when the scheduler side's samples go to ``/metrics``.

Polled after every engine step. While requests run, most polls cost one reading of the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcache_connector.metrics.samples import Samples, Tally
from lmcache_connector.plans import Tier

if TYPE_CHECKING:
    from lmcache_connector.storage.redis.client.circuit_breaker import CircuitState

_SCHEDULER = "scheduler"
_REFRESH_SECONDS = 0.1


@dataclass(eq=False)
class SchedulerMetrics:
    """``take_lookup_seconds()``: durations of the lookups that have ended since the last call.
    ``read_servers()``: the servers asked, with the state of their circuit breakers."""

    tally: Tally
    clock: Callable[[], float]
    take_lookup_seconds: Callable[[], Iterable[tuple[Tier, float]]] = tuple
    read_servers: Callable[[], tuple[tuple[str, CircuitState], ...]] = tuple

    def __post_init__(self) -> None:
        self._look_at = float("-inf")
        self._last_servers: tuple[tuple[str, CircuitState], ...] = ()

    def take(self, *, is_idle: bool) -> Samples | None:
        """New samples since the last call; ``None`` if there are none or they can wait. With
        ``is_idle``, no request runs, so samples do not wait for a next step."""
        now = self.clock()
        if now < self._look_at and not is_idle:
            return None
        self._look_at = now + _REFRESH_SECONDS
        for tier, seconds in self.take_lookup_seconds():
            self.tally.observe("lookup_seconds", tier.value, value=seconds)
        samples = self.tally.take()
        if samples is not None:
            self._set_circuits(samples)
        return samples

    def _set_circuits(self, samples: Samples) -> None:
        servers = self.read_servers()
        if servers == self._last_servers:
            return
        gone = dict(self._last_servers).keys() - dict(servers).keys()
        self._last_servers = servers
        for node in gone:  # else its last state would remain
            samples.set("circuit_state", _SCHEDULER, node, value=0.0)
        for node, state in servers:
            samples.set("circuit_state", _SCHEDULER, node, value=state.value)
