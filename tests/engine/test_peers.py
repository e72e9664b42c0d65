"""Two engines without Redis: each loads the other's chunks."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from itertools import count

import pytest
import torch

from tests.support.clock import within
from tests.support.engines.calls import check_integrity
from tests.support.engines.instance import StartInstance, VllmInstance
from tests.support.engines.settings import (
    BLOCK_SIZE,
    CHUNK_SIZE,
    PATIENT,
    kv_transfer,
    random_prompt,
)
from tests.support.redis.servers import free_ports

LIMITS = PATIENT

NUM_TOKENS = 5 * CHUNK_SIZE + 40


# tests/transfers has engines with addresses.
@pytest.fixture(scope="module", params=[pytest.param("addresses", marks=pytest.mark.soak), "host"])
def pair(
    request: pytest.FixtureRequest, start: StartInstance, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[VllmInstance]]:
    """The engines find each other by addresses, or on their host without any. One of the latter is
    a prefill instance of KV transfers, which loads as well."""
    if request.param == "host":
        tiered = kv_transfer(host_folder=str(tmp_path_factory.mktemp("peers") / "host"))
        prefill = {"kv_connector": "LMCacheP2PConnector", "kv_port": free_ports(1)}
        transfers = [tiered, tiered | prefill | {"kv_role": "kv_producer"}]
    else:
        addresses = [f"127.0.0.1:{free_ports(1)}" for _ in range(2)]
        # The engine's own address is among them, as behind a headless service.
        transfers = [kv_transfer(peer_listen=own, peers=addresses) for own in addresses]
    with start(transfers[0]) as one, start(transfers[1]) as two:
        for writer, reader in ((one, two), (two, one)):  # the first to start must find the other
            # No tight limit on a busy machine: tests/peers/test_host.py has two seconds.
            seeds = count(100)
            assert within(30.0, lambda: finds(writer, reader, next(seeds)))  # noqa: B023
        yield [one, two]


def finds(writer: VllmInstance, reader: VllmInstance, seed: int) -> bool:
    """Whether the reader has found its peer by now, and loaded a chunk from it."""
    prompt = random_prompt(seed, CHUNK_SIZE + 1)
    writer.serve(prompt)
    before = reader.counts().total("peer_chunks", "hit")
    reader.serve(prompt)
    return reader.counts().total("peer_chunks", "hit") > before


def _counted(reader: VllmInstance) -> list[float]:
    counts = reader.counts()
    hits, tokens = counts.total("peer_chunks", "hit"), counts.total("hit_tokens", "peer")
    return [hits, tokens, counts.total("peer_mapped_chunks")]


def test_each_loads_the_others_chunks(
    pair: list[VllmInstance], request: pytest.FixtureRequest
) -> None:
    is_mapped = (
        request.node.callspec.params["pair"] == "host"
        and not torch.cuda.is_available()  # memory pinned for a GPU is not mapped
    )
    for seed, (writer, reader) in enumerate((pair, pair[::-1])):
        prompt = random_prompt(seed, NUM_TOKENS)
        cold = writer.serve(prompt)
        before = _counted(reader)
        hit = reader.serve(prompt)
        came = [now - then for now, then in zip(_counted(reader), before, strict=True)]
        assert came == [5, 5 * CHUNK_SIZE, 5 if is_mapped else 0]
        assert hit.external_hit_tokens == 5 * CHUNK_SIZE
        assert () != hit.block_digests == cold.block_digests
        # With copies of its own by now, it hits as many tokens again.
        reader.reset_prefix_cache()
        before = _counted(reader)
        again = reader.serve([*prompt, *random_prompt(9, CHUNK_SIZE)])
        assert again.external_hit_tokens == 5 * CHUNK_SIZE
        assert _counted(reader) == before
        for each in pair:
            each.call(check_integrity)


def test_a_peer_that_stops_or_dies_costs_hits_only(pair: list[VllmInstance]) -> None:
    """The last test: the peer is gone afterwards."""
    victim, reader = pair
    for number, struck in enumerate((signal.SIGSTOP, signal.SIGKILL)):
        prompt = random_prompt(30 + number, NUM_TOKENS)
        cold = victim.serve(prompt)
        before = reader.counts().total("recomputed_tokens")
        os.kill(victim.pid, struck)
        try:
            served = reader.serve(prompt)
            assert len(served.token_ids) == 2
            came = served.external_hit_tokens + before - reader.counts().total("recomputed_tokens")
            # If some came, the rest was computed in another step than by the victim.
            end = int(came or NUM_TOKENS) // BLOCK_SIZE
            assert () != served.block_digests[:end] == cold.block_digests[:end]
        finally:
            if struck is signal.SIGSTOP:
                os.kill(victim.pid, signal.SIGCONT)
        reader.call(check_integrity)
