"""Real vLLM engines hand over: the decode engine's KV is the prefill engine's, byte by byte."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from typing import Any

from tests.support.engines.handover import (
    Answer,
    Ask,
    add,
    answer_of,
    ask,
    ask_all,
    at_rest,
    log_stats,
    metrics,
)
from tests.support.engines.instance import VllmInstance
from tests.support.engines.p2p_engines import NOTICED_SECONDS, Engines
from tests.support.engines.probe import EngineProbe
from tests.support.engines.tiny_model import ModelShape
from tests.support.prompts import random_prompt


def check(cold: Answer, served: Answer, num_tokens: int) -> None:
    """All of the prompt was handed over, and is the same."""
    assert served.served.external_hit_tokens == num_tokens
    assert () != served.served.block_digests == cold.served.block_digests
    assert served.finish_reason == "length"


def rest(engines: Engines) -> None:
    for instance, _ in engines.prefill + engines.decode:
        instance.call(at_rest)


def test_a_decode_engine_that_never_computed_a_prompt_serves_one(engines: Engines) -> None:
    """Its first forward pass is a decode step."""
    cold, served = engines.hand_over(random_prompt(1, 300))
    check(cold, served, 300)
    assert cold.params is None
    rest(engines)


def test_in_several_steps_layer_by_layer(engines: Engines) -> None:
    # Not 128: vLLM computes the last token of a prompt once more, and that block would differ.
    for seed, num_tokens in enumerate((1, 127, 129, 2000, 3001), start=10):
        cold, served = engines.hand_over(random_prompt(seed, num_tokens))
        assert served.served.external_hit_tokens == num_tokens
        assert served.served.block_digests == cold.served.block_digests
        assert len(served.served.block_digests) == num_tokens // 128
    rest(engines)


def test_by_the_parameters_that_routers_pass_on(engines: Engines) -> None:
    cold, served = engines.hand_over_by_params(random_prompt(2, 1700))
    check(cold, served, 1700)
    assert cold.params is not None
    assert cold.params["do_remote_prefill"] is True
    assert cold.params["remote_port"] == engines.prefill[0][1]
    rest(engines)


def test_what_the_prefill_engine_has_cached_is_handed_over_too(engines: Engines) -> None:
    prompt = random_prompt(3, 1500)
    check(*engines.hand_over(prompt), 1500)
    engines.decode[0][0].reset_prefix_cache()
    cold, served = engines.hand_over(prompt)
    assert cold.served.cached_tokens > 1000
    check(cold, served, 1500)


def test_what_the_decode_engine_has_cached_is_not_fetched_again(engines: Engines) -> None:
    prompt = random_prompt(4, 1500)
    check(*engines.hand_over(prompt), 1500)
    longer = prompt + random_prompt(5, 500)
    before = engines.decode[0][0].counts()
    cold, served = engines.hand_over_by_params(longer)
    after = engines.decode[0][0].counts()
    assert served.served.external_hit_tokens == 2000 - 11 * 128
    assert served.served.block_digests == cold.served.block_digests
    assert after.total("p2p_loads") == before.total("p2p_loads") + 1
    engines.hand_over(longer)  # nothing is missing but the last block
    rest(engines)


def test_many_at_once(engines: Engines) -> None:
    prompts = [random_prompt(20 + i, 301 + 170 * i) for i in range(8)]  # no multiple of 128
    names = [engines.name() for _ in prompts]
    (prefill, _), (decode, _) = engines.prefill[0], engines.decode[0]
    waiting = threading.Thread(
        target=prefill.call,
        args=(ask_all, [Ask(n, p, 1) for n, p in zip(names, prompts, strict=True)]),
    )
    waiting.start()  # they are served while they are computed
    served = decode.call(ask_all, [Ask(n, p) for n, p in zip(names, prompts, strict=True)])
    waiting.join()
    assert sum(len(p) for p in prompts) == served[0].served.external_hit_tokens
    for name, prompt, answer in zip(names, prompts, served, strict=True):
        again = prefill.call(ask, Ask(f"again-{name[-6:]}", prompt))
        assert () != answer.served.block_digests == again.served.block_digests
    rest(engines)


def preempt_while_computing(probe: EngineProbe, request: Ask) -> Answer:
    """Step until part of the prompt is computed, take its blocks away, then serve it. Without a
    reset that anybody hears of: it would end the hand-over."""
    add(probe, request)
    for _ in range(2):
        probe.engine.step()
    (running,) = probe.scheduler.running
    assert 0 < running.num_computed_tokens < len(request.prompt)
    scheduler = probe.scheduler
    scheduler._preempt_request(scheduler.running.pop(), time.monotonic(), drop_stale_output=True)
    scheduler.prev_step_scheduled_req_ids.clear()
    assert scheduler.kv_cache_manager.block_pool.reset_prefix_cache()
    num_preemptions = running.num_preemptions
    assert num_preemptions == 1
    (finished,) = probe.finish({request.request_id: len(request.prompt)}, time.perf_counter())
    return answer_of(finished)


def test_a_preempted_prompt_is_handed_over_as_computed_last(engines: Engines) -> None:
    prompt, name = random_prompt(30, 2000), engines.name()
    cold = engines.prefill[0][0].call(preempt_while_computing, Ask(name, prompt, 1))
    served = engines.decode[0][0].call(ask, Ask(name, prompt))
    check(cold, served, 2000)
    rest(engines)


def abort_while_computing(probe: EngineProbe, request: Ask) -> None:
    add(probe, request)
    for _ in range(2):
        probe.engine.step()
    probe.engine.abort_request([request.request_id])
    probe.engine.step()
    probe.drain()


def abort_while_waiting(probe: EngineProbe, request: Ask) -> int:
    """Returns how many KV blocks are free afterwards less those before."""
    pool = probe.scheduler.kv_cache_manager.block_pool
    before: int = pool.get_num_free_blocks()
    add(probe, request)
    for _ in range(3):
        probe.engine.step()
    assert probe.connector._scheduler._consuming
    probe.engine.abort_request([request.request_id])
    probe.drain()
    after: int = pool.get_num_free_blocks()
    return after - before


def test_aborts_on_either_side(engines: Engines) -> None:
    (prefill, _), (decode, _) = engines.prefill[0], engines.decode[0]
    name, prompt = engines.name(), random_prompt(40, 2000)
    prefill.call(abort_while_computing, Ask(name, prompt, 1))
    started = time.monotonic()
    served = decode.call(ask, Ask(name, prompt))
    assert time.monotonic() - started < NOTICED_SECONDS
    assert served.finish_reason == "length"
    assert served.served.external_hit_tokens < 2000
    assert decode.call(abort_while_waiting, Ask(engines.name(), random_prompt(41, 1000))) == 0
    rest(engines)


def test_a_malformed_request_is_served_alone(engines: Engines) -> None:
    decode, _ = engines.decode[0]
    before = decode.counts().total("p2p_malformed_requests")
    bad = [
        Ask("___prefill_addr_here___decode_addr_there_1", random_prompt(50, 200)),
        Ask("bad-1", random_prompt(51, 200), params={"do_remote_prefill": True}),
        Ask("bad-2", random_prompt(52, 200), params={"do_remote_prefill": "yes"}),
        Ask("bad-3", random_prompt(53, 200), params=_elsewhere("10.9.8.7")),
    ]
    for answer in decode.call(ask_all, bad):
        assert (answer.finish_reason, answer.served.external_hit_tokens) == ("length", 0)
    assert decode.counts().total("p2p_malformed_requests") == before + 4
    check(*engines.hand_over(random_prompt(54, 400)), 400)


def _elsewhere(host: str, port: int = 9) -> dict[str, Any]:
    return {
        "do_remote_prefill": True,
        "remote_host": host,
        "remote_port": port,
        "remote_request_id": "x",
    }


def test_nobody_at_the_address_costs_a_recompute(engines: Engines) -> None:
    decode, _ = engines.decode[0]
    started = time.monotonic()
    answer = decode.call(ask, Ask("gone-1", random_prompt(60, 600), params=_elsewhere("127.0.0.1")))
    assert (answer.finish_reason, answer.served.external_hit_tokens) == ("length", 0)
    assert time.monotonic() - started < NOTICED_SECONDS
    rest(engines)


def test_prometheus_is_told_what_was_sent(engines: Engines) -> None:
    """Through vLLM's own loggers: two hand-overs, one that nobody has, one request in error."""
    (prefill, _), (decode, _) = engines.prefill[0], engines.decode[0]
    both = prefill, decode
    before = [instance.call(metrics) for instance in both]
    check(*engines.hand_over(random_prompt(65, 1700)), 1700)
    check(*engines.hand_over_by_params(random_prompt(66, 600)), 600)
    unreachable = _elsewhere("127.0.0.1") | {"remote_request_id": "never asked for before"}
    decode.call(ask, Ask("gone-2", random_prompt(67, 500), params=unreachable))
    decode.call(ask, Ask("bad-5", random_prompt(68, 200), params=_elsewhere("10.9.8.7")))
    after = [instance.call(metrics) for instance in both]
    sent, received = (
        {name: now[name] - then[name] for name in now if now[name] != then[name]}
        for then, now in zip(before, after, strict=True)
    )
    assert sent.pop("handovers_total") == 2
    assert sent.keys() <= {"reserved_bytes"}
    assert received.pop("load_seconds_sum") > 0
    # Bytes may come while the prompt is still computed elsewhere, before anybody waits for them.
    assert received.pop("receive_seconds_total") > 0
    num_blocks = -(-1700 // 128) + -(-600 // 128)
    assert received == {
        "loads_total": 3,
        "load_seconds_count": 3,
        "hit_tokens_total": 2300,
        "recomputed_tokens_total": 500,
        "failed_loads_total unreachable": 1,
        "malformed_requests_total": 1,
        "received_bytes_total": num_blocks * 128 * ModelShape().kv_bytes_per_token,
    }
    for instance, told in zip(both, after, strict=True):
        totals = instance.counts()
        assert told["handovers_total"] == totals.total("p2p_handovers")
        assert told["hit_tokens_total"] == totals.total("p2p_hit_tokens")
        assert told["capacity_bytes"] == 2 << 30
        assert told["reserved_bytes"] == instance.call(at_rest)["reserved_bytes"]
        instance.call(log_stats)
    assert re.search(r"KV Transfer metrics: .*handed over=\d+ prompt", prefill.log)
    assert re.search(r"KV Transfer metrics: .*taken over=\d+ tokens by \d+ loads?", decode.log)


def _prefill_in_background(engines: Engines, request: Ask) -> threading.Thread:
    thread = threading.Thread(target=_until_it_dies, args=(engines.prefill[0][0], request))
    thread.start()
    return thread


def _until_it_dies(instance: VllmInstance, request: Ask) -> None:
    with contextlib.suppress(RuntimeError):  # killed, as it was meant to be
        instance.call(ask, request)


def _signal_when_bytes_flow(engines: Engines, number: int) -> threading.Thread:
    """Send a signal to the prefill engine shortly after it has begun to compute."""
    process = engines.prefill[0][0].pid

    def strike() -> None:
        time.sleep(0.25)
        os.kill(process, number)

    thread = threading.Thread(target=strike)
    thread.start()
    return thread


def test_a_stalled_prefill_engine_costs_a_recompute(engines: Engines) -> None:
    name, prompt = engines.name(), random_prompt(70, 7900)
    computing = _prefill_in_background(engines, Ask(name, prompt, 1))
    striking = _signal_when_bytes_flow(engines, signal.SIGSTOP)
    started = time.monotonic()
    try:
        answer = engines.decode[0][0].call(ask, Ask(name, prompt))
    finally:
        striking.join()
        os.kill(engines.prefill[0][0].pid, signal.SIGCONT)
    assert answer.finish_reason == "length"
    assert answer.served.external_hit_tokens < 7900
    assert time.monotonic() - started < NOTICED_SECONDS
    computing.join()
    check(*engines.hand_over(random_prompt(71, 500)), 500)  # and it is used again


def test_a_killed_prefill_engine_costs_a_recompute(engines: Engines) -> None:
    """Last of all: the prefill engine is gone after it."""
    name, prompt = engines.name(), random_prompt(80, 7900)
    computing = _prefill_in_background(engines, Ask(name, prompt, 1))
    striking = _signal_when_bytes_flow(engines, signal.SIGKILL)
    started = time.monotonic()
    answer = engines.decode[0][0].call(ask, Ask(name, prompt))
    assert answer.finish_reason == "length"
    assert answer.served.external_hit_tokens < 7900
    assert time.monotonic() - started < NOTICED_SECONDS
    for thread in (computing, striking):
        thread.join()
    assert engines.decode[0][0].counts().total("p2p_failed_loads") > 0
    engines.decode[0][0].call(at_rest)
