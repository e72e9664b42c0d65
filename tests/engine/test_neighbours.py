"""No step after ``generate()``, pauses, and other connectors and engines beside ours."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lmcache_connector.errors import UnsupportedError
from lmcache_connector.plans import StoreJob
from lmcache_connector.worker.job_queue import QueuedJob
from tests.support.engines.api_server import check_pauses, running_api
from tests.support.engines.calls import check_integrity, worker_of
from tests.support.engines.instance import StartInstance, VllmInstance, set_environment
from tests.support.engines.probe import EngineProbe
from tests.support.engines.settings import CHUNK_SIZE, kv_transfer, random_prompt, together
from tests.support.redis.servers import Server, free_port

NUM_TOKENS = 1300
FULL = NUM_TOKENS // CHUNK_SIZE * CHUNK_SIZE
PATIENCE_SECONDS = 60.0


@pytest.fixture(scope="module", params=["alone", "in MultiConnector"])
def instance(
    start: StartInstance, valkey: Server, request: pytest.FixtureRequest
) -> Iterator[VllmInstance]:
    """Scheduler and worker in one process."""
    own = request.param.replace(" ", "-")  # the other parameter's chunks are no hits
    tiered = kv_transfer(redis_url=valkey.url, namespace=own)
    transfer = tiered if request.param == "alone" else together(tiered)
    with start(transfer) as instance:
        instance.serve(random_prompt(0, 300))
        yield instance
        instance.call(at_rest)


def at_rest(probe: EngineProbe) -> None:
    probe.drain()
    check_integrity(probe)


@contextmanager
def endless_stores(probe: EngineProbe) -> Iterator[threading.Event]:
    """Stores run until they are cancelled. The event is set when one has begun."""
    engine, begun, over = worker_of(probe)._tiers.engine, threading.Event(), threading.Event()
    store = engine.store

    def endless(job: StoreJob, queued: QueuedJob) -> Any:
        begun.set()
        while not queued.cancelled.wait(0.01) and not over.is_set():
            pass
        return store(job, queued)

    engine.store = endless
    try:
        yield begun
    finally:
        over.set()
        engine.store = store


def generate(probe: EngineProbe, prompt: list[int]) -> tuple[int, ...]:
    """Generate as a user of the library does: no step follows."""
    from vllm import SamplingParams, TokensPrompt

    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    (output,) = probe._llm.generate(TokensPrompt(prompt_token_ids=prompt), params, use_tqdm=False)
    return tuple(output.outputs[0].token_ids)


def reset_after_generate(probe: EngineProbe, prompt: list[int]) -> bool:
    probe.serve([5, 6, 7], 1)  # chunks are stored once the weights have their name
    with endless_stores(probe) as begun:
        generate(probe, prompt)
        assert begun.wait(PATIENCE_SECONDS)
        return bool(probe._llm.reset_prefix_cache())


def sleep_after_generate(probe: EngineProbe, prompt: list[int]) -> int:
    """The number of jobs that run when vLLM frees the memory."""
    probe.serve([5, 6, 7], 1)  # chunks are stored once the weights have their name
    with endless_stores(probe) as begun:
        generate(probe, prompt)
        assert begun.wait(PATIENCE_SECONDS)
        probe._llm.sleep(level=1)
        left = int(worker_of(probe)._jobs.num_open)
    probe._llm.wake_up()
    return left


def test_the_prefix_cache_is_reset_right_after_generate(instance: VllmInstance) -> None:
    assert instance.call(reset_after_generate, random_prompt(1, NUM_TOKENS))
    instance.call(at_rest)


def test_the_engine_sleeps_right_after_generate(instance: VllmInstance) -> None:
    prompt = random_prompt(2, NUM_TOKENS)
    assert instance.call(sleep_after_generate, prompt) == 0
    again = instance.serve(prompt)
    assert again.external_hit_tokens == 0
    instance.reset_prefix_cache()
    assert instance.serve(prompt).external_hit_tokens == FULL
    instance.call(at_rest)


@pytest.mark.soak  # two ranks
def test_two_ranks_pause_and_sleep_during_stores(
    tiny_model: Path, valkey: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")  # vLLM wants a NUMA node for each
    transfer = kv_transfer(redis_url=valkey.url)
    ranks = ("--tensor-parallel-size", "2")
    with running_api(tiny_model, transfer, tmp_path / "log", *ranks) as api:
        check_pauses(api)


def check_hit(
    instance: VllmInstance, seed: int = 1, in_between: Callable[[], None] = lambda: None
) -> None:
    """A prompt's second run is a hit with the same bytes."""
    prompt = random_prompt(seed, NUM_TOKENS)
    cold = instance.serve(prompt)
    instance.reset_prefix_cache()
    in_between()
    hit = instance.serve(prompt)
    assert hit.external_hit_tokens == FULL
    assert () != hit.block_digests == cold.block_digests


@pytest.mark.soak  # starts an engine
def test_one_rank_under_an_external_launcher(start: StartInstance) -> None:
    """Training frameworks start engines so, one per GPU."""
    launched = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    launched |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    prepare = partial(set_environment, launched)
    with start(prepare=prepare, distributed_executor_backend="external_launcher") as instance:
        check_hit(instance)


def an_engine_before(model: str) -> None:
    """An engine whose start fails after the connector's; then one that serves, and ends."""
    import zmq
    from vllm.config.kv_events import KVEventsConfig
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    start = partial(EngineProbe, model, kv_cache_memory_bytes=64 << 20, max_model_len=2048)
    with socket.create_server(("0.0.0.0", 0)) as taken:
        events = KVEventsConfig(
            enable_kv_cache_events=True,
            publisher="zmq",
            endpoint=f"tcp://*:{taken.getsockname()[1]}",
        )
        with pytest.raises(zmq.ZMQError, match="Address already in use"):
            start(kv_transfer(), kv_events_config=events)
    with pytest.raises(UnsupportedError, match=r"ensure_kv_transfer_shutdown\(\)"):
        start(kv_transfer())
    ensure_kv_transfer_shutdown()
    probe = start(kv_transfer())
    probe.serve(random_prompt(0, 300))
    probe.shutdown()
    cleanup_dist_env_and_memory()


def test_the_second_engine_of_a_process(start: StartInstance, tiny_model: Path) -> None:
    """The second engine starts as without the connector, and hits."""
    with start(prepare=partial(an_engine_before, str(tiny_model))) as instance:
        check_hit(instance)


def refusal_of_another(probe: EngineProbe, model: str) -> str:
    """The message that refuses a second engine. Also overwrites the first one's paged cache."""
    try:
        EngineProbe(model, kv_transfer(), kv_cache_memory_bytes=64 << 20, max_model_len=2048)
    except UnsupportedError as error:
        for cache in probe.core.model_executor.driver_worker.worker.model_runner.kv_caches:
            cache.fill_(1.0)
        return str(error)
    return ""


def test_two_engines_in_one_process(instance: VllmInstance, tiny_model: Path) -> None:
    """vLLM would have one connector copy for both. The first engine goes on, with its own
    blocks."""

    def is_refused() -> None:
        assert "end the other engine first" in instance.call(refusal_of_another, str(tiny_model))

    check_hit(instance, 4, is_refused)
    instance.call(at_rest)
