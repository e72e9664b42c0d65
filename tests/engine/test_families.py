"""Models whose layers follow several rules, or a window: each family on real engines.

Tests compare the bytes of every layer, block by block, as far as both runs still hold them. Prompts
take several steps, so that windows free blocks before the prompt ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.conftest import some_soak
from tests.support.engines.calls import (
    assert_handed_over,
    check_integrity,
    forget,
    tiered_of,
    wait_for_writes,
)
from tests.support.engines.instance import StartInstance, VllmInstance
from tests.support.engines.kv_digests import differences
from tests.support.engines.probe import EngineProbe, Served
from tests.support.engines.settings import PATIENT, random_prompt, tiered_transfer
from tests.support.engines.tiny_families import FAMILIES, build_family
from tests.support.engines.updates import weights_name
from tests.support.redis.servers import Server

LIMITS = PATIENT

BLOCK_SIZE = 128
LEAST = 1100  # tokens of most prompts: past the window, and not at its border
EVERY_TIME = ("gemma3 5:1", "gemma4", "qwen3-next")
HANDED_OVER = ("gemma3 5:1", "gemma4", "gpt-oss", "llama4")


@pytest.fixture(scope="module", params=some_soak(FAMILIES, EVERY_TIME))
def family(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    if needs := FAMILIES[name].needs:
        pytest.importorskip(needs, reason=f"runs where {needs} is installed")
    return name


@pytest.fixture(scope="module")
def one(
    start: StartInstance, family: str, valkey: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmInstance]:
    folder = build_family(family, tmp_path_factory.mktemp("family"))
    args = {"max_num_batched_tokens": 512} | FAMILIES[family].engine_args
    transfer = tiered_transfer(
        cpu_gib=0.25,
        compute_or_load="always",
        audit_share=0.0,
        redis_url=valkey.url,
        redis_timeout_seconds=10.0,  # a busy machine writes slowly
    )
    with start(transfer, folder, **args) as instance:
        yield instance
        instance.call(check_integrity)


@pytest.fixture(scope="module")
def chunk_size(one: VllmInstance) -> int:
    size: int = one.call(chunk_size_of)
    return size


def chunk_size_of(probe: EngineProbe) -> int:
    size: int = tiered_of(probe.connector)._scheduler.settings.chunk_size
    return size


@pytest.fixture(scope="module")
def end(chunk_size: int) -> int:
    """The last chunk border in most prompts."""
    return -(-LEAST // chunk_size) * chunk_size


def assert_loaded(
    hit: Served, cold: Served, end: int, start: int = 0, but: range = range(0)
) -> None:
    """Tokens from ``start`` to ``end`` came from the connector. Blocks before ``end`` equal the
    cold run's in every layer, but for those that begin in ``but``."""
    assert hit.external_hit_tokens == end - start
    assert hit.cached_tokens == end
    kept, found = (
        {place for place in served.layer_digests if place.first_token < end}
        for served in (cold, hit)
    )
    # The cold run may have freed a state, or with chunked attention all blocks before a border.
    assert {place.layer for place in kept & found} == {place.layer for place in kept} != set()
    wrong = differences(hit.layer_digests, cold.layer_digests)
    assert [p for p in wrong if p.first_token < end and p.first_token not in but] == []


def again(instance: VllmInstance, prompt: list[int], max_tokens: int = 3) -> Served:
    instance.reset_prefix_cache()
    return instance.serve(prompt, max_tokens)


