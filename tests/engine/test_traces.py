"""A real engine that exports traces: what the connector does is in the trace of the request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.engines.instance import StartInstance, VllmInstance
from tests.support.engines.probe import EngineProbe
from tests.support.engines.settings import CHUNK_SIZE
from tests.support.prompts import random_prompt
from tests.support.redis.servers import free_port
from tests.tracing.test_spans import PARENT, TRACE, TRACED


@pytest.fixture(scope="module")
def engine(start: StartInstance) -> Iterator[VllmInstance]:
    # Nobody listens there: what cannot be exported is dropped.
    with start(otlp_traces_endpoint=f"http://127.0.0.1:{free_port()}") as instance:
        instance.call(_listen)
        yield instance


def _listen(probe: EngineProbe) -> None:
    """Export to memory as well."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    vars(probe)["exported"] = InMemorySpanExporter()
    provider: Any = trace.get_tracer_provider()  # vLLM has made it
    provider.add_span_processor(SimpleSpanProcessor(vars(probe)["exported"]))


def _ask(probe: EngineProbe, prompt: list[int]) -> list[tuple[str, int, int, dict[str, Any]]]:
    """Of each span of the request: name, trace, parent, attributes."""
    from vllm import SamplingParams, TokensPrompt

    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    tokens = TokensPrompt(prompt_token_ids=prompt)
    probe.engine.add_request("traced", tokens, params, trace_headers=TRACED)
    while probe.engine.has_unfinished_requests():
        probe.engine.step()
    probe.drain()
    probe.reset_prefix_cache()
    exported = vars(probe)["exported"]
    spans = exported.get_finished_spans()
    exported.clear()
    return [
        (s.name, s.context.trace_id, s.parent.span_id if s.parent else 0, dict(s.attributes))
        for s in spans
        if s.name.startswith(("lmcache.", "llm_request"))
    ]


def test_look_up_store_and_load_are_in_the_requests_trace(engine: VllmInstance) -> None:
    prompt = random_prompt(1, 4 * CHUNK_SIZE + 5)
    cold, warm = engine.call(_ask, prompt), engine.call(_ask, prompt)
    assert {(trace, parent) for _, trace, parent, _ in cold + warm} == {(TRACE, PARENT)}
    assert sorted({name for name, *_ in cold}) == ["llm_request", "lmcache.lookup", "lmcache.store"]
    by_name = {name: attributes for name, _, _, attributes in warm}
    assert by_name["lmcache.lookup"]["lmcache.hit_tokens"] == 4 * CHUNK_SIZE
    loaded = by_name["lmcache.load"]
    assert (loaded["lmcache.chunks_done"], loaded["lmcache.outcome"]) == (4, "done")
    assert loaded["lmcache.bytes"] > 0
