"""What separates KV, on real engines: salts, and the content of adapters, embeddings and pictures.
Names do not: counters, words of clients, numbers of adapters.

vLLM itself answers wrongly where a client gives two pictures one name, or an adapter is retrained
under its path. That stays between client and instance: such KV must never get the key of other
content, or reach others.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.calls import check_integrity, sums_are_alike, wait_for_writes
from tests.support.engines.instance import StartInstance, VllmInstance
from tests.support.engines.p2p_engines import Ask, add, ask
from tests.support.engines.probe import EngineProbe, Served
from tests.support.engines.settings import (
    BLOCK_SIZE,
    CHUNK_SIZE,
    PATIENT,
    kv_transfer,
    random_prompt,
)
from tests.support.engines.tiny_variants import build_adapter, build_seeing_model
from tests.support.redis.servers import Server

LIMITS = PATIENT
FULL = 512


@pytest.fixture(scope="module")
def transfer(valkey: Server) -> dict[str, Any]:
    return kv_transfer(redis_url=valkey.url)


@pytest.fixture(scope="module")
def seeing(
    start: StartInstance, transfer: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[VllmInstance, VllmInstance]]:
    """Two processes that name their pictures by a counter."""
    settings = {
        "folder": build_seeing_model(tmp_path_factory.mktemp("seeing")),
        "max_model_len": 2048,
        "mm_processor_cache_gb": 0,
        "enable_prefix_caching": False,
    }
    with start(transfer, **settings) as one, start(transfer, **settings) as other:
        yield one, other
        one.call(check_integrity)
        other.call(check_integrity)


def words(seed: int) -> list[int]:
    """300 tokens that are no picture's."""
    return [max(3, token) for token in random_prompt(seed, 300)]


NUMBERS = count()


def asked(instance: VllmInstance, request: Ask) -> Served:
    named = replace(request, request_id=f"ask-{next(NUMBERS)}-")
    served: Served = instance.call(ask, named).served
    return served


def written(instance: VllmInstance, request: Ask) -> Served:
    """Serve, and wait until Redis has all chunks."""
    served = asked(instance, request)
    instance.call(wait_for_writes)
    return served


def asked_again(instance: VllmInstance, request: Ask) -> tuple[Served, Served]:
    """Serve, clear vLLM's own prefix cache, and serve again."""
    first = asked(instance, request)
    instance.reset_prefix_cache()
    return first, asked(instance, request)


def test_a_picture_is_its_content(seeing: tuple[VllmInstance, VllmInstance]) -> None:
    """Both processes give their first picture the same name. Chunks with tokens of a picture depend
    on it, and so do all chunks after them."""
    one, other = seeing
    wanted = Ask("", words(1), image=1)
    cold = written(one, wanted)
    assert cold.external_hit_tokens == 0
    different = written(other, replace(wanted, image=2))
    assert different.external_hit_tokens == 0
    assert different.block_digests[0] != cold.block_digests[0]
    same = written(other, wanted)
    assert same.external_hit_tokens == FULL
    assert same.block_digests[:4] == cold.block_digests[:4]
    other_words = [token % 2000 + 4 for token in wanted.prompt]
    same_picture = written(other, replace(wanted, prompt=other_words))
    assert same_picture.external_hit_tokens == CHUNK_SIZE  # a chunk of the picture alone
    assert same_picture.block_digests[:2] == cold.block_digests[:2]


# -- adapters, salts and embeddings ----------------------------------------------------------------


@pytest.fixture(scope="module")
def adapted(
    start: StartInstance, transfer: dict[str, Any]
) -> Iterator[tuple[VllmInstance, VllmInstance]]:
    settings: dict[str, Any] = {
        "enable_lora": True,
        "max_lora_rank": 8,
        "enable_prompt_embeds": True,
    }
    settings |= {"max_loras": 1, "max_cpu_loras": 1}
    with start(transfer, **settings) as one, start(transfer, **settings) as other:
        yield one, other
        one.call(check_integrity)
        other.call(check_integrity)


def adapter_ask(seed: int, path: Path, number: int, name: str = "mine") -> Ask:
    return Ask("", random_prompt(seed, 700), lora=(name, number, str(path)))


def test_another_process_hits_an_adapter_at_once(
    adapted: tuple[VllmInstance, VllmInstance], tmp_path: Path
) -> None:
    one, other = adapted
    path = build_adapter(tmp_path / "a", 1)
    cold = written(one, adapter_ask(1, path, 1))
    assert cold.external_hit_tokens == 0
    hit = written(other, adapter_ask(1, path, 7, "another name"))
    assert hit.external_hit_tokens == FULL
    assert hit.block_digests[:4] == cold.block_digests[:4]


