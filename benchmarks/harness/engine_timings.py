"""Measurements inside an engine's process.

All are top-level functions for :meth:`tests.support.engines.instance.VllmInstance.call`.
"""

from __future__ import annotations

import copy
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from tests.support.engines.calls import chunk_keys, forget_unseen, worker_of
from tests.support.engines.probe import EngineProbe
from tests.support.engines.settings import random_prompt

_MAX_STEPS = 200_000
_WRITE_SECONDS = 30.0
_PROBE_SECONDS = 15.0
_SHORT_PROMPT = (2, 3, 4)


def ttft_seconds(probe: EngineProbe, prompt: Sequence[int]) -> float:
    """Serve one request for one token, and wait until the engine is idle again. Returns the time
    from the request's arrival to that token."""
    return ttft_and_cached(probe, prompt)[0]


def ttft_and_cached(probe: EngineProbe, prompt: Sequence[int]) -> tuple[float, int]:
    """Like :func:`ttft_seconds`; also returns the number of prompt tokens that were cached, by
    vLLM's own prefix cache or any connector."""
    started = time.perf_counter()
    probe.add(prompt, max_tokens=1)
    for _ in range(_MAX_STEPS):
        for output in probe.engine.step():
            if output.outputs[0].token_ids:
                taken = time.perf_counter() - started
                probe.drain()
                return taken, output.num_cached_tokens or 0
    raise RuntimeError("no token came")


def seconds_for_all(probe: EngineProbe, prompts: Sequence[Sequence[int]], max_tokens: int) -> float:
    """Serve requests that arrive together. Returns the time until the last one's last token."""
    started = time.perf_counter()
    for prompt in prompts:
        probe.add(prompt, max_tokens)
    while probe.engine.has_unfinished_requests():
        probe.engine.step()
    taken = time.perf_counter() - started
    probe.drain()
    return taken


def decode_tokens_per_second(
    probe: EngineProbe, prompts: Sequence[Sequence[int]], max_tokens: int
) -> float:
    """Throughput of concurrent decodes, from the last request's first token to the end."""
    return decode_beside_hits(probe, prompts, max_tokens, (), False)


def decode_beside_hits(
    probe: EngineProbe,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    hits: Sequence[Sequence[int]],
    must_load: bool,
) -> float:
    """Like :func:`decode_tokens_per_second`, while other requests ask for one token each: ``hits``,
    served before. The engine ``must_load`` them, or has them in vLLM's own prefix cache."""
    if must_load:
        probe.reset_prefix_cache()
        probe.drain()
    before, steps = _decode(probe, prompts, max_tokens, hits)
    return (len(prompts) * max_tokens - before) / sum(steps)


def median_decode_step_seconds(
    probe: EngineProbe, prompts: Sequence[Sequence[int]], max_tokens: int
) -> float:
    """The median step of concurrent decodes, so that a few steps with more work hardly matter."""
    return statistics.median(_decode(probe, prompts, max_tokens)[1])


def _decode(
    probe: EngineProbe,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    hits: Sequence[Sequence[int]] = (),
) -> tuple[int, list[float]]:
    """Run concurrent decodes. Returns their tokens when the last one had its first, and the seconds
    of each step after. ``hits`` come meanwhile, evenly spread."""
    for prompt in prompts:
        probe.add(prompt, max_tokens)
    _step_until(probe, lambda lengths: len(lengths) == len(prompts))
    before, times = sum(_running_lengths(probe).values()), [time.perf_counter()]
    interval, waiting = max_tokens // (2 + len(hits)), list(hits)
    while probe.engine.has_unfinished_requests():
        if waiting and len(times) % interval == 0:
            probe.add(waiting.pop(), max_tokens=1)
        probe.engine.step()
        times.append(time.perf_counter())
    probe.drain()
    return before, [end - start for start, end in itertools.pairwise(times)]


