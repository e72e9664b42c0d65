"""Spans for look-ups, loads, stores and hand-overs, where vLLM exports traces.

A client that sends a ``traceparent`` has a trace; vLLM hands its headers on with the request. Spans
are made once something has ended, with the times at which it began and ended: nothing is open in
between, and no other process takes part. Runs on the scheduler's thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

    from lmcache_connector.vllm_compat.api.names import Request, VllmConfig

_PREFIX = "lmcache."
Attributes = Mapping[str, str | int | float]


class Spans:
    """Exports through ``tracer``; without one, nothing is told. ``clock_ns`` reads nanoseconds
    since 1970, as spans have them."""

    def __init__(
        self, tracer: Tracer | None = None, clock_ns: Callable[[], int] = time.time_ns
    ) -> None:
        self._tracer = tracer
        self._clock_ns = clock_ns
        self._begun: dict[str, dict[str, int]] = {}  # by request

    @property
    def is_on(self) -> bool:
        """Whether there is any use in telling."""
        return self._tracer is not None

    def __len__(self) -> int:
        """Requests of which something has begun and not ended."""
        return len(self._begun)

    def begin(self, request: Request, what: str) -> None:
        """``what`` (``lookup``, ``load``, ``store``, with a number where there are several) begins
        for the request. A second time before its end, it goes on."""
        if self.is_on and request.trace_headers:
            self._begun.setdefault(request.request_id, {}).setdefault(what, self._clock_ns())

    def end(self, request: Request, what: str, attributes: Attributes) -> None:
        """It has ended. Without a beginning, nothing is told of it."""
        if self._tracer is None or (started := self._take(request, what)) is None:
            return
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        span = self._tracer.start_span(
            _PREFIX + what.partition(" ")[0],
            context=TraceContextTextMapPropagator().extract(request.trace_headers),
            attributes={_PREFIX + name: value for name, value in attributes.items()},
            start_time=started,
        )
        span.end(self._clock_ns())

    def drop(self, request: Request, what: str) -> None:
        """It will not end any more."""
        self._take(request, what)

    def drop_all(self) -> None:
        """Nothing that has begun will end any more."""
        self._begun.clear()

    def _take(self, request: Request, what: str) -> int | None:
        begun = self._begun.get(request.request_id, {})
        started = begun.pop(what, None)
        if started is not None and not begun:
            del self._begun[request.request_id]
        return started


def make_spans(vllm_config: VllmConfig) -> Spans:
    """By whether vLLM exports traces. It has made the exporter itself, or refused to start."""
    if vllm_config.observability_config.otlp_traces_endpoint is None:
        return Spans()
    from opentelemetry import trace

    return Spans(trace.get_tracer("lmcache_connector"))
