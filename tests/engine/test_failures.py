"""Whatever Redis does, requests are answered, and what is loaded is right or not loaded."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache_connector.lookup.background_lookup import PENDING
from tests.support.engines.calls import check_integrity, wait_for_writes, worker_of
from tests.support.engines.instance import StartInstance, VllmInstance
from tests.support.engines.probe import EngineProbe, Served
from tests.support.engines.settings import BLOCK_SIZE, kv_transfer
from tests.support.engines.tiny_drafters import build_drafted
from tests.support.planted import PlantedError, Planter
from tests.support.prompts import random_prompt
from tests.support.redis.servers import Server, free_port
from tests.support.redis.values import value_names, wait_for_values

NUM_TOKENS = 2100
FULL = 2048
NUM_HEADS = 4  # each chunk has a value per KV head


@pytest.fixture(scope="module")
def written(start: StartInstance, valkey: Server) -> dict[int, Served]:
    """Cold runs by seed, stored in Redis by an instance that has left since."""
    with start(kv_transfer(redis_url=valkey.url)) as writer:
        cold = {seed: writer.serve(random_prompt(seed, NUM_TOKENS)) for seed in range(14)}
    wait_for_values(valkey, 14 * FULL // 256 * NUM_HEADS)
    return cold


@pytest.fixture(scope="module")
def reader(
    start: StartInstance, valkey: Server, written: dict[int, Served]
) -> Iterator[VllmInstance]:
    with start(kv_transfer(redis_url=valkey.url, cpu_gib=0.1)) as instance:
        yield instance
        instance.call(check_integrity)


@pytest.fixture(scope="module")
def impatient(start: StartInstance, valkey: Server) -> Iterator[VllmInstance]:
    with start(kv_transfer(redis_url=valkey.url, load_deadline_seconds=1.0)) as instance:
        instance.serve(random_prompt(61, 300))
        yield instance
        instance.call(check_integrity)


def failed_loads(instance: VllmInstance) -> int:
    return int(instance.counts().total("failed_loads"))


def serve_and_compare(reader: VllmInstance, cold: Served, seed: int) -> Served:
    """The blocks that came from the cache are right, and so is the answer."""
    hit = reader.serve(random_prompt(seed, NUM_TOKENS))
    assert len(hit.token_ids) == 2
    assert hit.token_ids[0] == cold.token_ids[0]
    return hit


@pytest.mark.parametrize(
    ("seed", "damage"),
    enumerate(("flip", "truncate", "lengthen", "swap", "garbage", "wrong type"), start=8),
)
def test_damaged_values_are_recomputed(
    reader: VllmInstance, valkey: Server, written: dict[int, Served], seed: int, damage: str
) -> None:
    """Every stored value is damaged: whatever is planned as a hit fails, and is computed. Each
    damage has a prompt of its own: what was found to be wrong is made good in the background."""
    before = failed_loads(reader)
    with valkey.client() as client:
        found = {key: client.get(key) for key in value_names(valkey)}
        kept = {key: value for key, value in found.items() if value is not None}
        keys = list(kept)
        rng = random.Random(damage)
        for key, other in zip(keys, [*keys[1:], keys[0]], strict=True):
            damage_value(client, key, kept[key], kept[other], damage, rng)
    try:
        hit = serve_and_compare(reader, written[seed], seed)
        assert failed_loads(reader) == before + 1
        assert hit.block_digests[0] == written[seed].block_digests[0]
    finally:
        with valkey.client() as client:
            for key, value in kept.items():
                client.delete(key)
                client.set(key, value)


def damage_value(client, key, value, other, damage, rng) -> None:  # type: ignore[no-untyped-def]
    if damage == "wrong type":
        client.delete(key)
        client.rpush(key, b"x")
        return
    position = rng.randrange(len(value))
    damaged = {
        "flip": value[:position] + bytes([value[position] ^ 1]) + value[position + 1 :],
        "truncate": value[:position],
        "lengthen": value + b"x",
        "swap": other,
        "garbage": rng.randbytes(len(value)),
    }[damage]
    client.set(key, damaged)


def test_values_that_vanish_after_the_lookup_are_recomputed(
    reader: VllmInstance, valkey: Server, written: dict[int, Served]
) -> None:
    before = failed_loads(reader)
    tokens = reader.call(serve_while_keys_vanish, random_prompt(3, NUM_TOKENS), valkey.port)
    assert tokens[0] == written[3].token_ids[0]
    assert failed_loads(reader) == before + 1


def serve_while_keys_vanish(probe: EngineProbe, prompt: list[int], port: int) -> tuple[int, ...]:
    """Delete everything between the scheduler's lookup and the load."""
    import redis

    probe.reset_prefix_cache()
    hits = probe.connector._scheduler.hits
    find = hits.find

    def vanish(asked, num_computed_tokens, wait):  # type: ignore[no-untyped-def]
        hit = find(asked, num_computed_tokens, wait)
        if hit is not PENDING and asked.places:
            redis.Redis(port=port).flushall()
        return hit

    hits.find = vanish
    try:
        return probe.serve(prompt).token_ids
    finally:
        hits.find = find


