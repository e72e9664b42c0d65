"""Recurrent states beside drafts: hits, answers and acceptance are those of a cold run.

vLLM's CPU build cannot do this by itself: see :mod:`tests.support.engines.interpreted`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, repeat
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import some_soak
from tests.support.clock import within
from tests.support.engines.calls import (
    check_integrity,
    draft_counts,
    forget,
    served_with_drafts,
    wait_for_writes,
)
from tests.support.engines.instance import VllmInstance
from tests.support.engines.interpreted import copy_states_without_a_gpu
from tests.support.engines.kv_digests import differences
from tests.support.engines.probe import EngineProbe, Served
from tests.support.engines.settings import PATIENT, random_prompt, tiered_transfer
from tests.support.engines.tiny_drafters import BESIDE_STATES, build_states_with_drafts
from tests.support.redis.servers import Server

ANSWER = 24


@pytest.fixture(scope="module", params=some_soak(BESIDE_STATES, BESIDE_STATES[:1]))
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("states")


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where engines find each other."""
    return tmp_path_factory.mktemp("host") / "host"


def tiers(host: Path, **more: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {"cpu_gib": 0.25, "compute_or_load": "always", "audit_share": 0.0}
    return tiered_transfer(host_folder=str(host), **settings | more)


def instance(folder: Path, method: str, transfer: dict[str, Any] | None, log: Path) -> VllmInstance:
    target, drafted = build_states_with_drafts(method, folder)
    sizes: dict[str, Any] = {"kv_cache_memory_bytes": 256 << 20, "max_model_len": 8192}
    args = sizes | {"max_num_batched_tokens": 2048} | drafted
    return VllmInstance(target, transfer, log, copy_states_without_a_gpu, PATIENT, **args)


@pytest.fixture(scope="module")
def engine(
    folder: Path,
    method: str,
    host: Path,
    valkey: Server,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[VllmInstance]:
    log = tmp_path_factory.mktemp("log") / "log"
    with instance(folder, method, tiers(host, redis_url=valkey.url), log) as engine:
        yield engine
        engine.call(check_integrity)


@pytest.fixture(scope="module")
def chunk_size(engine: VllmInstance) -> int:
    """vLLM's block, which is as large as a state."""
    size: int = engine.call(block_size_of)
    return size


def block_size_of(probe: Any) -> int:
    return int(probe.scheduler.block_size)


def serve(engine: VllmInstance, prompt: list[int]) -> tuple[Served, tuple[int, int]]:
    return served_with_drafts(engine, prompt, ANSWER)


def assert_equal(hit: tuple[Served, Any], cold: tuple[Served, Any], end: int, left: int) -> None:
    """The hit's answer, its accepted drafts and all KV before its ``end``. ``left``: tokens of the
    prompt after ``end``. If one is left, vLLM computes it beside made-up drafts, and later drafts
    start at other tokens than in the cold run."""
    assert hit[0].external_hit_tokens == hit[0].cached_tokens == end
    assert hit[0].token_ids == cold[0].token_ids
    assert left == 1 or hit[1][1] == cold[1][1]
    assert_same_kv(hit[0], cold[0], end)


def assert_same_kv(one: Served, other: Served, end: int) -> None:
    """Of every layer before token ``end``. What vLLM leaves beyond it in a state, for drafts that
    were never made, is not compared."""
    before = [
        {place for place in served.layer_digests if place.first_token < end}
        for served in (one, other)
    ]
    both = before[0] & before[1]
    assert {place.layer for place in both} == {place.layer for place in before[0] | before[1]}
    wrong = differences(one.layer_digests, other.layer_digests)
    assert [place for place in wrong if place in both] == []


PROMPTS = [[*random_prompt(seed, 40)] * 60 for seed in range(2)]  # repeated: n-grams match


@pytest.mark.parametrize("beyond", [1, 100], ids=lambda n: f"border+{n}")
def test_a_hit_goes_on_as_a_cold_run_does(
    engine: VllmInstance, chunk_size: int, beyond: int
) -> None:
    accepted = 0
    for tokens in PROMPTS:
        prompt = [beyond, *tokens][: 2 * chunk_size + beyond]
        cold = serve(engine, prompt)
        assert cold[0].external_hit_tokens == 0
        accepted += cold[1][1]
        engine.call(wait_for_writes)
        for only_redis in (False, True):
            engine.reset_prefix_cache()
            if only_redis:
                engine.call(forget)
            assert_equal(serve(engine, prompt), cold, 2 * chunk_size, beyond)
    assert accepted > 0


def test_a_state_that_ends_among_drafts_is_that_of_vllms_own_cache(
    engine: VllmInstance, method: str, chunk_size: int
) -> None:
    """Answers cross a block's end at each position of a step, in rows that move when a request is
    aborted. vLLM keeps the state there if no draft beyond it was accepted; a turn goes on from it
    as from the stored one. With a head, only the connector hits anything of a turn so short."""
    num_kept, before = 0, engine.call(draft_counts)
    for seed, tokens in enumerate(PROMPTS):
        prompts = [[100 + i, seed, *tokens][: chunk_size - i] for i in range(3, 7)]
        answers = engine.call(serve_beside_an_abort, prompts)
        turns = [[*prompt, *answer[:-1]] for prompt, answer in zip(prompts, answers, strict=True)]
        served = [engine.serve(turn, 8) for turn in turns]
        engine.reset_prefix_cache()
        for turn, own in zip(turns, served, strict=True):
            assert own.external_hit_tokens in ({0} if method == "ngram" else {0, own.cached_tokens})
            if not own.cached_tokens:
                continue
            hit = engine.serve(turn, 8)
            assert hit.external_hit_tokens == hit.cached_tokens == own.cached_tokens == chunk_size
            assert_same_kv(hit, own, chunk_size)
            assert hit.token_ids == own.token_ids
            num_kept += 1
    assert num_kept > 0
    assert engine.call(draft_counts)[1] > before[1]


def serve_beside_an_abort(probe: EngineProbe, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    """The answers. Requests before and among them are aborted when some have passed the
    end of a block: vLLM moves the last one to their rows."""
    names, aborted = list[str](), list[str]()
    for number, prompt in enumerate(prompts):
        if number % 2 == 0:
            aborted.append(probe.add([number, *prompt], ANSWER))
        names.append(probe.add(prompt, ANSWER))
    for _ in range(6):
        probe.engine.step()
    assert len(probe.scheduler.running) == len(names) + len(aborted)
    probe.engine.abort_request(aborted)
    return [finished.served.token_ids for finished in probe.finish(names, 0.0)]


def test_the_connector_alone_changes_nothing(
    engine: VllmInstance, folder: Path, method: str, chunk_size: int, tmp_path: Path
) -> None:
    """vLLM's scheduler looks for its own hits in another way beside a connector (vllm#53505)."""
    prompt = [7, *PROMPTS[0]][: chunk_size + 3]
    prompts = [prompt, prompt, [*prompt, *random_prompt(50, 30)], [8, *PROMPTS[1]][:50]]
    with instance(folder, method, None, tmp_path / "log") as alone:
        without = [serve(alone, prompt) for prompt in prompts]
    for (served, drafts), prompt in zip(without, prompts, strict=True):
        with_it, its_drafts = serve(engine, prompt)
        if method == "ngram":  # beside a head vLLM's own hits end a block earlier
            assert with_it.external_hit_tokens == 0
            assert with_it.cached_tokens == served.cached_tokens
        assert (with_it.token_ids, its_drafts) == (served.token_ids, drafts)


def finds(writer: VllmInstance, reader: VllmInstance, prompt: list[int]) -> bool:
    writer.serve(prompt)
    return reader.serve(prompt).external_hit_tokens > 0


@pytest.mark.soak
def test_a_peer_reads_states(
    engine: VllmInstance, folder: Path, method: str, chunk_size: int, tmp_path: Path, host: Path
) -> None:
    prompt = [8, *PROMPTS[0]][: 2 * chunk_size + 3]
    cold = serve(engine, prompt)
    assert cold[0].external_hit_tokens == 0
    with instance(folder, method, tiers(host), tmp_path / "log") as reader:
        others = map(random_prompt, count(100), repeat(chunk_size + 2))
        assert within(30.0, lambda: finds(engine, reader, next(others)))
        before = reader.counts().total("hit_tokens", "peer")
        assert_equal(serve(reader, prompt), cold, 2 * chunk_size, 3)
        assert reader.counts().total("hit_tokens", "peer") - before == 2 * chunk_size
        reader.call(check_integrity)
