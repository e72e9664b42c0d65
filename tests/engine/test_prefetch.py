"""One request at a time: the KV of those that queue comes from Redis into memory meanwhile."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.engines.calls import check_integrity, chunk_keys
from tests.support.engines.instance import StartInstance, VllmInstance
from tests.support.engines.probe import EngineProbe, Served
from tests.support.engines.settings import BLOCK_SIZE, CHUNK_SIZE, kv_transfer
from tests.support.memory import forget_memory
from tests.support.prompts import random_prompt
from tests.support.redis.servers import Server
from tests.support.redis.values import wait_for_chunks
from tests.support.unused import num_unused

NUM_TOKENS, NUM_CHUNKS = 1100, 4
NUM_HEADS = 4
LONG = 600  # tokens of the answer that the others wait for


@dataclass(frozen=True)
class Stored:
    prompt: list[int]
    cold: Served


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.soak)])
def engine(
    request: pytest.FixtureRequest, start: StartInstance, valkey: Server
) -> Iterator[VllmInstance]:
    with valkey.client() as client:
        client.flushall()
    transfer = kv_transfer(redis_url=valkey.url)
    with start(transfer, max_num_seqs=1, tensor_parallel_size=request.param) as instance:
        instance.serve([1] * 10)  # the ranks report with it, and from then on prompts are stored
        yield instance
        instance.call(check_integrity)


@pytest.fixture
def stored(engine: VllmInstance, valkey: Server, request: pytest.FixtureRequest) -> Stored:
    """A prompt of its own that Redis has, and no memory."""
    seed = sum(map(ord, request.node.name))
    cold = engine.serve(random_prompt(seed, NUM_TOKENS))
    keys = engine.call(chunk_keys, random_prompt(seed, NUM_TOKENS))
    wait_for_chunks(valkey, keys, NUM_HEADS)
    engine.call(forget_everything)
    return Stored(random_prompt(seed, NUM_TOKENS), cold)


@dataclass(frozen=True)
class Waited:
    """``held``: chunks in the memory of every rank when the request that runs was still running,
    and the other had not begun. ``unused``: of those, what nobody had used."""

    held: list[int]
    served: Served
    unused: list[int]


def forget_everything(probe: EngineProbe) -> None:
    """And let the scheduler side know."""
    probe.reset_prefix_cache()
    probe.on_ranks(_forget_on_rank)
    probe.serve([1] * 10)
    assert len(probe.connector._scheduler.index) == 0


def _worker(worker: Any) -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()._worker


def _forget_on_rank(worker: Any) -> None:
    forget_memory(_worker(worker))


def _held_on_rank(worker: Any, keys: list[bytes]) -> int:
    return sum(map(_worker(worker)._engine.holds, keys))


def _unused_on_rank(worker: Any) -> int:
    return num_unused(_worker(worker)._engine)


def queue_behind(probe: EngineProbe, prompt: list[int]) -> tuple[str, str, list[int]]:
    """The request that runs, the one that waits, and how many chunks of that one each rank has by
    the time all are there."""
    runs = probe.add(random_prompt(7, 40), max_tokens=LONG)
    while not probe.scheduler.running:
        probe.engine.step()
    waits, keys = probe.add(prompt), chunk_keys(probe, prompt)
    known = probe.connector._scheduler.index
    while probe.scheduler.running and not all(known.has_each(keys)):  # a step after they came
        probe.engine.step()
    held = probe.on_ranks(_held_on_rank, keys)
    assert [one.request_id.startswith(runs) for one in probe.scheduler.running] == [True]
    return runs, waits, held


def serve_behind(probe: EngineProbe, prompt: list[int]) -> Waited:
    runs, waits, held = queue_behind(probe, prompt)
    probe.engine.abort_request([runs])
    (finished,) = probe.finish({waits: len(prompt)}, time.perf_counter())
    check_integrity(probe)
    return Waited(held, finished.served, probe.on_ranks(_unused_on_rank))


def test_chunks_come_into_memory_while_their_request_waits(
    engine: VllmInstance, stored: Stored
) -> None:
    before = engine.counts()
    waited = engine.call(serve_behind, stored.prompt)
    after = engine.counts()

    def counted(name: str) -> float:
        return after.total(name) - before.total(name)

    assert set(waited.held) == {NUM_CHUNKS}
    assert set(waited.unused) == {0}
    full = NUM_CHUNKS * CHUNK_SIZE
    assert waited.served.external_hit_tokens == full
    assert after.total("hit_tokens", "cpu") - before.total("hit_tokens", "cpu") == full
    assert counted("prefetched_bytes") == NUM_CHUNKS << 20
    assert counted("failed_loads") == 0
    blocks = full // BLOCK_SIZE
    assert waited.served.block_digests[:blocks] == stored.cold.block_digests[:blocks]
    assert waited.served.token_ids[0] == stored.cold.token_ids[0]


def freeze_while_fetching(probe: EngineProbe, prompt: list[int], port: int) -> None:
    """What runs goes on, and the one that waits is served as well."""
    runs = probe.add(random_prompt(7, 40), max_tokens=60)
    while not probe.scheduler.running:
        probe.engine.step()
    probe.on_ranks(_freeze_with_next_read, port)
    waits = probe.add(prompt)
    before = probe.counts().total("prefetch_jobs")
    finished = probe.finish({runs: 40, waits: len(prompt)}, time.perf_counter())
    assert [len(one.served.token_ids) for one in finished] == [60, 2]
    assert probe.counts().total("prefetch_jobs") > before
    check_integrity(probe)


def _freeze_with_next_read(worker: Any, port: int) -> None:
    """Redis answers nobody for three seconds, from the moment when a read begins."""
    from redis import Redis

    tier = _worker(worker)._tier
    read = tier.read

    def freeze(*args: Any) -> Any:
        del tier.read
        with Redis(port=port) as client:
            client.execute_command("CLIENT", "PAUSE", 3000, "ALL")
        return read(*args)

    tier.read = freeze


def test_a_frozen_redis_holds_up_nobody(
    engine: VllmInstance, stored: Stored, valkey: Server
) -> None:
    """Last: what is known of Redis is bad from here on."""
    engine.call(freeze_while_fetching, stored.prompt, valkey.port)
