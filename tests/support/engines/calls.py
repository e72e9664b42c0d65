"""What tests do inside an engine's process, by :meth:`VllmInstance.call`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

from tests.support.clock import wait_until
from tests.support.engines.instance import VllmInstance
from tests.support.engines.kv_digests import Digests, differences, digest_layers_on_rank, merged
from tests.support.engines.probe import EngineProbe, Served, parts_of
from tests.support.engines.settings import BLOCK_SIZE, random_prompt
from tests.support.integrity import check_scheduler_side, empty

_FRESH = count(9000)  # seeds of prompts that no test has served


def tiered_of(connector: Any) -> Any:
    """The tiered connector: this one, or the one among those that ``MultiConnector`` runs."""
    from lmcache_connector.connector import LMCacheTieredConnector

    (tiered,) = (c for c in parts_of(connector) if isinstance(c, LMCacheTieredConnector))
    return tiered


def check_integrity(probe: EngineProbe) -> None:
    """Raises unless every block is free again and the scheduler side's state agrees with itself."""
    check_scheduler_side(tiered_of(probe.connector)._scheduler)
    pool = probe.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # the null block


def sums_are_alike(engine: VllmInstance) -> bool:
    """Whether a token's KV does not depend on its step. On a CPU with small caches, vLLM's
    attention adds up in another order in steps of another size."""
    prompt = random_prompt(next(_FRESH), 700)
    engine.serve(prompt[:512])
    behind = engine.serve(prompt)  # behind vLLM's own cache
    at_once = engine.serve(prompt, skip_reading_prefix_cache=True)
    assert behind.external_hit_tokens == at_once.external_hit_tokens == 0
    return behind.block_digests == at_once.block_digests


def abort_after(probe: EngineProbe, prompt: list[int], steps: int) -> None:
    """Add a request, abort it after so many steps, and check that nothing of it is left."""
    request_id = probe.add(prompt, max_tokens=50)
    for _ in range(steps):
        probe.engine.step()
    probe.engine.abort_request([request_id])
    probe.drain()
    check_integrity(probe)


def reset_everything(probe: EngineProbe) -> None:
    """Reset vLLM's prefix cache and those of the connector."""
    probe.drain()
    assert probe.engine.reset_prefix_cache(reset_connector=True)


def share_again(probe: EngineProbe) -> None:
    """All roots have the name of the weights again, whatever audits have found."""
    book = tiered_of(probe.connector)._scheduler.book
    book.rename(book.epochs.name)