def come_to_rest(probe: EngineProbe) -> None:
    """Reset vLLM's prefix cache, and wait until all is written to Redis and the weights are read
    again, which would delay the first hit after a reset."""
    from lmcache_connector import LMCacheTieredConnector

    probe.reset_prefix_cache()
    probe.drain()
    if not isinstance(probe.connector, LMCacheTieredConnector):
        return
    tier = worker_of(probe)._tiers.redis
    if tier is not None:
        tier.flush(_WRITE_SECONDS)


def without_connector(probe: EngineProbe, function: Callable[..., Any], *args: Any) -> Any:
    """``function(probe, *args)`` while the engine runs as without a connector.

    Process, weights and KV cache stay the same, so the difference between two engines is not
    measured. No request may be running.
    """
    return _instead(None, probe, function, *args)


def with_empty_connector(probe: EngineProbe, function: Callable[..., Any], *args: Any) -> Any:
    """Like :func:`without_connector`, with a connector that does nothing: the cost of vLLM's own
    calls."""
    from benchmarks.harness.empty_connector import EmptyConnector

    return _instead(EmptyConnector.in_place_of(probe.connector), probe, function, *args)


def _instead(connector: Any, probe: EngineProbe, function: Callable[..., Any], *args: Any) -> Any:
    from vllm.distributed.kv_transfer import kv_transfer_state as state

    on_scheduler, on_worker = probe.scheduler.connector, state._KV_CONNECTOR_AGENT
    runner = probe.core.model_executor.driver_worker.worker.model_runner
    on_runner = getattr(runner, "kv_connector", None)  # of model runner V2
    probe.scheduler.connector = state._KV_CONNECTOR_AGENT = connector
    if on_runner is not None:
        runner.kv_connector = _runners_part(on_runner, connector)
    try:
        return function(probe, *args)
    finally:
        probe.scheduler.connector, state._KV_CONNECTOR_AGENT = on_scheduler, on_worker
        if on_runner is not None:
            runner.kv_connector = on_runner


def _runners_part(on_runner: Any, connector: Any) -> Any:
    """What model runner V2 calls for ``connector``."""
    if connector is None:
        from vllm.v1.worker.gpu.kv_connector import NO_OP_KV_CONNECTOR

        return NO_OP_KV_CONNECTOR
    replaced = copy.copy(on_runner)
    replaced.kv_connector = connector
    return replaced


def empty_cpu_tier(probe: EngineProbe) -> None:
    """Clear vLLM's prefix cache and the CPU tier. The scheduler side learns of it with the next
    step."""
    forget_unseen(probe)
    ttft_seconds(probe, _SHORT_PROMPT)


def audit_seconds(probe: EngineProbe, prompt: Sequence[int], rounds: int) -> list[float]:
    """The delay of a hit's first token by an audit, round by round: one hit with, one without. The
    prompt must have been stored."""
    sampler = probe.connector._scheduler.auditor.sampler
    before, delays = sampler.share, []
    for number in range(rounds):
        taken = {}
        for share in (1.0, 0.0) if number % 2 else (0.0, 1.0):
            sampler.share = share
            probe.reset_prefix_cache()
            taken[share] = ttft_seconds(probe, prompt)
        delays.append(taken[1.0] - taken[0.0])
    sampler.share = before
    return delays


def probe_link(probe: EngineProbe) -> None:
    """Probe Redis now; otherwise that would happen within a minute of traffic."""
    policy = probe.connector._scheduler.policy
    link = worker_of(probe)._probe
    policy.probes.want()
    until = time.perf_counter() + _PROBE_SECONDS
    while time.perf_counter() < until:
        ttft_seconds(probe, _SHORT_PROMPT)
        if not link.is_busy:
            break
        time.sleep(0.01)
    ttft_seconds(probe, _SHORT_PROMPT)  # a step brings the report


def _running_lengths(probe: EngineProbe) -> dict[str, int]:
    return {r.request_id: r.num_output_tokens for r in probe.scheduler.running}


