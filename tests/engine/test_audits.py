"""Audits on real engines: right KV passes, wrong KV is found.

Wrong KV comes from two models with one ``model_digest``. Requests with adapters and images are in
tests/scheduler/test_auditor.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.calls import (
    check_integrity,
    share_again,
    sums_are_alike,
    wait_for_writes,
)
from tests.support.engines.instance import StartInstance, VllmInstance
from tests.support.engines.settings import (
    BLOCK_SIZE,
    CHUNK_SIZE,
    PATIENT,
    kv_transfer,
    random_prompt,
)
from tests.support.engines.updates import ROWS, audits, build_retrained_model, live_on_another_host
from tests.support.redis.servers import Server

LIMITS = PATIENT
NUM_TOKENS = 3 * CHUNK_SIZE + 40
STRENGTH = 1.0


@pytest.fixture(scope="module")
def label(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "label"
    path.write_text("as loaded")
    return path


@pytest.fixture(scope="module")
def transfer(valkey: Server, label: Path) -> dict[str, Any]:
    return kv_transfer(
        audit_share=1.0,
        redis_url=valkey.url,
        model_digest="one name for all",
        weights_label=f"file:{label}",
    )


@pytest.fixture(scope="module")
def one(start: StartInstance, transfer: dict[str, Any]) -> Iterator[VllmInstance]:
    with start(transfer, enable_lora=True, max_lora_rank=8, max_cpu_loras=4) as instance:
        yield instance
        instance.call(check_integrity)


@pytest.fixture(scope="module")
def retrained(
    start: StartInstance, transfer: dict[str, Any], tiny_model: Path, tmp_path_factory: Any
) -> Iterator[VllmInstance]:
    """Other rows in the embedding, the same name. It would notice that at start by the
    digests that the other engine has kept on this host: ``live_on_another_host`` hides them."""
    folder = tmp_path_factory.mktemp("models") / "retrained"
    build_retrained_model(folder, tiny_model, STRENGTH)
    lora: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8, "max_cpu_loras": 4}
    with start(transfer, folder, prepare=live_on_another_host, **lora) as instance:
        yield instance
        instance.call(check_integrity)


@pytest.fixture
def prompt(request: pytest.FixtureRequest) -> list[int]:
    """Has some of the retrained rows in every chunk."""
    seed = sum(map(ord, request.node.name))
    tokens = random_prompt(seed, NUM_TOKENS)
    for at in range(0, NUM_TOKENS, 8):
        tokens[at] = ROWS.start + (at // 8) % 64
    return tokens


def test_an_audit_confirms_a_right_hit(one: VllmInstance, prompt: list[int]) -> None:
    before = one.call(audits)
    cold = one.serve(prompt)
    one.reset_prefix_cache()
    hit = one.serve(prompt)
    assert hit.external_hit_tokens == 2 * CHUNK_SIZE  # the third chunk is audited
    loaded = hit.external_hit_tokens // BLOCK_SIZE
    assert () != hit.block_digests[:loaded] == cold.block_digests[:loaded]
    assert changes(one, before) == {"match": 1}


def changes(instance: VllmInstance, before: dict[str, float]) -> dict[str, float]:
    after = instance.call(audits)
    return {k: n - before.get(k, 0) for k, n in after.items() if n != before.get(k, 0)}


def test_retrained_embedding_rows_under_one_name_are_found(
    one: VllmInstance, retrained: VllmInstance, prompt: list[int]
) -> None:
    before = retrained.call(audits)
    cold = one.serve(prompt)
    one.call(wait_for_writes)
    wrong = retrained.serve(prompt)
    assert wrong.external_hit_tokens == 2 * CHUNK_SIZE  # the other model's KV
    assert wrong.block_digests[0] == cold.block_digests[0]
    assert changes(retrained, before).get("mismatch") == 1
    told = [each for each in retrained.log.splitlines() if "Audit: the KV stored for" in each]
    assert "for a plain request of" in told[-1]
    # From now on the retrained engine loads no chunk of the other.
    retrained.reset_prefix_cache()
    right = retrained.serve(prompt)
    assert right.external_hit_tokens == 0
    assert right.block_digests[0] != cold.block_digests[0]
    retrained.reset_prefix_cache()
    again = retrained.serve(prompt)
    assert again.external_hit_tokens > 0
    num_loaded = again.external_hit_tokens // BLOCK_SIZE
    num_alike = len(right.block_digests) if sums_are_alike(retrained) else num_loaded
    assert () != again.block_digests[:num_alike] == right.block_digests[:num_alike]
    assert retrained.call(audits)["mismatch"] == 1
    retrained.call(share_again)
