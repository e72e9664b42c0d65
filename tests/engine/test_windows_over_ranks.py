"""Windows that one rank has computed are read by two, and the other way round, head by head; the
recurrent states of two ranks by the same two."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.calls import check_integrity, wait_for_writes
from tests.support.engines.instance import StartInstance, VllmInstance
from tests.support.engines.layer_digests import differences
from tests.support.engines.settings import tiered_transfer
from tests.support.engines.tiny_families import FAMILIES, build_family
from tests.support.limits import PATIENT
from tests.support.prompts import random_prompt
from tests.support.redis.servers import Server

LIMITS = PATIENT

END = 1536


@pytest.fixture(scope="module")
def engines(
    start: StartInstance, valkey: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[int, VllmInstance]]:
    """By the number of ranks."""
    folder: Path = build_family("gemma3", tmp_path_factory.mktemp("family"))
    transfer: dict[str, Any] = tiered_transfer(
        cpu_gib=0.25,
        compute_or_load="always",
        audit_share=0.0,
        redis_url=valkey.url,
    )
    with (
        start(transfer, folder) as one,
        start(transfer, folder, tensor_parallel_size=2) as two,
    ):
        yield {1: one, 2: two}


@pytest.mark.soak  # two engines; tests/worker/test_parts.py shares windows between ranks
@pytest.mark.parametrize(("writers", "readers"), [(1, 2), (2, 1)])
def test_windows_are_shared(engines: dict[int, VllmInstance], writers: int, readers: int) -> None:
    prompt = random_prompt(writers, END + 20)
    cold = engines[writers].serve(prompt)
    engines[writers].call(wait_for_writes)
    hit = engines[readers].serve(prompt)
    assert hit.external_hit_tokens == END
    both = hit.layer_digests.keys() & cold.layer_digests.keys()
    assert {place.head for place in both} == {0, 1}
    assert {place.layer for place in both} == {place.layer for place in hit.layer_digests}
    wrong = differences(hit.layer_digests, cold.layer_digests)
    assert [place for place in wrong if place.first_token < END] == []
    engines[readers].call(check_integrity)


@pytest.mark.soak
def test_states_of_two_ranks_come_back(
    start: StartInstance, valkey: Server, tmp_path: Path
) -> None:
    folder = build_family("qwen3-next", tmp_path)
    transfer = tiered_transfer(
        cpu_gib=0.25, compute_or_load="always", audit_share=0.0, redis_url=valkey.url
    )
    args = FAMILIES["qwen3-next"].engine_args | {"block_size": 256, "max_num_batched_tokens": 512}
    with start(transfer, folder, tensor_parallel_size=2, **args) as two:
        prompt = random_prompt(3, 1100)
        cold = two.serve(prompt, 3)
        two.reset_prefix_cache()
        hit = two.serve(prompt, 3)
        end = hit.cached_tokens
        assert hit.external_hit_tokens == end >= 512
        assert {place.head for place in hit.layer_digests} == {0, 1}
        wrong = differences(hit.layer_digests, cold.layer_digests)
        assert [place for place in wrong if place.first_token < end] == []
        assert hit.token_ids == cold.token_ids
        two.call(check_integrity)