@contextmanager
def preemptions(probe: EngineProbe) -> Iterator[list[str]]:
    """Ids of the requests that are preempted meanwhile, in order."""
    scheduler, preempted = probe.scheduler, list[str]()
    preempt = scheduler._preempt_request

    def note(request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append(request.request_id)
        return preempt(request, *args, **kwargs)

    scheduler._preempt_request = note
    try:
        yield preempted
    finally:
        scheduler._preempt_request = preempt


def chunk_keys(probe: EngineProbe, prompt: list[int]) -> list[bytes]:
    """Keys that a prompt's full chunks are stored under now."""
    from lmcache_connector.keys.request_keys import RequestIdentity

    keys = tiered_of(probe.connector)._scheduler.book._current_keys(RequestIdentity())
    keys.extend(prompt)
    return list(keys.keys)


def worker_of(probe: EngineProbe) -> Any:
    """The worker side of the tiered connector in this process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return tiered_of(get_kv_transfer_group())._worker


def forget_unseen(probe: EngineProbe) -> None:
    """Drop vLLM's prefix cache, and the CPU tier behind the scheduler's back."""
    probe.reset_prefix_cache()
    probe.drain()  # the weights are read again, and steps bring news
    empty(worker_of(probe)._tiers.engine)


def forget(probe: EngineProbe) -> None:
    """Drop vLLM's prefix cache and the CPU tier."""
    forget_unseen(probe)
    probe.serve([1, 2, 3], 1)  # too short to be stored; its steps tell the scheduler


def stored_on_ranks(probe: EngineProbe) -> list[tuple[int, int]]:
    """Bytes in the CPU tier of each rank, and the process that it is in."""
    return probe.on_ranks(_stored)


def _stored(worker: Any) -> tuple[int, int]:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return int(get_kv_transfer_group()._worker._tiers.engine.cpu.used_bytes), os.getpid()


def wait_for_writes(probe: EngineProbe) -> None:
    """Until Redis has everything."""
    assert not any(probe.on_ranks(_drain_writes))


def _drain_writes(worker: Any) -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    tier = get_kv_transfer_group()._worker._tiers.redis
    wait_until(lambda: not tier.stats().queued_bytes, "writes do not end")


def draft_counts(probe: EngineProbe) -> tuple[int, int]:
    """Tokens drafted since the start, and how many of them were accepted."""
    values: dict[str, Any] = {m.name: getattr(m, "value", 0) for m in probe._llm.get_metrics()}
    return (
        int(values.get("vllm:spec_decode_num_draft_tokens", 0)),
        int(values.get("vllm:spec_decode_num_accepted_tokens", 0)),
    )


def served_with_drafts(
    engine: VllmInstance, prompt: list[int], max_tokens: int
) -> tuple[Served, tuple[int, int]]:
    """Serve a prompt; returns also how many drafts were made for it, and accepted."""
    before = engine.call(draft_counts)
    served = engine.serve(prompt, max_tokens)
    drafted, accepted = (b - a for a, b in zip(before, engine.call(draft_counts), strict=True))
    print(f"accepted {accepted} of {drafted} after {served.external_hit_tokens} loaded tokens")
    return served, (drafted, accepted)


def prepare_pipeline(probe: EngineProbe) -> None:
    """Make the receive buffers of pipeline ranks: vLLM's CPU worker skips the warm-up that does."""
    probe.on_ranks(_make_buffers)


def _make_buffers(worker: Any) -> None:
    from vllm.distributed.parallel_state import get_pp_group

    runner = worker.model_runner
    if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens,
            dtype=runner.model_config.dtype,
            device=runner.device,
        )


PRODUCED = {"do_remote_decode": True}
CONSUMED = {"do_remote_prefill": True}


def transfer(
    probe: EngineProbe, prompt: list[int], params: dict[str, Any] | None, max_tokens: int = 2
) -> tuple[int, Digests]:
    """Serve one request. Returns how many tokens were loaded for it, and digests of the KV of its
    prompt without the last token, taken in the step of its first output."""
    before, found = probe.external_hit_tokens(), None
    extra = {"extra_args": {"kv_transfer_params": params}} if params is not None else {}
    name = probe.add(prompt, max_tokens, **extra)
    while probe.scheduler.has_requests():
        outputs = probe.engine.step()
        if outputs and found is None:
            (running,) = (each for each in probe.scheduler.requests if each.startswith(name))
            groups = probe.scheduler.kv_cache_manager.get_block_ids(running)
            ranks = probe.on_ranks(digest_layers_on_rank, groups, len(prompt) - 1, False)
            found = merged(ranks)
    return probe.external_hit_tokens() - before, found or {}


def produced(engine: VllmInstance, prompt: list[int], max_tokens: int = 2) -> Digests:
    """Compute and store a prompt for another instance; vLLM forgets it. Returns its digests."""
    loaded, digests = engine.call(transfer, prompt, PRODUCED, max_tokens)
    assert loaded == 0
    engine.reset_prefix_cache()
    return dict(digests)


def assert_handed_over(engine: VllmInstance, seed: int, length: int) -> None:
    """All of a prompt but its last token is loaded, as it was computed."""
    prompt = random_prompt(seed, length)
    cold = produced(engine, prompt)
    loaded, digests = engine.call(transfer, prompt, CONSUMED)
    assert loaded == length - 1
    assert {p.layer for p in digests} == {p.layer for p in cold} != set()
    assert {p for p in digests if p.first_token + BLOCK_SIZE >= length} <= cold.keys()
    assert differences(digests, cold) == []
