"""vLLM's own ``NixlConnector`` beside the tiered one, as disaggregated deployments run them.

The prefill instance lists the tiered connector first, the decode instance lists it second. Requests
that are aborted while another connector works are in tests/scheduler/test_random_lives.py.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest

from tests.support.engines.calls import check_integrity, chunk_keys, tiered_of
from tests.support.engines.instance import VllmInstance
from tests.support.engines.p2p_engines import (
    Answer,
    Ask,
    ask,
    nixl_transfer,
    nixl_transferred,
    prefill,
    running_nixl,
)
from tests.support.engines.probe import EngineProbe
from tests.support.engines.settings import CHUNK_SIZE, kv_transfer, random_prompt, together
from tests.support.redis.servers import Server

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None or importlib.util.find_spec("nixl_cu13") is None,
    reason="runs where nixl and nixl-cu13 are installed: their wheels are for Linux",
)
NUM_TOKENS = 1300
FULL = NUM_TOKENS // CHUNK_SIZE * CHUNK_SIZE
STEP_TOKENS = 512  # long prompts are computed in several steps
PATIENCE_SECONDS = 20.0  # less than NIXL's lease of 30 s: blocks are freed by a message
_FOR_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}
_seeds = count(1000)


@dataclass(frozen=True)
class Engines:
    prefill: VllmInstance
    decode: VllmInstance

    def compute(self, prompt: list[int]) -> Answer:
        """Prefill. The instance keeps the blocks for the decode instance."""
        answer: Answer = self.prefill.call(prefill, Ask(_name(), prompt, 1, dict(_FOR_DECODE)))
        assert answer.params is not None
        return answer

    def fetch(self, prompt: list[int], cold: Answer) -> Answer:
        """Decode, with the blocks of ``cold``."""
        answer: Answer = self.decode.call(ask, Ask(_name(), prompt, params=cold.params))
        return answer

    def rest(self) -> None:
        """The decode instance has the prefill instance free its blocks."""
        for instance in (self.decode, self.prefill):
            instance.call(at_rest)


@pytest.fixture(scope="module")
def engines(
    tiny_model: Path, valkey: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engines]:
    transfers = [
        together(kv_transfer(redis_url=valkey.url), nixl_transfer("kv_producer")),
        together(nixl_transfer("kv_consumer"), kv_transfer()),
    ]
    folder = tmp_path_factory.mktemp("nixl")
    with running_nixl(
        tiny_model, folder, transfers, max_num_batched_tokens=STEP_TOKENS
    ) as instances:
        yield Engines(*instances)


def _name() -> str:
    return f"request-{next(_seeds)}"


def unseen_prompt(num_tokens: int = NUM_TOKENS) -> list[int]:
    return random_prompt(next(_seeds), num_tokens)


def at_rest(probe: EngineProbe) -> None:
    """No request is left after ``PATIENCE_SECONDS``."""
    until = time.monotonic() + PATIENCE_SECONDS
    while probe.scheduler.has_requests():
        assert time.monotonic() < until, f"held: {list(probe.scheduler.requests)}"
        probe.engine.step()
    check_integrity(probe)


def forget(probe: EngineProbe) -> None:
    """Clear vLLM's own prefix cache."""
    at_rest(probe)
    probe.reset_prefix_cache()


def nixl_bytes(probe: EngineProbe) -> float:
    """Bytes that this instance has fetched."""
    return nixl_transferred(probe)[0]


def stored_tokens(probe: EngineProbe, prompt: list[int]) -> int:
    """The prompt's tokens in the CPU tier of this instance."""
    index = tiered_of(probe.connector)._scheduler.index
    return int(sum(index.has_each(chunk_keys(probe, prompt)))) * CHUNK_SIZE


def test_nixl_transfers_a_prompt(engines: Engines) -> None:
    """The decode instance does not store it: it has not computed the KV."""
    prompt = unseen_prompt()
    cold = engines.compute(prompt)
    before = engines.decode.call(nixl_bytes)
    served = engines.fetch(prompt, cold)
    assert engines.decode.call(nixl_bytes) - before >= len(prompt) * 1024
    assert () != served.served.block_digests == cold.served.block_digests
    assert engines.decode.call(stored_tokens, prompt) == 0
    engines.rest()


def test_the_prefill_instance_transfers_kv_that_its_tiers_loaded(engines: Engines) -> None:
    prompt = unseen_prompt()
    cold = engines.compute(prompt)
    engines.fetch(prompt, cold)
    for instance in (engines.decode, engines.prefill):
        instance.call(forget)
    again = engines.compute(prompt)
    assert again.served.external_hit_tokens == FULL
    before = engines.decode.call(nixl_bytes)
    served = engines.fetch(prompt, again)
    assert engines.decode.call(nixl_bytes) > before
    assert () != served.served.block_digests == cold.served.block_digests
    engines.rest()
