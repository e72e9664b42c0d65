"""KV transfers between two engines: the same bytes, or none, and no request fails.

Tests compare digests of each full block of the prompt.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from examples.tiny_model import ModelShape
from tests.support.engines.calls import check_integrity, forget, sums_are_alike
from tests.support.engines.p2p_engines import (
    NOTICED_SECONDS,
    Answer,
    Ask,
    Engines,
    add,
    ask,
    ask_all,
    log_stats,
    metrics,
    prefill,
)
from tests.support.engines.probe import EngineProbe
from tests.support.engines.settings import random_prompt
from tests.support.engines.strangers import SAYINGS, cpu_seconds_of, memory_of, ports_of, talk
from tests.support.engines.updates import load_rows, move_weights
from tests.support.redis.proxies import Direction, FaultProxy

BLOCK = 128
WANTS: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
HandOver = Callable[[Engines, Sequence[int]], tuple[Answer, Answer]]
BY = pytest.mark.parametrize(
    "transfer", [Engines.hand_over, Engines.hand_over_by_params], ids=["id", "params"]
)


def check(cold: Answer, served: Answer, num_tokens: int) -> None:
    """All tokens, or all but the last, were transferred, with the same bytes."""
    assert served.served.external_hit_tokens in (num_tokens, num_tokens - 1)
    assert served.served.block_digests == cold.served.block_digests
    assert len(served.served.block_digests) == num_tokens // BLOCK
    assert served.finish_reason == "length"


def fresh(engines: Engines, num_tokens: int) -> list[int]:
    """A prompt that no engine has seen."""
    return random_prompt(10_000 + next(engines.numbers), num_tokens)


def rest(engines: Engines) -> None:
    """vLLM has all its blocks back."""
    for instance, _ in engines.prefill + engines.decode:
        assert instance.call(missing_blocks) == 0


def missing_blocks(probe: EngineProbe) -> int:
    probe.drain()
    pool = probe.scheduler.kv_cache_manager.block_pool
    return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())  # without the null block


# -- prompts -----------------------------------------------------------------------------------


@BY
# No multiple of a block: vLLM computes a prompt's last token again, and that block differs.
@pytest.mark.parametrize("num_tokens", [2, 127, 129, 300, 3001])
def test_a_prompt_of_any_length(engines: Engines, transfer: HandOver, num_tokens: int) -> None:
    cold, served = transfer(engines, fresh(engines, num_tokens))
    check(cold, served, num_tokens)
    rest(engines)


def test_the_parameters_for_routers(engines: Engines) -> None:
    cold, _ = engines.hand_over_by_params(random_prompt(2, 500))
    assert cold.params is not None
    assert (cold.params["do_remote_prefill"], cold.params["do_remote_decode"]) == (True, False)
    names = {"remote_engine_id", "remote_request_id", "remote_block_ids", "remote_num_tokens"}
    assert cold.params.keys() >= names | {"tp_size"}
    assert (cold.params["remote_host"], cold.params["remote_port"]) == (
        "127.0.0.1",
        engines.prefill[0][1],
    )


@BY
def test_a_prompt_in_the_prefill_cache(engines: Engines, transfer: HandOver) -> None:
    prompt = fresh(engines, 1500)
    transfer(engines, prompt)
    engines.decode[0][0].call(forget)
    cold, served = transfer(engines, prompt)
    assert cold.served.cached_tokens > 1000
    check(cold, served, 1500)
    engines.decode[0][0].call(forget)


@BY
def test_cached_chunks_are_not_fetched(engines: Engines, transfer: HandOver) -> None:
    prompt = fresh(engines, 1500)
    transfer(engines, prompt)
    cold, served = transfer(engines, [*prompt, *random_prompt(5, 500)])
    assert served.served.external_hit_tokens in (2000 - 11 * BLOCK, 1999 - 11 * BLOCK)
    assert () != served.served.block_digests == cold.served.block_digests
    rest(engines)


def test_a_named_engines_stored_chunks(engines: Engines) -> None:
    """llm-d names an engine beside a request. Its stored chunks are loaded; without any the prompt
    is computed."""
    (first, port), (second, _) = engines.prefill[0], engines.decode[0]
    place = {"remote_kv_source": {"remote_host": "127.0.0.1", "remote_port": port}}
    prompt, other = fresh(engines, 1500), fresh(engines, 700)
    cold = first.call(ask, Ask(f"own-{next(engines.numbers)}", prompt))
    for asked, num_tokens in ((prompt, 1500 // BLOCK * BLOCK), (other, 0)):
        name = f"named-{next(engines.numbers)}"
        served = second.call(ask, Ask(name, asked, params=place))
        assert served.served.external_hit_tokens == num_tokens
        assert served.finish_reason == "length"
        if num_tokens:
            assert () != served.served.block_digests == cold.served.block_digests
        second.call(forget)
    rest(engines)


def test_a_cached_prompt_asks_no_source(engines: Engines) -> None:
    """Otherwise a dead source would delay each request that names it."""
    second, prompt = engines.decode[0][0], fresh(engines, 700)
    second.call(ask, Ask(f"own-{next(engines.numbers)}", prompt))
    with socket.create_server(("127.0.0.1", 0)) as source:
        source.setblocking(False)
        place = {"remote_host": "127.0.0.1", "remote_port": source.getsockname()[1]}
        asks = [prompt, prompt[: BLOCK - 1], fresh(engines, 300)]
        for number, asked in enumerate(asks):
            if number == len(asks) - 1:
                with pytest.raises(BlockingIOError):
                    source.accept()
            name = f"named-{next(engines.numbers)}"
            second.call(ask, Ask(name, asked, params={"remote_kv_source": place}))
        source.accept()[0].close()


def test_many_transfers_during_prefill(engines: Engines) -> None:
    prompts = [random_prompt(20 + i, 301 + 170 * i) for i in range(8)]
    asks = [Ask(engines.name(), prompt) for prompt in prompts]
    (first, _), (second, _) = engines.prefill[0], engines.decode[0]
    with ThreadPoolExecutor(1) as pool:
        computing = pool.submit(first.call, ask_all, [Ask(a.request_id, a.prompt, 1) for a in asks])
        served = second.call(ask_all, asks)
        computing.result()
    total = sum(map(len, prompts))
    assert total - len(prompts) <= served[0].served.external_hit_tokens <= total
    for number, (prompt, answer) in enumerate(zip(prompts, served, strict=True)):
        again = first.call(ask, Ask(f"again-{number}", prompt))
        assert () != answer.served.block_digests == again.served.block_digests
    rest(engines)


# -- failures ----------------------------------------------------------------------------------


def abort_after(probe: EngineProbe, request: Ask, steps: int) -> None:
    add(probe, request)
    for _ in range(steps):
        probe.engine.step()
    probe.engine.abort_request([request.request_id])
    probe.engine.step()


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_aborts_on_either_side(engines: Engines, steps: int) -> None:
    (first, _), (second, _) = engines.prefill[0], engines.decode[0]
    name, prompt = engines.name(), random_prompt(70 + steps, 2001)
    first.call(abort_after, Ask(name, prompt, 1), steps)
    started = time.monotonic()
    served = second.call(ask, Ask(name, prompt))
    assert time.monotonic() - started < NOTICED_SECONDS
    assert served.finish_reason == "length"
    second.call(abort_after, Ask(engines.name(), random_prompt(80 + steps, 1000)), steps)
    rest(engines)
    cold, served = engines.hand_over(prompt[:700])
    if not sums_are_alike(second):
        pytest.skip("compared only on a CPU on which a token's KV does not depend on its step")
    assert () != served.served.block_digests == cold.served.block_digests


def elsewhere(host: str, port: object = 9) -> dict[str, Any]:
    names = {"remote_host": host, "remote_port": port, "remote_request_id": "x"}
    return {"do_remote_prefill": True, **names}


def spoil(data: bytes) -> bytes:
    """Flip a bit near the beginning of each read: of lengths and of payloads."""
    place = min(len(data) - 1, 5)
    return data[:place] + bytes([data[place] ^ 0x40]) + data[place + 1 :]


@pytest.mark.parametrize("towards", Direction, ids=lambda each: str(each.value))
def test_altered_bytes_are_a_miss(engines: Engines, way_name: str, towards: Direction) -> None:
    """A recompute, and little memory. With shared memory the prefill engine's KV is loaded all the
    same: it does not cross the socket."""
    (first, port), (second, _) = engines.prefill[0], engines.decode[0]
    prompt = random_prompt(92 + (towards is Direction.REPLY), 2001)
    own = second.call(ask, Ask(f"own-{towards.value}", prompt))
    second.call(forget)
    before = memory_of(second.pid), memory_of(first.pid)
    with FaultProxy(port) as proxy:
        proxy.alter[towards] = spoil
        cold = first.call(prefill, Ask(f"p-spoilt-{towards.value}", prompt, 1, WANTS))
        assert cold.params is not None
        params = cold.params | {"remote_port": proxy.port}
        started = time.monotonic()
        served = second.call(ask, Ask(f"d-spoilt-{towards.value}", prompt, 2, params))
        assert time.monotonic() - started < NOTICED_SECONDS
    assert served.finish_reason == "length"
    expected = cold.served if way_name == "memory" else own.served
    assert () != served.served.block_digests == expected.block_digests
    grown = memory_of(second.pid) - before[0], memory_of(first.pid) - before[1]
    assert max(grown) < 256 << 20
    second.call(forget)
    check(*engines.hand_over_by_params(random_prompt(94, 700)), 700)


def test_strangers_learn_nothing_and_cost_little(engines: Engines) -> None:
    """Strangers get no KV, take little memory and time, and change nothing in the KV cache."""
    first, _ = engines.prefill[0]
    prompt = fresh(engines, 700)
    cold = first.call(prefill, Ask(engines.name(), prompt, 1))
    ports = ports_of(first.pid)
    assert ports
    for said in SAYINGS.values():
        for port in ports:
            talk(port, said)  # first use
    memory, seconds = memory_of(first.pid), cpu_seconds_of(first.pid)
    for said in SAYINGS.values():
        for port in ports:
            assert talk(port, said, 8) < 64 << 10
    assert memory_of(first.pid) - memory < 64 << 20
    assert cpu_seconds_of(first.pid) - seconds < 0.05 * 8 * len(SAYINGS) * len(ports)
    again = first.serve(prompt)
    assert again.cached_tokens >= 640
    assert () != again.block_digests == cold.served.block_digests
    check(*engines.hand_over(fresh(engines, 300)), 300)


# -- weights -----------------------------------------------------------------------------------


def check_computed(engines: Engines, seed: int) -> None:
    """Nothing is transferred, though the prefill engine has other KV for the prompt."""
    prompt, decode = random_prompt(seed, 700), engines.decode[0][0]
    own = decode.call(ask, Ask(f"own-{seed}", prompt))
    decode.call(forget)
    for transfer in (engines.hand_over, engines.hand_over_by_params):
        cold, served = transfer(prompt)
        assert served.served.external_hit_tokens == 0
        assert () != served.served.block_digests == own.served.block_digests
        assert cold.served.block_digests != own.served.block_digests
        decode.call(forget)


def test_weights_are_compared_and_resets_are_not(engines: Engines) -> None:
    """The number of resets does not matter. The second decode engine is not updated: later tests
    cannot use it."""
    (first, _), (second, _) = engines.prefill[0], engines.decode[0]
    for _ in range(2):
        second.reset_prefix_cache()
        second.serve(random_prompt(120, 50))
    check(*engines.hand_over(random_prompt(121, 700)), 700)
    assert first.call(move_weights, 0.02) > 0  # only vLLM's own reset follows
    for _ in range(3):
        first.reset_prefix_cache()
        first.serve(random_prompt(122, 50))
    check_computed(engines, 123)
    assert second.call(move_weights, 0.02) > 0
    second.reset_prefix_cache()
    check(*engines.hand_over(random_prompt(124, 700)), 700)


def test_an_update_without_a_reset_ends_transfers(engines: Engines) -> None:
    """vLLM's own cache has KV of the old weights in the prefill engine, none in the decode
    engine."""
    (first, _), (second, _) = engines.prefill[0], engines.decode[0]
    prompt = random_prompt(125, 700)
    first.serve(prompt)
    for each in (first, second):
        each.call(load_rows, 0.5)
    second.reset_prefix_cache()
    own = second.call(ask, Ask("own-125", prompt))
    second.call(forget)
    for _ in range(2):  # by the second time, the weights have been read
        cold, served = engines.hand_over(prompt)
        assert cold.served.cached_tokens > 0
        assert served.served.external_hit_tokens == 0
        assert () != served.served.block_digests == own.served.block_digests
        second.call(forget)
    first.reset_prefix_cache()
    check(*engines.hand_over(prompt), 700)


# -- leaks and metrics -------------------------------------------------------------------------


def test_prometheus_counts_are_right(engines: Engines) -> None:
    """Through vLLM's own loggers: two transfers, an unreachable one, and a malformed request."""
    (prefill, _), (decode, _) = engines.prefill[0], engines.decode[0]
    both = prefill, decode
    before = [instance.call(metrics) for instance in both]
    check(*engines.hand_over(random_prompt(65, 1700)), 1700)
    check(*engines.hand_over_by_params(random_prompt(66, 600)), 600)
    unreachable = elsewhere("127.0.0.1") | {"remote_request_id": "never asked for before"}
    decode.call(ask, Ask("gone-2", random_prompt(67, 500), params=unreachable))
    decode.call(ask, Ask("bad-5", random_prompt(68, 200), params=elsewhere("10.9.8.7")))
    after = [instance.call(metrics) for instance in both]
    sent, received = (
        {name: now[name] - then.get(name, 0.0) for name in now if now[name] != then.get(name)}
        for then, now in zip(before, after, strict=True)
    )
    assert sent == {"handovers_total": 2}
    assert received.pop("receive_seconds_total") > 0
    num_chunks = -(-1699 // 128) + -(-599 // 128)
    assert received == {
        "hit_tokens_total": 1699 + 599,
        "failed_loads_total unreachable": 1,
        "malformed_requests_total": 1,
        "received_bytes_total": num_chunks * 128 * ModelShape().kv_bytes_per_token,
    }
    for instance, told in zip(both, after, strict=True):
        totals = instance.counts()
        assert told["handovers_total"] == totals.total("p2p_handovers")
        assert told["hit_tokens_total"] == totals.total("p2p_hit_tokens")
        instance.call(check_integrity)
        instance.call(log_stats)
    assert re.search(r"KV Transfer metrics: .*hit tokens=\d+", decode.log)