@pytest.mark.parametrize("beyond", [0, 1, BLOCK_SIZE], ids=lambda n: f"border+{n}")
def test_a_prompt_is_loaded(one: VllmInstance, chunk_size: int, end: int, beyond: int) -> None:
    prompt = random_prompt(beyond, end + beyond)
    cold = one.serve(prompt, 3)
    assert cold.external_hit_tokens == 0
    hit = again(one, prompt)
    # A window at the prompt's end does not reach back far enough for its last token.
    assert_loaded(hit, cold, (len(prompt) - 1) // chunk_size * chunk_size)
    assert hit.token_ids == cold.token_ids
    one.call(check_integrity)


def test_a_hit_continues_vllms_own(one: VllmInstance, chunk_size: int, end: int) -> None:
    prompt = random_prompt(10, end + 40)
    cold = one.serve(prompt, 3)
    one.reset_prefix_cache()
    middle = end // chunk_size // 2 * chunk_size
    one.serve(prompt[: middle + 10])
    hit = one.serve(prompt, 3)
    own = hit.cached_tokens - hit.external_hit_tokens
    assert 0 < own <= middle
    assert_loaded(hit, cold, end, own)
    assert hit.token_ids == cold.token_ids


def test_the_next_turn_of_a_conversation(
    one: VllmInstance, family: str, chunk_size: int, end: int
) -> None:
    prompt = random_prompt(20, end - 30)
    first = one.serve(prompt, 60)
    turn = [*prompt, *first.token_ids[:-1], *random_prompt(21, 700)]
    cold = one.serve(turn, 3)
    hit = again(one, turn)
    # vLLM keeps no state where the answer began: it computed that chunk twice, and the first turn's
    # KV was stored.
    twice = range(end - chunk_size, end) if FAMILIES[family].has_states else range(0)
    assert_loaded(hit, cold, (len(turn) - 1) // chunk_size * chunk_size, but=twice)
    assert twice or hit.token_ids == cold.token_ids


@pytest.mark.parametrize("beyond", [1, BLOCK_SIZE], ids=lambda n: f"border+{n}")
def test_chunks_load_from_valkey(one: VllmInstance, end: int, beyond: int) -> None:
    """`test_tiers` does the same with another process."""
    prompt = random_prompt(50 + beyond, end + beyond)
    cold = one.serve(prompt, 3)
    one.call(wait_for_writes)
    one.call(forget)
    before = one.counts().total("loaded_bytes", "redis")
    hit = one.serve(prompt, 3)
    assert one.counts().total("loaded_bytes", "redis") > before
    assert_loaded(hit, cold, end)
    assert hit.token_ids[0] == cold.token_ids[0]
    one.call(check_integrity)


@pytest.mark.parametrize("family", some_soak(HANDED_OVER, EVERY_TIME), indirect=True)
def test_all_but_the_last_token_is_transferred(one: VllmInstance) -> None:
    for length in (2, 127, 129, 300, 3001):
        assert_handed_over(one, length, length)


def test_the_weights_are_named_by_files(one: VllmInstance) -> None:
    """No test before this one has changed their name."""
    one.reset_prefix_cache()
    assert one.call(weights_name).startswith("sha256:")


@pytest.mark.soak  # an engine of its own
def test_vllms_own_hits_may_end_inside_a_block(start: StartInstance, tmp_path: Path) -> None:
    """With a match unit below a block vLLM continues from a state inside a block. Chunks of such a
    request are right."""
    folder = build_family("qwen3-next", tmp_path / "states")
    args = FAMILIES["qwen3-next"].engine_args | {"max_num_batched_tokens": 512}
    transfer = tiered_transfer(cpu_gib=0.25, compute_or_load="always", audit_share=0.0)
    with start(transfer, folder, prefix_match_unit=64, **args) as one:
        size = one.call(chunk_size_of)
        prompt = random_prompt(30, 2 * size + 300)
        cold = one.serve(prompt, 3)
        turn = [*prompt, *random_prompt(31, size)]
        for _ in range(2):
            after = one.serve(turn, 3)
            assert after.external_hit_tokens == 0
            assert 2 * size < after.cached_tokens
            assert after.cached_tokens % size > 0
        for tokens, first, least in ((prompt, cold, 2 * size), (turn, after, 2 * size)):
            hit = again(one, tokens)
            assert hit.external_hit_tokens >= least
            assert_loaded(hit, first, hit.external_hit_tokens)
            assert hit.token_ids == first.token_ids
        one.call(check_integrity)
