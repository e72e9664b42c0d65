"""vLLM's own ``NixlConnector`` beside the tiered one, as disaggregated deployments run them.

The prefill instance lists the tiered connector first. One decode instance lists it second, and has
tiers of its own; the other lists it first, and shares Redis with the prefill instance.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest

from tests.support.engines.calls import check_integrity, chunk_keys, tiered_of
from tests.support.engines.handover import Answer, Ask, add, ask, prefill
from tests.support.engines.instance import VllmInstance
from tests.support.engines.nixl_engines import (
    LEASE_SECONDS,
    needs_nixl,
    nixl_transfer,
    running_nixl,
)
from tests.support.engines.probe import EngineProbe
from tests.support.engines.settings import BLOCK_SIZE, CHUNK_SIZE, kv_transfer, together
from tests.support.prompts import random_prompt
from tests.support.redis.servers import Server
from tests.support.redis.values import wait_for_chunks

pytestmark = needs_nixl
NUM_TOKENS = 1300
FULL = NUM_TOKENS // CHUNK_SIZE * CHUNK_SIZE
NUM_HEADS = 4
_FOR_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}
_seeds = count(1000)


@dataclass(frozen=True)
class Engines:
    """``nixl_first`` and ``tiers_first``: decode instances, by the order of their connectors."""

    prefill: VllmInstance
    nixl_first: VllmInstance
    tiers_first: VllmInstance

    def decode(self, order: str) -> VllmInstance:
        return self.nixl_first if order == "NIXL first" else self.tiers_first

    def compute(self, prompt: list[int]) -> Answer:
        """On the prefill instance, which keeps its blocks for a decode instance."""
        answer: Answer = self.prefill.call(prefill, Ask(_name(), prompt, 1, dict(_FOR_DECODE)))
        assert answer.params is not None
        return answer


ORDERS = ["NIXL first", "tiers first"]


@pytest.fixture(scope="module")
def engines(
    tiny_model: Path, valkey: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engines]:
    shared = kv_transfer(redis_url=valkey.url)
    transfers = [
        together(shared, nixl_transfer("kv_producer")),
        together(nixl_transfer("kv_consumer"), kv_transfer()),
        together(shared, nixl_transfer("kv_consumer")),
    ]
    folder = tmp_path_factory.mktemp("nixl")
    steps = [512, None, None]  # long prompts are computed in several
    with running_nixl(tiny_model, folder, transfers, max_num_batched_tokens=steps) as instances:
        yield Engines(*instances)


def _name() -> str:
    return f"request-{next(_seeds)}"


def unseen_prompt(num_tokens: int = NUM_TOKENS) -> list[int]:
    return random_prompt(next(_seeds), num_tokens)


def at_rest(probe: EngineProbe, seconds: float = LEASE_SECONDS / 2) -> None:
    """Nothing is held after ``seconds``: before any lease ends, unless more are given."""
    until = time.monotonic() + seconds
    while probe.scheduler.has_requests():
        assert time.monotonic() < until, f"held: {list(probe.scheduler.requests)}"
        probe.engine.step()
    check_integrity(probe)


def forget(probe: EngineProbe) -> None:
    """vLLM's own prefix cache."""
    at_rest(probe)
    probe.reset_prefix_cache()


def nixl_bytes(probe: EngineProbe) -> float:
    """Fetched by this instance so far."""
    from prometheus_client import REGISTRY

    probe.serve([1] * 10)  # vLLM counts with the next step
    return sum(
        float(sample.value)
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name == "vllm:nixl_bytes_transferred_sum"
    )


def stored_tokens(probe: EngineProbe, prompt: list[int]) -> int:
    """Of this prompt, in the CPU tier of this instance."""
    index = tiered_of(probe.connector)._scheduler.index
    return int(sum(index.has_each(chunk_keys(probe, prompt)))) * CHUNK_SIZE


def abort_after(probe: EngineProbe, request: Ask, steps: int) -> str:
    """Returns the request's status when it was aborted."""
    add(probe, request)
    for _ in range(steps):
        probe.engine.step()
    found = [
        r for name, r in probe.scheduler.requests.items() if name.startswith(request.request_id)
    ]
    status = found[0].status.name if found else "finished"
    probe.engine.abort_request([request.request_id])
    at_rest(probe)
    return status


