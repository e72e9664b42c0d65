"""Hits from memory that are loaded inside the step that uses them, on real engines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.engine.conftest import some_soak
from tests.support.engines.calls import check_integrity, prepare_pipeline
from tests.support.engines.instance import StartInstance, VllmInstance
from tests.support.engines.probe import EngineProbe, Served
from tests.support.engines.settings import (
    BLOCK_SIZE,
    CHUNK_SIZE,
    kv_transfer,
    random_prompt,
    together,
)


@dataclass(frozen=True)
class Stepped:
    """``num_steps``: the engine's steps until the first token."""

    served: Served
    num_steps: int


def serve_in_steps(probe: EngineProbe, prompt: list[int]) -> Stepped:
    step, num_steps, first = probe.engine.step, 0, 0

    def counted() -> Any:
        nonlocal num_steps, first
        outputs = step()
        num_steps += 1
        if not first and any(output.outputs and output.outputs[0].token_ids for output in outputs):
            first = num_steps
        return outputs

    probe.engine.step = counted
    try:
        return Stepped(probe.serve(prompt), first)
    finally:
        probe.engine.step = step


def forget_prefixes(probe: EngineProbe) -> None:
    """Clear vLLM's prefix cache, and wait until the weights have been read again."""
    probe.reset_prefix_cache()
    probe.drain()


ENGINES: dict[str, dict[str, Any]] = {
    "one rank": {},
    "two ranks": {"tensor_parallel_size": 2},
    "two stages": {"pipeline_parallel_size": 2},
    "small steps": {"max_num_batched_tokens": 384},
    "in MultiConnector": {},
}
EVERY_TIME = ("one rank", "two ranks")


@pytest.fixture(scope="module", params=some_soak(ENGINES, EVERY_TIME))
def instance(start: StartInstance, request: pytest.FixtureRequest) -> Iterator[VllmInstance]:
    transfer = kv_transfer(cpu_gib=0.02)  # 20 chunks in all ranks
    if request.param == "in MultiConnector":
        transfer = together(transfer)
    with start(transfer, **ENGINES[request.param]) as instance:
        if request.param == "two stages":
            instance.call(prepare_pipeline)
        instance.serve(random_prompt(0, 300))
        yield instance


@pytest.mark.parametrize("num_tokens", [CHUNK_SIZE, CHUNK_SIZE + 1, 1200])
def test_a_hit_from_memory_loses_no_step(instance: VllmInstance, num_tokens: int) -> None:
    """The same holds for a fully cached prompt, whose last token vLLM computes again."""
    prompt = random_prompt(num_tokens, num_tokens)
    cold = instance.serve(prompt)
    short = instance.call(serve_in_steps, [1] * 9)
    instance.call(forget_prefixes)
    before = instance.counts()
    hit = instance.call(serve_in_steps, prompt)
    after = instance.counts()
    loaded = num_tokens // CHUNK_SIZE * CHUNK_SIZE
    assert hit.served.external_hit_tokens == loaded
    assert after.total("loads_in_step") == before.total("loads_in_step") + 1
    assert after.total("loaded_bytes") > before.total("loaded_bytes")
    assert hit.num_steps == short.num_steps
    assert hit.served.token_ids == cold.token_ids
    blocks = min(loaded, num_tokens - 1) // BLOCK_SIZE
    assert hit.served.block_digests[:blocks] == cold.block_digests[:blocks]
    instance.call(check_integrity)


def scale_weights(worker: Any, factor: float) -> None:
    """Uses vLLM's own call. No plan tells of it before the next step."""

    def scale(model: torch.nn.Module) -> None:
        for parameter in model.parameters():
            parameter.data.mul_(factor)

    worker.apply_model(scale)


def serve_after_scaling(probe: EngineProbe, prompt: list[int], factor: float) -> Served:
    probe.on_ranks(scale_weights, factor)
    return probe.serve(prompt)


def test_no_kv_of_old_weights_is_loaded_without_a_reset(instance: VllmInstance) -> None:
    prompt = random_prompt(50, 1200)
    old = instance.serve(prompt)
    instance.call(forget_prefixes)
    before = instance.counts()
    new = instance.call(serve_after_scaling, prompt, 2.0)
    after = instance.counts()
    try:
        assert after.total("loads_in_step") == before.total("loads_in_step")
        assert new.cached_tokens == 0
        assert set(new.block_digests).isdisjoint(old.block_digests)
    finally:
        instance.call(serve_after_scaling, random_prompt(51, 300), 0.5)
    instance.call(check_integrity)
