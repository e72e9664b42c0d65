"""A real engine that exports traces: what the connector does is in the trace of the request."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.support.engines.instance import StartInstance, VllmInstance, set_environment
from tests.support.engines.probe import EngineProbe
from tests.support.engines.settings import CHUNK_SIZE
from tests.support.prompts import random_prompt
from tests.support.redis.server_groups import wait_until
from tests.tracing.test_spans import PARENT, TRACE, TRACED

_ENVIRONMENT = {
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
    "OTEL_BSP_SCHEDULE_DELAY": "100",  # milliseconds
}


class Collector:
    """Takes traces by OTLP over HTTP."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    for scope in resource.scope_spans:
                        collector.spans.extend(scope.spans)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def of_request(self) -> dict[str, list[dict[str, Any]]]:
        """Attributes of the spans in the request's trace, by name."""
        found: dict[str, list[dict[str, Any]]] = {}
        for span in self.spans:
            if span.trace_id == TRACE.to_bytes(16, "big"):
                assert span.parent_span_id == PARENT.to_bytes(8, "big")
                values = {a.key: a.value for a in span.attributes}
                found.setdefault(span.name, []).append(
                    {k: v.string_value or v.int_value for k, v in values.items()}
                )
        return found

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture(scope="module")
def engine(start: StartInstance, collector: Collector) -> Iterator[VllmInstance]:
    prepare = partial(set_environment, _ENVIRONMENT)
    with start(prepare=prepare, otlp_traces_endpoint=collector.endpoint) as instance:
        yield instance


def _ask(probe: EngineProbe, prompt: list[int]) -> None:
    from vllm import SamplingParams, TokensPrompt

    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    tokens = TokensPrompt(prompt_token_ids=prompt)
    probe.engine.add_request("traced", tokens, params, trace_headers=TRACED)
    while probe.engine.has_unfinished_requests():
        probe.engine.step()
    probe.reset_prefix_cache()
    probe.serve([5, 6, 7], 1)  # the weights have their name again


def test_look_up_store_and_load_are_in_the_requests_trace(
    engine: VllmInstance, collector: Collector
) -> None:
    prompt = random_prompt(1, 4 * CHUNK_SIZE + 5)
    engine.call(_ask, prompt)
    engine.call(_ask, prompt)
    wanted = {"llm_request": 2, "lmcache.lookup": 1, "lmcache.store": 1, "lmcache.load": 1}

    def are_there() -> bool:
        found = collector.of_request()
        return all(len(found.get(name, ())) >= count for name, count in wanted.items())

    wait_until(are_there, "spans are missing", 60.0)
    found = collector.of_request()
    # An engine that has just started looks nothing up for its first request.
    assert found["lmcache.lookup"][-1]["lmcache.hit_tokens"] == 4 * CHUNK_SIZE
    (loaded,) = found["lmcache.load"]
    assert (loaded["lmcache.chunks_done"], loaded["lmcache.outcome"]) == (4, "done")
    assert loaded["lmcache.bytes"] > 0
