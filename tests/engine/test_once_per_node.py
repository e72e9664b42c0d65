"""Replicated KV heads are in one rank's CPU tier, and all ranks load them from there."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from examples.tiny_model import ModelShape, build_tiny_model
from tests.support.engines.calls import abort_after, check_integrity, stored_on_ranks
from tests.support.engines.instance import StartInstance, VllmInstance
from tests.support.engines.settings import (
    BLOCK_SIZE,
    CHUNK_SIZE,
    PATIENT,
    kv_transfer,
    random_prompt,
)

LIMITS = PATIENT

NUM_CHUNKS = 8
HIT = NUM_CHUNKS * CHUNK_SIZE
CHUNK_BYTES = CHUNK_SIZE * 4 * 2 * 64 * 2  # tokens, layers, K and V, elements, bytes
CAPACITY = 12  # chunks of one rank


@pytest.fixture(scope="module")
def two(start: StartInstance, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmInstance]:
    folder = tmp_path_factory.mktemp("two")
    model = build_tiny_model(folder / "model", replace(ModelShape(), num_kv_heads=1))
    cpu_gib = 2 * CAPACITY * CHUNK_BYTES / 2**30
    transfer = kv_transfer(host_folder=str(folder / "host"), cpu_gib=cpu_gib)
    with start(transfer, model, tensor_parallel_size=2) as instance:
        yield instance
        instance.call(check_integrity)


def test_a_chunk_is_stored_once_and_loaded_by_both(two: VllmInstance) -> None:
    prompt = random_prompt(1, HIT + 40)
    cold = two.serve(prompt)
    before, used = two.counts(), [size for size, _ in two.call(stored_on_ranks)]
    assert sum(used) == NUM_CHUNKS * CHUNK_BYTES
    assert min(used) > 0
    two.reset_prefix_cache()
    hit, counts = two.serve(prompt), two.counts()
    assert hit.external_hit_tokens == HIT
    assert () != hit.block_digests == cold.block_digests
    assert counts.total("failed_loads") == before.total("failed_loads")
    # Each chunk was mapped by the one rank that does not own it.
    mapped = counts.total("peer_mapped_chunks") - before.total("peer_mapped_chunks")
    assert mapped == NUM_CHUNKS
    assert [size for size, _ in two.call(stored_on_ranks)] == used


def test_hits_are_right_beside_evictions(two: VllmInstance) -> None:
    prompts = [random_prompt(100 + i, 3 * CHUNK_SIZE + 5) for i in range(12)]
    # Behind a shorter hit, the computation may round in another way: both are right.
    computed: dict[tuple[int, int], set[str]] = {}
    before, num_compared = two.counts(), 0
    for i in (*range(12), *range(6), *range(4, 10), *range(12)):
        two.reset_prefix_cache()
        failed = two.counts().total("failed_loads")
        served = two.serve(prompts[i])
        num_loaded = served.external_hit_tokens // BLOCK_SIZE
        has_failed = two.counts().total("failed_loads") > failed
        for block, digest in enumerate(served.block_digests):
            known = computed.setdefault((i, block), set())
            if block < num_loaded and not has_failed:
                assert digest in known
                num_compared += 1
            known.add(digest)
    assert num_compared > 0
    counts = two.counts()
    assert counts.total("hit_tokens", "cpu") > before.total("hit_tokens", "cpu")
    assert counts.total("peer_mapped_chunks") > before.total("peer_mapped_chunks")
    assert sum(size for size, _ in two.call(stored_on_ranks)) <= 2 * CAPACITY * CHUNK_BYTES


def test_aborts_and_a_stopped_rank_do_no_lasting_harm(two: VllmInstance) -> None:
    prompt = random_prompt(2, 4 * CHUNK_SIZE + 40)
    two.reset_prefix_cache()
    two.serve(prompt)
    for steps in (1, 2, 3):
        two.reset_prefix_cache()
        two.call(abort_after, prompt, steps)
    for _, pid in two.call(stored_on_ranks):
        two.reset_prefix_cache()
        os.kill(pid, signal.SIGSTOP)
        timer = threading.Timer(1.0, os.kill, (pid, signal.SIGCONT))
        timer.start()
        assert len(two.serve(prompt).token_ids) == 2
        timer.join()
    two.reset_prefix_cache()
    again = two.serve(prompt)
    two.reset_prefix_cache()
    hit = two.serve(prompt)
    assert again.external_hit_tokens == hit.external_hit_tokens == 4 * CHUNK_SIZE
    assert () != hit.block_digests == again.block_digests