def _step_until(probe: EngineProbe, done: Callable[[dict[str, int]], bool]) -> None:
    for _ in range(_MAX_STEPS):
        probe.engine.step()
        lengths = {r: n for r, n in _running_lengths(probe).items() if n > 0}
        if done(lengths):
            return
    raise RuntimeError("the requests do not decode")


# -- the scheduler side alone --------------------------------------------------------------------


def lookup_microseconds(probe: EngineProbe, num_tokens: int, repeats: int) -> float:
    """Median time of a whole lookup: hash a prompt, find it in the index, plan its load.

    That is all work of the scheduler thread for the connector until the plan is built. The index
    has all chunks of the prompt meanwhile.
    """
    from lmcache_connector.plans import CacheEvent, RankReport

    adapter = probe.connector._scheduler
    tokens = random_prompt(1, num_tokens)
    keys = chunk_keys(probe, tokens)
    stored, forgotten = (
        tuple(CacheEvent(key, admitted=admitted) for key in keys) for admitted in (True, False)
    )
    adapter.update_from_reports([RankReport(0, stored, ())])
    seconds = [_lookup_seconds(probe, tokens, number) for number in range(repeats)]
    adapter.update_from_reports([RankReport(0, forgotten, ())])
    return statistics.median(seconds) * 1e6


def _lookup_seconds(probe: EngineProbe, tokens: list[int], number: int) -> float:
    """One lookup. Its load is reported as ended afterwards, without a worker."""
    from vllm.v1.core.sched.output import SchedulerOutput

    from lmcache_connector.plans import JobResult, Outcome, RankReport

    adapter = probe.connector._scheduler
    chunk_size = adapter.settings.chunk_size
    request = _request(f"lookup-{number}", tokens)
    block_ids = (list(range(-(-len(tokens) // probe.scheduler.block_size))),)
    empty = SchedulerOutput.make_empty()
    started = time.perf_counter()
    adapter.on_new_request(request)
    found, _ = adapter.get_num_new_matched_tokens(request, 0)
    job = adapter.update_state_after_alloc(request, block_ids, found)
    adapter.load_planned(request, job, found)
    plan = adapter.build_plan(empty)
    seconds = time.perf_counter() - started
    left = len(tokens) - found
    assert left <= 2 * chunk_size, f"found {found} of {len(tokens)} tokens"  # one chunk is audited
    (job,) = plan.loads
    done = JobResult(job.job_id, Outcome.DONE, len(job.keys), 0, 0.0)
    adapter.update_from_reports([RankReport(0, (), (done,))])
    adapter.request_finished(request, block_ids)
    adapter.build_plan(empty)
    return seconds


def decode_step_microseconds(
    probe: EngineProbe, prompts: Sequence[Sequence[int]], max_tokens: int
) -> float:
    """Time of the scheduler thread in the connector per running request, median over steps."""
    connector, spent = probe.connector, [0.0]
    names = ("build_connector_meta", "update_connector_output", "get_num_new_matched_tokens")
    for name in names:
        setattr(connector, name, _timed(getattr(connector, name), spent))
    for prompt in prompts:
        probe.add(prompt, max_tokens)
    _step_until(probe, lambda lengths: len(lengths) == len(prompts))
    per_request = []
    try:
        while len(probe.scheduler.running) == len(prompts):
            spent[0] = 0.0
            probe.engine.step()
            per_request.append(spent[0] / len(prompts))
    finally:
        for name in names:
            delattr(connector, name)
    probe.drain()
    return statistics.median(per_request) * 1e6


def _timed(function: Any, spent: list[float]) -> Any:
    def timed(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            spent[0] += time.perf_counter() - started

    return timed


def _request(request_id: str, tokens: Sequence[int]) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    return Request(
        request_id=request_id,
        prompt_token_ids=list(tokens),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
    )