def test_a_server_that_stalls_costs_no_more_than_the_deadline(
    reader: VllmInstance, impatient: VllmInstance, valkey: Server
) -> None:
    prompt = random_prompt(60, 1300)
    present = len(value_names(valkey))
    cold = reader.serve(prompt)
    wait_for_values(valkey, present + 5 * NUM_HEADS)
    before = failed_loads(impatient)
    assert valkey.process is not None
    tokens = impatient.call(serve_while_stalled, prompt, valkey.process.pid)
    assert tokens[0] == cold.token_ids[0]
    assert failed_loads(impatient) == before + 1
    impatient.call(check_integrity)


def serve_while_stalled(probe: EngineProbe, prompt: list[int], pid: int) -> tuple[int, ...]:
    """The server stops answering after the lookup, until the request has its answer."""
    import os
    import signal

    hits = probe.connector._scheduler.hits
    find = hits.find

    def stall(asked, num_computed_tokens, wait):  # type: ignore[no-untyped-def]
        hit = find(asked, num_computed_tokens, wait)
        if hit is not PENDING and asked.places:
            os.kill(pid, signal.SIGSTOP)
        return hit

    hits.find = stall
    try:
        return probe.serve(prompt).token_ids
    finally:
        os.kill(pid, signal.SIGCONT)
        hits.find = find


def test_redis_that_stops_and_comes_back(impatient: VllmInstance, valkey: Server) -> None:
    prompt = random_prompt(50, 1300)
    cold = impatient.serve(prompt)
    valkey.kill()
    try:
        for seed in range(51, 54):
            assert len(impatient.serve(random_prompt(seed, 1300)).token_ids) == 2
        impatient.reset_prefix_cache()
        hit = impatient.serve(prompt)  # the CPU tier goes on
        assert hit.external_hit_tokens == 1280
        assert hit.block_digests[:10] == cold.block_digests[:10]
    finally:
        valkey.start()
    impatient.call(check_integrity)


def test_no_redis_at_start(start: StartInstance) -> None:
    """The engine starts, serves, uses its CPU tier and stops in bounded time."""
    transfer = kv_transfer(redis_url=f"redis://127.0.0.1:{free_port()}")
    with start(transfer) as instance:
        prompt = random_prompt(70, 800)
        cold = instance.serve(prompt)
        instance.reset_prefix_cache()
        hit = instance.serve(prompt)
        assert hit.external_hit_tokens == 768
        assert hit.block_digests[:6] == cold.block_digests[:6]
        stopped_in = instance.call(seconds_to_shut_down)
    assert stopped_in < 20


def seconds_to_shut_down(probe: EngineProbe) -> float:
    started = time.monotonic()
    probe.shutdown()
    return time.monotonic() - started


