"""Drafters with their own KV: a hit leaves their acceptance rate as it was after a cold prefill.

Tests compare the bytes of every layer, the drafter's included, and the number of accepted drafts.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.conftest import some_soak
from tests.support.engines.calls import (
    assert_handed_over,
    check_integrity,
    forget,
    served_with_drafts,
    wait_for_writes,
)
from tests.support.engines.instance import StartInstance, VllmInstance
from tests.support.engines.kv_digests import differences
from tests.support.engines.probe import Served
from tests.support.engines.settings import PATIENT, random_prompt, tiered_transfer
from tests.support.engines.tiny_drafters import KINDS, build_drafted
from tests.support.engines.updates import flip_one_bit_of_the_drafter, weights_name
from tests.support.redis.servers import Server

LIMITS = PATIENT
CHUNK = 128
EVERY_TIME = ("eagle",)
SHARP = {"draft_model": 1.0, "eagle": 0.1}
"""The least acceptance rate of these drafters: ``draft_model`` is the model itself, ``eagle`` came
to 0.3 and more. Of the others' drafts, which are random, none is accepted."""


@pytest.fixture(scope="module", params=some_soak(KINDS, EVERY_TIME))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def engine(
    start: StartInstance, kind: str, valkey: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmInstance]:
    folder, args = build_drafted(kind, tmp_path_factory.mktemp("drafted"))
    transfer = tiered_transfer(
        cpu_gib=0.25,
        compute_or_load="always",
        audit_share=0.0,
        redis_url=valkey.url,
    )
    with start(transfer, folder, **{"max_num_batched_tokens": 512} | args) as instance:
        yield instance
        instance.call(check_integrity)


def assert_equal(hit: Served, other: Served, end: int) -> None:
    """All layers have the same bytes before token ``end``."""
    places = {place for place in other.layer_digests if place.first_token < end}
    assert {p.first_token for p in places} == set(range(0, end, CHUNK))
    assert places <= hit.layer_digests.keys()
    wrong = differences(hit.layer_digests, other.layer_digests)
    assert [place for place in wrong if place.first_token < end] == []


def test_hits_do_not_lower_acceptance(engine: VllmInstance, kind: str) -> None:
    for seed in range(3):
        prompt = random_prompt(seed, 700)
        computed, (drafted, accepted) = served_with_drafts(engine, prompt, 40)
        assert computed.external_hit_tokens == 0
        assert accepted / drafted >= SHARP.get(kind, 0.0)
        engine.call(wait_for_writes)
        for only_redis in (False, True):
            engine.reset_prefix_cache()
            if only_redis:
                engine.call(forget)
            hit, drafts_of_hit = served_with_drafts(engine, prompt, 40)
            assert hit.external_hit_tokens == hit.cached_tokens == 640
            assert_equal(hit, computed, 640)
            assert hit.token_ids == computed.token_ids
            assert drafts_of_hit[1] / drafts_of_hit[0] == accepted / drafted


@pytest.mark.parametrize("beyond", [0, 1, CHUNK], ids=lambda n: f"border+{n}")
def test_chunk_borders(engine: VllmInstance, kind: str, beyond: int) -> None:
    prompt = random_prompt(10 + beyond, 512 + beyond)
    computed = engine.serve(prompt)
    engine.reset_prefix_cache()
    hit = engine.serve(prompt)
    # A request does not know the token after a prompt that ends with a chunk.
    known = len(prompt) if kind == "draft_model" else len(prompt) - 1
    assert hit.external_hit_tokens == known // CHUNK * CHUNK
    assert_equal(hit, computed, known // CHUNK * CHUNK)


@pytest.mark.parametrize("kind", some_soak(["eagle", "draft_model"], EVERY_TIME), indirect=True)
def test_all_but_the_last_token_is_transferred(engine: VllmInstance) -> None:
    for length in (2, 127, 129, 300, 3001):
        assert_handed_over(engine, length, length)


def test_a_drafters_update_renames_weights(engine: VllmInstance, kind: str) -> None:
    """Resets before the update keep the name, whatever layers drafter and model share."""
    prompt, name = random_prompt(60, 500), engine.call(weights_name)
    assert name.startswith("memory:" if "mtp" in kind else "sha256:")  # MTP layers have no files
    engine.serve(prompt)
    engine.reset_prefix_cache()
    assert engine.serve(prompt).external_hit_tokens == 384
    assert engine.call(weights_name) == name
    engine.call(flip_one_bit_of_the_drafter)
    engine.reset_prefix_cache()
    assert engine.serve(prompt).external_hit_tokens == 0
    assert engine.call(weights_name) != name
