"""Instances of other tensor-parallel sizes and block sizes read each other's chunks, byte for byte.

A digest covers one KV head over all layers, tokens in their order, so digests compare across block
sizes and ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.clock import wait_until
from tests.support.engines.calls import (
    assert_handed_over,
    check_integrity,
    chunk_keys,
    prepare_pipeline,
)
from tests.support.engines.instance import StartInstance, VllmInstance
from tests.support.engines.probe import EngineProbe, Served
from tests.support.engines.settings import CHUNK_SIZE, PATIENT, kv_transfer, random_prompt
from tests.support.engines.updates import move_weights, weights_name
from tests.support.redis.servers import Server, values_of

LIMITS = PATIENT
NUM_HEADS = 4
NUM_TOKENS = 1500
TOKEN_BYTES = 4 * NUM_HEADS * 2 * 64 * 2  # layers, heads, K and V, elements, bytes
NUM_CHUNKS = NUM_TOKENS // CHUNK_SIZE
HIT = NUM_CHUNKS * CHUNK_SIZE

seeds = itertools.count(1000)


@pytest.fixture(scope="module")
def transfer(valkey: Server) -> dict[str, Any]:
    return kv_transfer(redis_url=valkey.url)


@pytest.fixture(scope="module")
def one(start: StartInstance, transfer: dict[str, Any]) -> Iterator[VllmInstance]:
    """One rank, blocks of 128 tokens."""
    with start(transfer) as instance:
        yield instance
        instance.call(check_integrity)


@pytest.fixture(scope="module")
def two(start: StartInstance, transfer: dict[str, Any]) -> Iterator[VllmInstance]:
    """Two tensor-parallel ranks, blocks of 128 tokens, compressed values."""
    settings = transfer["kv_connector_extra_config"] | {"redis_codec": "blosc2"}
    compressing = transfer | {"kv_connector_extra_config": settings}
    with start(compressing, tensor_parallel_size=2) as instance:
        yield instance
        instance.call(check_integrity)


@pytest.fixture
def prompt() -> list[int]:
    return random_prompt(next(seeds), NUM_TOKENS)


def chunk_tags(probe: EngineProbe, prompt: list[int]) -> list[bytes]:
    """The common beginning of the names of each chunk's values."""
    return [b"lmc:{default:%s}" % key.hex().encode() for key in chunk_keys(probe, prompt)]


def serve_cold(
    instance: VllmInstance, valkey: Server, prompt: list[int], num_values: int = NUM_HEADS
) -> Served:
    """Compute a prompt, and wait until each of its chunks is in Redis in ``num_values`` values."""
    cold = instance.serve(prompt)
    assert cold.external_hit_tokens == 0
    tags = instance.call(chunk_tags, prompt)
    assert len(tags) == NUM_CHUNKS
    wait_until(
        lambda: all(len(values_of(valkey, tag)) == num_values for tag in tags),
        "the writes did not arrive",
    )
    return cold


def assert_same_bytes(hit: Served, cold: Served) -> None:
    assert hit.external_hit_tokens == HIT
    assert len(hit.shard_digests) == NUM_CHUNKS
    assert {len(heads) for heads in hit.shard_digests} == {NUM_HEADS}
    assert hit.shard_digests == cold.shard_digests
    assert len(set(itertools.chain(*hit.shard_digests))) == NUM_CHUNKS * NUM_HEADS


def stored_bytes(valkey: Server, tags: list[bytes]) -> int:
    with valkey.client() as client:
        return sum(client.strlen(name) for tag in tags for name in values_of(valkey, tag))


def failed_loads(instance: VllmInstance) -> int:
    return int(instance.counts().total("failed_loads"))


