"""Extras of a chunk, compared with those in vLLM's hash of a block of the same tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request

from lmcache_connector.keys.request_keys import MultimodalSpan, RequestIdentity
from lmcache_connector.requests.adapters import Adapters
from lmcache_connector.requests.identifier import RequestIdentifier
from lmcache_connector.threads import StepWait

CHUNK = 8
ITEMS = [MultiModalKwargsItem.dummy(1 + i) for i in range(2)]
KNOWN_KINDS = {"mm", "lora", "cache_salt", "prompt_embeds"}

spans = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 20)), max_size=4)


def request(**more: Any) -> Request:
    embeds = more.get("prompt_embeds")
    return Request(
        request_id="r",
        prompt_token_ids=None if embeds is not None else list(range(64)),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        **more,
    )


def images(gaps_and_lengths: list[tuple[int, int]]) -> list[MultiModalFeatureSpec]:
    features, at = [], 0
    for i, (gap, length) in enumerate(gaps_and_lengths):
        at += gap
        features.append(
            MultiModalFeatureSpec(
                data=ITEMS[i % 2],
                modality="image",
                identifier=f"image-{i % 2}",
                mm_position=PlaceholderRange(offset=at, length=length),
            )
        )
        at += length
    return features


def vllm_keys(of: Request, start: int, end: int) -> list[tuple[Any, ...]]:
    return list(kv_cache_utils.generate_block_hash_extra_keys(of, start, end, 0)[0] or ())


def identity(of: Request) -> RequestIdentity:
    identifier = RequestIdentifier(False, Adapters(1, Path), CHUNK)
    found = identifier.identify(of, StepWait(10.0))
    identifier.close()
    assert isinstance(found, RequestIdentity)
    return found


def chunk_span(at: int, count: int) -> list[tuple[int, int]]:
    return [(at * CHUNK, (at + 1) * CHUNK) for at in range(count)]


@given(spans)
def test_spans_of_a_chunk_equal_vllms(layout: list[tuple[int, int]]) -> None:
    of = request(mm_features=images(layout))
    ours = identity(of)
    for start, end in chunk_span(0, 8):
        theirs = [offset for _, _, offset in vllm_keys(of, start, end)]
        extras = ours.extras(start, end)
        offsets = [offset for _, offset in json.loads(extras)["mm"]] if extras else []
        assert offsets == theirs


def test_each_chunk_inside_an_image_has_its_own_extras() -> None:
    ours = identity(request(mm_features=images([(4, 40)])))
    parts = {ours.extras(start, end) for start, end in chunk_span(0, 6)}
    assert len(parts) == 6
    assert b"" not in parts
    assert ours.extras(48, 56) == b""


def test_another_image_at_the_same_place_is_another_chunk() -> None:
    one, two = (identity(request(mm_features=images(layout))) for layout in ([(0, 8)], [(0, 4)]))
    other = RequestIdentity(multimodal=(MultimodalSpan("other", 0, 8),))
    assert len({each.extras(0, 8) for each in (one, two, other)}) == 3


def test_prompt_embeddings_separate_chunks_as_vllms_blocks() -> None:
    embeds = torch.arange(32 * 4, dtype=torch.bfloat16).reshape(32, 4)
    changed = embeds.clone()
    changed[9, 2] += 64
    ours = [identity(request(prompt_embeds=e)) for e in (embeds, changed)]
    theirs = [request(prompt_embeds=e) for e in (embeds, changed)]
    for start, end in chunk_span(0, 5):  # the last has generated tokens only
        same = vllm_keys(theirs[0], start, end) == vllm_keys(theirs[1], start, end)
        assert (ours[0].extras(start, end) == ours[1].extras(start, end)) == same
        assert same == (start != 8)


def test_all_extras_of_vllms_block_hashes_are_known() -> None:
    """For a new kind of extra key: extend RequestIdentity, then this test."""
    everything = [
        request(
            mm_features=images([(0, 4)]),
            lora_request=LoRARequest("a", 1, "/adapter"),
            cache_salt="salt",
        ),
        request(prompt_embeds=torch.zeros(8, 4)),
    ]
    kinds = {key[0] for one in everything for key in vllm_keys(one, 0, CHUNK)}
    assert kinds == KNOWN_KINDS
    generators = {
        name
        for name in vars(kv_cache_utils)
        if name.startswith("_gen_") and name.endswith("_extra_hash_keys")
    }
    assert generators == {
        "_gen_mm_extra_hash_keys",
        "_gen_lora_extra_hash_keys",
        "_gen_prompt_embeds_extra_hash_keys",
    }
    used = set(kv_cache_utils.generate_block_hash_extra_keys.__code__.co_names)
    assert {name for name in used if name.startswith("_gen_")} == generators
    known = {"cache_salt", "append", "prompt_embeds", "lora_request", "mm_features"}
    assert used - generators - known <= {"tuple", "list", "Any", "str"}


@pytest.mark.parametrize("salt", [None, "", "a"])
def test_the_salt_is_in_the_root(salt: str | None) -> None:
    assert identity(request(cache_salt=salt)).root()["salt"] == salt