def assert_same_kv(hit: Served, cold: Served, num_tokens: int) -> None:
    """All was loaded, and has the computed bytes."""
    assert hit.external_hit_tokens == num_tokens
    blocks = num_tokens // BLOCK_SIZE
    assert hit.block_digests[:blocks] == cold.block_digests[:blocks] != ()
    assert hit.token_ids[0] == cold.token_ids[0]


def test_tenants_are_isolated(adapted: tuple[VllmInstance, VllmInstance]) -> None:
    engine, _ = adapted
    wanted = Ask("", random_prompt(1, 700), salt="one")
    cold, hit = asked_again(engine, wanted)
    assert_same_kv(hit, cold, FULL)
    other = replace(wanted, salt="two")
    first, again = asked_again(engine, other)
    assert first.external_hit_tokens == 0
    assert first.block_digests == cold.block_digests  # computed again ...
    assert again.external_hit_tokens == FULL  # ... and stored for the other tenant
    assert again.block_digests == hit.block_digests
    engine.reset_prefix_cache()
    assert asked(engine, replace(wanted, salt="three")).external_hit_tokens == 0


def test_adapters_are_their_weights(
    adapted: tuple[VllmInstance, VllmInstance], tmp_path: Path
) -> None:
    engine, _ = adapted
    first, second = (str(build_adapter(tmp_path / str(seed), seed)) for seed in range(2))
    plain = Ask("", random_prompt(3, 700), salt="s")
    asks = {
        "plain": plain,
        "one": replace(plain, lora=("one", 101, first)),
        "two": replace(plain, lora=("two", 102, second)),
    }
    cold = {name: asked(engine, wanted) for name, wanted in asks.items()}
    assert [served.external_hit_tokens for served in cold.values()] == [0, 0, 0]
    assert len({served.block_digests for served in cold.values()}) == 3
    engine.reset_prefix_cache()
    for name, wanted in asks.items():
        assert_same_kv(asked(engine, wanted), cold[name], FULL)
    engine.reset_prefix_cache()
    renamed = replace(plain, lora=("one, said otherwise", 103, first))
    assert_same_kv(asked(engine, renamed), cold["one"], FULL)
    engine.reset_prefix_cache()
    namesake = replace(plain, lora=("one", 104, second))
    assert_same_kv(asked(engine, namesake), cold["two"], FULL)


def serve_beside(probe: EngineProbe, adapted: Ask, plain: Ask) -> None:
    """Serve ``plain`` in steps that compute ``adapted``, too."""
    started = time.perf_counter()
    names = [add(probe, adapted)]
    while not probe.scheduler.running:
        probe.engine.step()
    probe.finish([*names, add(probe, plain)], started)


def test_kv_into_which_an_adapter_leaks_is_not_stored(
    adapted: tuple[VllmInstance, VllmInstance], tmp_path: Path
) -> None:
    """On CPUs, vLLM also applies an adapter to requests without one in the same step."""
    engine, other = adapted
    path = str(build_adapter(tmp_path / "leaking", 5))
    plain = Ask("plain-", random_prompt(11, 700), salt="leak")
    beside = Ask("beside-", random_prompt(12, 700), 40, salt="leak", lora=("leaking", 105, path))
    engine.call(serve_beside, beside, plain)
    engine.call(wait_for_writes)
    alone = asked(other, replace(plain, salt="alone"))
    assert asked(other, plain).block_digests == alone.block_digests
    engine.reset_prefix_cache()
    num_alike = 5 if sums_are_alike(other) else 4  # the fifth block is computed again
    assert asked(engine, plain).block_digests[:num_alike] == alone.block_digests[:num_alike]
    engine.reset_prefix_cache()
    assert_same_kv(asked(engine, plain), alone, FULL)
    assert asked(other, replace(beside, max_tokens=2)).external_hit_tokens == FULL


def test_prompt_embeddings(adapted: tuple[VllmInstance, VllmInstance]) -> None:
    engine, _ = adapted
    wanted = Ask("", [0] * 700, salt="s", embeds=1)
    cold, hit = asked_again(engine, wanted)
    assert_same_kv(hit, cold, FULL)
    engine.reset_prefix_cache()
    other = asked(engine, replace(wanted, embeds=2))
    assert other.external_hit_tokens == 0
    assert other.block_digests[0] != cold.block_digests[0]
    # vLLM shows zeros as the ids of embeddings.
    engine.reset_prefix_cache()
    assert asked(engine, replace(wanted, embeds=None)).external_hit_tokens == 0
