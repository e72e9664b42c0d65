"""Requests that hand over, as a router would send them; run inside an engine's process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.support.engines.probe import EngineProbe, Finished, Served

_STEPS_TO_HOLD = 2  # a server goes on making steps while blocks are held


@dataclass(frozen=True)
class Answer:
    """``params``: the ``kv_transfer_params`` of the answer, for the router to pass on."""

    served: Served
    params: dict[str, Any] | None
    finish_reason: str


@dataclass(frozen=True)
class Ask:
    """One request. ``request_id`` as a client or router gave it."""

    request_id: str
    prompt: Sequence[int]
    max_tokens: int = 2
    params: dict[str, Any] | None = None


def ask(probe: EngineProbe, request: Ask) -> Answer:
    """Serve one request to its end, and look at its KV while it still holds its blocks."""
    return ask_all(probe, [request])[0]


def ask_all(probe: EngineProbe, requests: Sequence[Ask]) -> list[Answer]:
    """Serve requests that arrive together."""
    started = time.perf_counter()
    for request in requests:
        add(probe, request)
    lengths = {request.request_id: len(request.prompt) for request in requests}
    return [answer_of(finished) for finished in probe.finish(lengths, started)]


def prefill(probe: EngineProbe, request: Ask) -> Answer:
    """Serve it, and leave its blocks to whoever fetches them."""
    started = time.perf_counter()
    add(probe, request)
    lengths = {request.request_id: len(request.prompt)}
    (finished,) = probe.finish(lengths, started, drain=False)
    for _ in range(_STEPS_TO_HOLD):
        probe.engine.step()
    return answer_of(finished)


def answer_of(finished: Finished) -> Answer:
    output = finished.output
    reason = str(output.outputs[0].finish_reason)
    return Answer(finished.served, output.kv_transfer_params, reason)


def add(probe: EngineProbe, request: Ask) -> None:
    """Add a request without stepping."""
    from vllm import SamplingParams, TokensPrompt

    extra = {"kv_transfer_params": request.params} if request.params is not None else None
    params = SamplingParams(
        max_tokens=request.max_tokens, temperature=0.0, ignore_eos=True, extra_args=extra
    )
    prompt = TokensPrompt(prompt_token_ids=list(request.prompt))
    probe.engine.add_request(request.request_id, prompt, params)


def metrics(probe: EngineProbe) -> dict[str, float]:
    """Hand-overs as vLLM's own logger has them for Prometheus, by name and reason, in short."""
    prefix = "p2p_"
    found = probe.metrics().items()
    return {name.removeprefix(prefix): value for name, value in found if name.startswith(prefix)}


def log_stats(probe: EngineProbe) -> None:
    """What vLLM does every ten seconds."""
    probe.engine.do_log_stats()
