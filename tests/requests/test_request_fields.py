"""Every field of a vLLM request is in the key, bypasses the tiers, or is excused with a reason."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalFieldElem, PlaceholderRange
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request

from lmcache_connector.requests.request_fields import KNOWN_FIELDS, UnknownFields, fixed_fields

FIXED = [
    LoRARequest,
    MultiModalFeatureSpec,
    PlaceholderRange,
    MultiModalFieldElem,
    SamplingParams,
    PoolingParams,
]


def request() -> Request:
    return Request("r", [1, 2, 3], SamplingParams(max_tokens=1), None)


@pytest.mark.newest
@pytest.mark.parametrize("kind", FIXED, ids=lambda kind: kind.__name__)
def test_every_field_of_a_part_is_known(kind: type) -> None:
    """For a new field: does it change the KV of given tokens? Key it or excuse it, with the
    reason."""
    assert set(fixed_fields(kind)) == KNOWN_FIELDS[kind.__name__]


def test_every_field_of_a_request_is_known() -> None:
    assert set(vars(request())) == KNOWN_FIELDS["Request"]


def test_no_field_comes_beside_the_request() -> None:
    """The fields of EngineCoreRequest are known, too."""
    gone = {"external_req_id", "data_parallel_rank", "current_wave", "reasoning_ended"}
    gone |= {"reasoning_parser_kwargs"}  # ends in structured_output_request
    sent = set(EngineCoreRequest.__struct_fields__)
    assert sent - gone <= KNOWN_FIELDS["Request"]


def test_a_used_field_of_a_newer_vllm_bypasses(caplog: pytest.LogCaptureFixture) -> None:
    unknown, plain, user = UnknownFields(), request(), request()
    nothing: tuple[Any, ...] = (None, False, 0, "", [], {})
    for unset in nothing:
        plain.attention_sinks = unset
        assert not unknown.are_used_in(plain)
    user.attention_sinks = 4
    assert unknown.are_used_in(user)
    assert unknown.are_used_in(user)
    assert caplog.text.count("Request.attention_sinks") == 1