def test_a_prompt_is_handed_over_by_nixl(engines: Engines) -> None:
    """And not stored where it was not computed: nobody there has seen that it is what it says."""
    prompt = unseen_prompt()
    cold = engines.compute(prompt)
    before = engines.nixl_first.call(nixl_bytes)
    served = engines.nixl_first.call(ask, Ask(_name(), prompt, params=cold.params))
    assert engines.nixl_first.call(nixl_bytes) - before >= len(prompt) * 1024
    assert () != served.served.block_digests == cold.served.block_digests
    assert engines.nixl_first.call(stored_tokens, prompt) == 0
    for instance in (engines.prefill, engines.nixl_first):
        instance.call(at_rest)


def test_the_prefill_instance_hands_over_what_its_tiers_spare_it(engines: Engines) -> None:
    prompt = unseen_prompt()
    cold = engines.compute(prompt)
    engines.nixl_first.call(ask, Ask(_name(), prompt, params=cold.params))
    for instance in (engines.prefill, engines.nixl_first):
        instance.call(forget)
    again = engines.compute(prompt)
    assert again.served.external_hit_tokens == FULL
    served = engines.nixl_first.call(ask, Ask(_name(), prompt, params=again.params))
    assert served.served.external_hit_tokens == 0
    assert () != served.served.block_digests == cold.served.block_digests
    engines.prefill.call(at_rest)


def test_tiers_first_spare_the_hand_over(engines: Engines, valkey: Server) -> None:
    """And the prefill instance is told that nobody will fetch it."""
    prompt = unseen_prompt()
    cold = engines.compute(prompt)
    wait_for_chunks(valkey, engines.prefill.call(chunk_keys, prompt), NUM_HEADS)
    before = engines.tiers_first.call(nixl_bytes)
    served = engines.tiers_first.call(ask, Ask(_name(), prompt, params=cold.params))
    assert served.served.external_hit_tokens == FULL
    assert engines.tiers_first.call(nixl_bytes) == before
    assert () != served.served.block_digests == cold.served.block_digests
    engines.prefill.call(at_rest)
    engines.tiers_first.call(at_rest)


def test_what_is_in_no_tier_comes_by_nixl(engines: Engines) -> None:
    prompt = unseen_prompt(CHUNK_SIZE - 1)
    cold = engines.compute(prompt)
    before = engines.tiers_first.call(nixl_bytes)
    served = engines.tiers_first.call(ask, Ask(_name(), prompt, params=cold.params))
    assert served.served.external_hit_tokens == 0
    assert engines.tiers_first.call(nixl_bytes) > before
    assert () != served.served.block_digests == cold.served.block_digests
    engines.prefill.call(at_rest)


@pytest.mark.parametrize("order", ORDERS)
def test_aborts_at_the_decode_instance_leave_nothing_wrong(engines: Engines, order: str) -> None:
    """vLLM counts a whole prompt as computed as soon as it waits for its KV."""
    decode, seen = engines.decode(order), []
    for steps in range(5):
        prompt = unseen_prompt()
        cold = engines.compute(prompt)
        seen.append(decode.call(abort_after, Ask(_name(), prompt, 8, cold.params), steps))
        engines.prefill.call(at_rest)
        decode.call(forget)
        again = decode.call(ask, Ask(_name(), prompt))
        assert again.served.block_digests == cold.served.block_digests
    assert {"WAITING", "WAITING_FOR_REMOTE_KVS", "RUNNING"} <= set(seen)


@pytest.mark.parametrize("steps", range(4))
def test_aborts_at_the_prefill_instance_leave_nothing_wrong(engines: Engines, steps: int) -> None:
    prompt = unseen_prompt()
    status = engines.prefill.call(abort_after, Ask(_name(), prompt, 1, dict(_FOR_DECODE)), steps)
    engines.prefill.call(at_rest, 2 * LEASE_SECONDS if status == "finished" else 0.0)
    engines.prefill.call(forget)
    cold = engines.compute(prompt)
    served = engines.nixl_first.call(ask, Ask(_name(), prompt, params=cold.params))
    assert () != served.served.block_digests == cold.served.block_digests
    assert len(cold.served.block_digests) == NUM_TOKENS // BLOCK_SIZE
    engines.prefill.call(at_rest)


def test_kv_that_nobody_fetches_is_let_go(engines: Engines) -> None:
    prompt = unseen_prompt()
    engines.compute(prompt)
    engines.prefill.call(at_rest, 2 * LEASE_SECONDS)
