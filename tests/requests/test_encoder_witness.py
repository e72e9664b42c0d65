"""The content in vLLM's encoder cache under a name that a client may have chosen.

Runs against vLLM's real manager of that cache, and models of both kinds of worker: one replaces an
output that exists, the other keeps it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.request import Request

from lmcache_connector.keys.request_keys import MultimodalSpan
from lmcache_connector.requests.encoder_witness import EncoderWitness, Spans

LENGTH = 4


def feature(name: str, offset: int = 0, mask: torch.Tensor | None = None) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(
        MultiModalKwargsItem.dummy(), "image", name, PlaceholderRange(offset, LENGTH, mask)
    )


def request(*features: MultiModalFeatureSpec, request_id: str = "r") -> Request:
    params = SamplingParams(max_tokens=1)
    return Request(request_id, [1] * 64, params, None, mm_features=list(features))


def spans_of(of: Request, *contents: str) -> Spans:
    at = [each.mm_position.offset for each in of.mm_features]
    return tuple(
        MultimodalSpan(content, start, start + LENGTH, content)
        for start, content in zip(at, contents, strict=True)
    )


class Step:
    """One step of a witness: outputs that are freed, and inputs that are encoded."""

    def __init__(self, witness: EncoderWitness) -> None:
        self.witness = witness

    def encode(self, of: Request, spans: Spans | None, *freed: str) -> None:
        output: Any = SimpleNamespace(
            free_encoder_mm_hashes=list(freed),
            scheduled_encoder_inputs={of.request_id: list(range(len(of.mm_features)))},
        )
        self.witness.next_step(output, lambda request_id: (of, spans))


@pytest.fixture
def step() -> Step:
    return Step(EncoderWitness())


def test_only_tokens_that_read_an_output_need_it(step: Step) -> None:
    mask = torch.tensor([False, True, True, False])
    one = request(feature("a", 8, mask), feature("b", 32))
    spans = spans_of(one, "a", "b")
    for start, end in ((0, 9), (11, 32), (36, 64), (9, 9)):
        assert step.witness.vouches(one, spans, start, end)
    for start, end in ((0, 10), (10, 11), (35, 36)):
        assert not step.witness.vouches(one, spans, start, end)


def test_after_a_reset_nothing_is_known(step: Step) -> None:
    one = request(feature("name"))
    step.encode(one, spans_of(one, "mine"))
    step.witness.clear()
    assert not step.witness.vouches(one, spans_of(one, "mine"), 0, 64)
    assert len(step.witness) == 0


ASKS = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("12")), max_size=40)


@given(asks=ASKS, keeps=st.booleans(), room=st.integers(1, 3))
def test_vouched_outputs_are_what_the_worker_reads(
    asks: list[tuple[str, str]], keeps: bool, room: int
) -> None:
    """``keeps``: the worker keeps outputs that exist. ``room``: outputs that fit the cache."""
    manager = EncoderCacheManager(cache_size=room * LENGTH)
    witness, outputs = EncoderWitness(), dict[str, str]()
    num_vouched = 0
    for i, (name, content) in enumerate(asks):
        one = request(feature(name), request_id=str(i))
        spans = spans_of(one, content)
        inputs: dict[str, list[int]] = {}
        if not manager.check_and_update_cache(one, 0):
            assert manager.can_allocate(one, 0, room * LENGTH, 0)
            manager.allocate(one, 0)
            inputs[one.request_id] = [0]
        freed = manager.get_freed_mm_hashes()
        output: Any = SimpleNamespace(free_encoder_mm_hashes=freed, scheduled_encoder_inputs=inputs)
        for gone in freed:
            del outputs[gone]
        if inputs and not (keeps and name in outputs):
            outputs[name] = content
        witness.next_step(output, lambda _, one=one, spans=spans: (one, spans))  # type: ignore[misc]
        if witness.vouches(one, spans, 0, 64):
            num_vouched += 1
            assert outputs[name] == content
        assert set(outputs) == set(witness._inputs)
        assert len(witness) <= room
        manager.free(one)
    assert num_vouched or not asks