@pytest.mark.parametrize(
    ("side", "call"),
    [
        ("scheduler", "build_connector_meta"),
        ("scheduler", "update_connector_output"),
        ("scheduler", "get_num_new_matched_tokens"),
        ("worker", "start_forward"),
        ("worker", "start_loads"),
        ("worker", "end_forward"),
        ("worker", "finish_step"),
    ],
)
def test_a_side_that_raises_under_load_costs_hits_alone(
    reader: VllmInstance, written: dict[int, Served], side: str, call: str
) -> None:
    seeds = range(4, 8)
    prompts = [random_prompt(seed, NUM_TOKENS) for seed in seeds]
    for seed in seeds:
        serve_and_compare(reader, written[seed], seed)
    for served, seed in zip(
        reader.call(serve_with_an_error, prompts, side, call), seeds, strict=True
    ):
        assert served.token_ids[0] == written[seed].token_ids[0]
    reader.call(check_integrity)
    for seed in seeds:
        reader.call(EngineProbe.reset_prefix_cache)
        hit = serve_and_compare(reader, written[seed], seed)
        assert hit.external_hit_tokens == FULL
        assert (
            hit.block_digests[: FULL // BLOCK_SIZE]
            == (written[seed].block_digests[: FULL // BLOCK_SIZE])
        )


def serve_with_an_error(
    probe: EngineProbe, prompts: list[list[int]], side: str, call: str
) -> list[Served]:
    """One call raises somewhere inside while these requests, all hits, are under way."""
    probe.reset_prefix_cache()
    before = probe.external_hit_tokens()
    owner = probe.connector if side == "scheduler" else worker_of(probe)
    planter = Planter(owner, call, 1, 1 if call == "end_forward" else 2)
    served = probe.serve_many(prompts)
    delattr(owner, call)
    assert planter.has_raised
    assert probe.external_hit_tokens() > before, "nothing was under way"
    return served


def fail_a_step(probe: EngineProbe, prompt: list[int], call: str) -> Served:
    """vLLM calls the connector after a forward pass that has raised, too. Its user goes on, as
    after Ctrl-C in a notebook."""
    request_id = probe.add(prompt)
    probe.on_ranks(raise_in_next, call)
    with pytest.raises(PlantedError):
        probe.finish({request_id: len(prompt)}, 0.0)
    probe.engine.abort_request([request_id])  # it would wait for ever
    probe.drain()
    return probe.serve([*prompt, *prompt])


def raise_in_next(worker: Any, call: str) -> None:
    runner = worker.model_runner
    usual = getattr(runner, call)

    def fail(*_: Any, **__: Any) -> None:
        setattr(runner, call, usual)
        raise PlantedError

    setattr(runner, call, fail)


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        ("_model_forward", ""),
        # An engine for each; worker/test_failures.py has the rule.
        pytest.param("propose_draft_token_ids", "eagle", marks=pytest.mark.soak),
    ],
)
def test_what_a_failed_step_did_not_compute_is_stored_nowhere(
    start: StartInstance, valkey: Server, tiny_model: Path, tmp_path: Path, call: str, kind: str
) -> None:
    folder, arguments = build_drafted(kind, tmp_path) if kind else (tiny_model, {})
    transfer = kv_transfer(redis_url=valkey.url, namespace=call)
    good, bad = random_prompt(71, 1100), random_prompt(72, 1100)
    with start(transfer, folder, **arguments) as one:
        one.serve(good)
        one.call(wait_for_writes)
        before = len(value_names(valkey))
        after = one.call(fail_a_step, bad, call)
        assert after.cached_tokens > 0, "vLLM takes its blocks for computed"
        assert after.external_hit_tokens == 0
        assert "a step of this engine has failed" in one.log
        one.reset_prefix_cache()
        assert one.serve(good).external_hit_tokens == 1024
    assert len(value_names(valkey)) == before, "the engine's end stores nothing either"