# -- shapes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("writer", "reader"), [("one", "two"), ("two", "one")])
def test_other_tensor_parallel_sizes_share(
    request: pytest.FixtureRequest, valkey: Server, prompt: list[int], writer: str, reader: str
) -> None:
    cold = serve_cold(request.getfixturevalue(writer), valkey, prompt)
    tags = request.getfixturevalue(writer).call(chunk_tags, prompt)
    share = stored_bytes(valkey, tags) / (HIT * TOKEN_BYTES)
    assert share < 0.8 if writer == "two" else share >= 1.0
    instance: VllmInstance = request.getfixturevalue(reader)
    before = instance.counts().total("loaded_bytes", "redis")
    assert_same_bytes(instance.serve(prompt), cold)
    loaded = instance.counts().total("loaded_bytes", "redis") - before
    assert loaded == HIT * TOKEN_BYTES


@pytest.mark.parametrize("block_size", [32, pytest.param(64, marks=pytest.mark.soak)])
def test_other_block_sizes_read_and_write_the_same_chunks(
    start: StartInstance, transfer: dict[str, Any], valkey: Server, one: VllmInstance,
    two: VllmInstance, block_size: int,
) -> None:  # fmt: skip
    prompts = [random_prompt(next(seeds), NUM_TOKENS) for _ in range(3)]
    from_one, from_two = serve_cold(one, valkey, prompts[0]), serve_cold(two, valkey, prompts[1])
    with start(transfer, block_size=block_size) as other:
        assert_same_bytes(other.serve(prompts[0]), from_one)
        assert_same_bytes(other.serve(prompts[1]), from_two)
        cold = serve_cold(other, valkey, prompts[2])
        assert len(cold.block_digests) == NUM_TOKENS // block_size
        other.call(check_integrity)
    for reader in (one, two):
        assert_same_bytes(reader.serve(prompts[2]), cold)


def empty_cpu_tiers(probe: EngineProbe, prompt: list[int]) -> None:
    probe.reset_prefix_cache()
    probe.on_ranks(forget_on_rank, chunk_keys(probe, prompt))


def forget_on_rank(worker: Any, keys: list[bytes]) -> None:
    """Drop chunks from a rank's CPU tier."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    for key in keys:
        get_kv_transfer_group()._worker._tiers.engine.cpu.forget(key)


@pytest.mark.soak  # two more ranks; tests/worker and tests/kv_layout test the layers of a stage
def test_pipeline_ranks_share_with_equal_pipelines_only(
    start: StartInstance,
    transfer: dict[str, Any],
    valkey: Server,
    one: VllmInstance,
    prompt: list[int],
) -> None:
    """Each rank has two layers. An instance without a pipeline has a head's four layers in one
    value."""
    with start(transfer, pipeline_parallel_size=2) as pipeline:
        pipeline.call(prepare_pipeline)
        cold = serve_cold(pipeline, valkey, prompt, num_values=2 * NUM_HEADS)
        pipeline.reset_prefix_cache()
        assert_same_bytes(pipeline.serve(prompt), cold)
        pipeline.call(empty_cpu_tiers, prompt)
        before = pipeline.counts().total("loaded_bytes", "redis")
        pipeline.serve(random_prompt(next(seeds), 10))  # a step reports evictions
        assert_same_bytes(pipeline.serve(prompt), cold)
        assert pipeline.counts().total("loaded_bytes", "redis") > before
        assert failed_loads(pipeline) == 0
        pipeline.call(check_integrity)
    before = failed_loads(one)
    assert one.serve(prompt).external_hit_tokens == 0
    assert failed_loads(one) == before


# -- two ranks of one engine -----------------------------------------------------------------------


def test_a_tail_is_loaded_on_two_ranks(two: VllmInstance) -> None:
    for length in (2, 129, 300):
        assert_handed_over(two, length, length)


def test_other_weights_on_one_rank_share_no_chunk(two: VllmInstance, prompt: list[int]) -> None:
    old, name = two.serve(prompt), two.call(weights_name)
    for rank in (1, 0):
        assert two.call(move_weights, 0.02, "", rank) > 0
        two.reset_prefix_cache()
        new = two.serve(prompt)
        assert new.external_hit_tokens == 0
        assert new.block_digests[:4] != old.block_digests[:4]
        two.reset_prefix_cache()
        assert_same_bytes(two.serve(prompt), new)
        before, name = name, two.call(weights_name)
        assert name != before
        old = new
