"""Names that say nothing of what they name, on real engines: counters, clients' words, numbers.

vLLM itself answers wrongly where a client gives two pictures one name, and where an adapter is
trained again under its path. That is between the client and that instance. What must not happen is
that such KV gets the name of what it is not, and is served to others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lmcache_connector.requests.adapters import AdapterDigests
from tests.support.engines.asks import Ask, Round, add, ask_all
from tests.support.engines.calls import check_integrity
from tests.support.engines.instance import StartInstance, VllmInstance
from tests.support.engines.probe import EngineProbe
from tests.support.engines.settings import CHUNK_SIZE, kv_transfer
from tests.support.engines.tiny_variants import build_adapter, build_seeing_model
from tests.support.limits import PATIENT
from tests.support.prompts import random_prompt
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
    """Two processes that call their pictures by a counter."""
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
    """300 tokens, none of which stands for a picture."""
    return [max(3, token) for token in random_prompt(seed, 300)]


def flush(probe: EngineProbe) -> None:
    """Wait until everything stored is in Redis."""
    assert probe.connector._config.redis_url is not None
    for rank in probe.on_ranks(_writes_left):
        assert rank == 0


def _writes_left(worker: Any) -> int:
    import time

    from vllm.distributed.kv_transfer import get_kv_transfer_group

    tier = get_kv_transfer_group()._worker._tier
    for _ in range(500):
        if not (left := tier.stats().queued_bytes):
            return 0
        time.sleep(0.02)
    return int(left)


def served(instance: VllmInstance, ask: Ask) -> Round:
    answer: Round = instance.call(ask_all, [ask])
    instance.call(flush)
    return answer


def blocks(answer: Round) -> tuple[str, ...]:
    return answer.answers[0].blocks


def test_a_picture_is_its_content(seeing: tuple[VllmInstance, VllmInstance]) -> None:
    """Each process calls its first picture by the same name. A chunk that ends inside a picture
    belongs to it; so does everything after it."""
    one, other = seeing
    ask = Ask(words(1), image=1)
    cold = served(one, ask)
    assert cold.loaded_tokens == 0
    different = served(other, replace(ask, image=2))
    assert different.loaded_tokens == 0
    assert blocks(different)[0] != blocks(cold)[0]
    same = served(other, ask)
    assert same.loaded_tokens == FULL
    assert blocks(same)[:4] == blocks(cold)[:4]
    other_words = [token % 2000 + 4 for token in ask.tokens]
    same_picture = served(other, replace(ask, tokens=other_words))
    assert same_picture.loaded_tokens == CHUNK_SIZE  # the chunk that holds nothing else
    assert blocks(same_picture)[:2] == blocks(cold)[:2]


def test_pictures_that_clients_give_one_name(seeing: tuple[VllmInstance, VllmInstance]) -> None:
    one, other = seeing
    ask = Ask(words(2), image=3, uuid="mine")
    first = served(one, ask)
    second = served(one, replace(ask, image=4))
    assert second.loaded_tokens == 0, "it was never stored"
    assert blocks(second) == blocks(first), "vLLM takes the one picture for the other"
    # Not stored as the second picture's, neither here nor for others.
    for uuid in ("mine", "yours", None):
        right = served(other, replace(ask, image=4, uuid=uuid))
        assert right.loaded_tokens == (0 if uuid == "mine" else FULL)
        assert blocks(right)[0] != blocks(first)[0]
    hit = served(other, replace(ask, uuid="mine"))
    assert hit.loaded_tokens == FULL
    assert blocks(hit)[:4] == blocks(first)[:4]


# -- adapters --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapted(
    start: StartInstance, transfer: dict[str, Any]
) -> Iterator[tuple[VllmInstance, VllmInstance]]:
    settings = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1, "max_cpu_loras": 1}
    with start(transfer, **settings) as one, start(transfer, **settings) as other:
        yield one, other
        one.call(check_integrity)
        other.call(check_integrity)


def adapter_ask(seed: int, path: Path, number: int, name: str = "mine") -> Ask:
    return Ask(random_prompt(seed, 700), lora=(name, number, str(path)))


def add_lora(probe: EngineProbe, name: str, number: int, path: str) -> None:
    from vllm.lora.request import LoRARequest

    assert probe.engine.add_lora(LoRARequest(name, number, path))


def test_another_process_hits_an_adapter_with_its_first_request(
    adapted: tuple[VllmInstance, VllmInstance], tmp_path: Path
) -> None:
    one, other = adapted
    path = build_adapter(tmp_path / "a", 1)
    cold = served(one, adapter_ask(1, path, 1))
    assert cold.loaded_tokens == 0
    hit = served(other, adapter_ask(1, path, 7, "another name"))
    assert hit.loaded_tokens == FULL
    assert blocks(hit)[:4] == blocks(cold)[:4]


def test_an_adapter_that_vllm_reads_again_after_it_has_changed(
    adapted: tuple[VllmInstance, VllmInstance], tmp_path: Path
) -> None:
    """There is room for one: another one evicts it, and its next request reads the new files."""
    one, other = adapted
    path, crowd = build_adapter(tmp_path / "a", 6), build_adapter(tmp_path / "b", 7)
    old = served(one, adapter_ask(4, path, 40))
    served(one, adapter_ask(5, crowd, 41))
    build_adapter(path, 8)
    one.reset_prefix_cache()
    served(one, adapter_ask(4, path, 40))  # bypasses, or finds it gone: in any case it is read
    one.reset_prefix_cache()
    new = served(one, adapter_ask(4, path, 40))
    assert blocks(new)[0] != blocks(old)[0]
    elsewhere = served(other, adapter_ask(4, path, 42))
    assert elsewhere.loaded_tokens == FULL
    assert blocks(elsewhere)[:4] == blocks(new)[:4]


def serve_while_replaced(probe: EngineProbe, ask: Ask, seeds: Sequence[int]) -> list[int]:
    """Serve it, and have vLLM read its adapter in place while it is answered: those of ``seeds``,
    each for some tokens. Their files are hashed late, so no report tells before the last one.
    Returns all tokens of the request."""
    import threading
    from unittest import mock

    from vllm.lora.request import LoRARequest

    assert ask.lora is not None
    name, number, folder = ask.lora
    digest, may_hash = AdapterDigests.digest, threading.Event()

    def late(*args: Any) -> str:
        may_hash.wait(30.0)
        return digest(*args)

    def read_in_place(seed: int) -> None:
        build_adapter(Path(folder), seed)
        assert probe.engine.add_lora(LoRARequest(name, number, folder, load_inplace=True))

    add(probe, ask)
    outputs: list[Any] = []
    while not outputs or len(outputs[-1].outputs[0].token_ids) < 4:
        outputs += probe.engine.step()
    with mock.patch.object(AdapterDigests, "digest", late):
        for seed in seeds:
            read_in_place(seed)
            for _ in range(4):
                outputs += probe.engine.step()
        may_hash.set()
        while not outputs[-1].finished:
            outputs += probe.engine.step()
    probe.drain()
    return [*ask.tokens, *outputs[-1].outputs[0].token_ids]


@pytest.mark.parametrize("seeds", [(), (10, 9)], ids=["it stays", "it comes back"])
def test_an_adapter_that_is_another_for_some_tokens_between_two_reports(
    adapted: tuple[VllmInstance, VllmInstance], tmp_path: Path, seeds: tuple[int, ...]
) -> None:
    one, two = adapted
    path = build_adapter(tmp_path / "a", 9)
    number = 50 + len(seeds)
    ask = Ask(random_prompt(number, 220), max_tokens=60, lora=("mine", number, str(path)))
    tokens = one.call(serve_while_replaced, ask, seeds)
    one.call(flush)
    ask = replace(ask, tokens=tokens, max_tokens=2)
    found = served(two, ask)
    assert found.loaded_tokens == (0 if seeds else CHUNK_SIZE)
