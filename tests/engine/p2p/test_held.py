"""Real engines: prompts stay in the prefill engine's blocks, and NIXL reads them there."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.handover import Answer, Ask, add, ask, ask_all, at_rest, metrics
from tests.support.engines.handover import prefill as prefill_only
from tests.support.engines.instance import InstanceError, VllmInstance
from tests.support.engines.p2p_engines import NOTICED_SECONDS, Engines, kv_transfer, running
from tests.support.engines.p2p_instances import free_ports
from tests.support.engines.probe import EngineProbe
from tests.support.nixl import needs_nixl
from tests.support.prompts import random_prompt

pytestmark = needs_nixl
_SETTINGS: dict[str, Any] = {
    "send_type": "GET",
    "secret": "shared by these two",
    "lease_seconds": 5.0,
}


@pytest.fixture(scope="module")
def engines(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    ports = free_ports(1), free_ports(1)
    roles = zip(("kv_producer", "kv_consumer"), ports, strict=True)
    transfers = [kv_transfer(role, port, **_SETTINGS) for role, port in roles]
    folder = tmp_path_factory.mktemp("held")
    with running(tiny_model, folder, transfers, max_num_batched_tokens=[512, None]) as (p, d):
        p.serve(random_prompt(99, 50))  # with its first step the rank says that it can be read
        yield Engines([(p, ports[0])], [(d, ports[1])], count())


def check(cold: Answer, served: Answer, num_tokens: int) -> None:
    assert served.served.external_hit_tokens == num_tokens
    assert () != served.served.block_digests == cold.served.block_digests
    assert served.finish_reason == "length"


def rest(engines: Engines) -> None:
    for instance, _ in engines.prefill + engines.decode:
        instance.call(at_rest)


def free_blocks(probe: EngineProbe) -> int:
    return int(probe.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


def test_blocks_are_read_and_then_free(engines: Engines) -> None:
    """Without any of the host memory for hand-overs."""
    prefill, _ = engines.prefill[0]
    rest(engines)
    before = prefill.call(free_blocks)
    cold, served = engines.hand_over(random_prompt(1, 3001))
    check(cold, served, 3001)
    assert prefill.call(metrics).get("reserved_bytes", 0) == 0
    rest(engines)
    assert prefill.call(free_blocks) == before


def test_by_parameters_and_what_the_decode_engine_has(engines: Engines) -> None:
    prompt = random_prompt(2, 1500)
    check(*engines.hand_over_by_params(prompt), 1500)
    longer = prompt + random_prompt(3, 500)
    cold, served = engines.hand_over_by_params(longer)
    assert served.served.external_hit_tokens == 2000 - 11 * 128
    assert served.served.block_digests == cold.served.block_digests
    rest(engines)


def test_many_that_wait_while_they_are_computed(engines: Engines) -> None:
    prompts = [random_prompt(20 + i, 301 + 170 * i) for i in range(8)]
    names = [engines.name() for _ in prompts]
    (prefill, _), (decode, _) = engines.prefill[0], engines.decode[0]
    asks = [Ask(n, p, 1) for n, p in zip(names, prompts, strict=True)]
    computing = threading.Thread(target=prefill.call, args=(ask_all, asks))
    computing.start()
    served = decode.call(ask_all, [Ask(n, p) for n, p in zip(names, prompts, strict=True)])
    computing.join()
    assert sum(len(p) for p in prompts) == served[0].served.external_hit_tokens
    for number, (prompt, answer) in enumerate(zip(prompts, served, strict=True)):
        again = prefill.call(ask, Ask(f"again-{number}", prompt))
        assert () != answer.served.block_digests == again.served.block_digests
    rest(engines)


def test_what_nobody_reads_is_free_after_its_lease(engines: Engines) -> None:
    prefill, _ = engines.prefill[0]
    rest(engines)
    before = prefill.call(free_blocks)
    prefill.call(ask, Ask(engines.name(), random_prompt(4, 1000), 1))  # until it has let go
    assert prefill.call(free_blocks) == before


def strike_in_the_next_read(probe: EngineProbe, number: int) -> None:
    """A stop strikes when it is known where the prompt lies, a kill when it has been read."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    nixl = get_kv_transfer_group()._worker._nixl
    read = nixl.read

    def struck(*args: Any) -> None:
        nixl.read = read
        if number == signal.SIGSTOP:
            # To this thread: one sent to the process may find another first, which runs later.
            signal.pthread_kill(threading.get_ident(), number)
        read(*args)
        if number == signal.SIGKILL:
            os.kill(os.getpid(), number)

    nixl.read = struck


def scribble(probe: EngineProbe) -> None:
    """What others would write into blocks that are free."""
    assert probe.engine.reset_prefix_cache()
    probe.on_ranks(scribble_on_rank)


def scribble_on_rank(worker: Any) -> None:
    for cache in worker.model_runner.kv_caches:
        cache.fill_(1.0)


def reserved_memory(probe: EngineProbe) -> int:
    """Bytes of host memory that hand-overs have here, after a step."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    probe.serve([1] * 10)
    return int(get_kv_transfer_group()._worker.used_bytes)


def until_no_memory_is_reserved(probe: EngineProbe) -> None:
    end = time.monotonic() + 4 * _SETTINGS["lease_seconds"]
    while reserved_memory(probe):
        assert time.monotonic() < end, "it is kept longer than its lease"
        time.sleep(0.2)


def num_open_files(instance: VllmInstance) -> int:
    return len(list(Path(f"/proc/{instance.pid}/fd").iterdir()))


def num_threads(instance: VllmInstance) -> int:
    return len(list(Path(f"/proc/{instance.pid}/task").iterdir()))


def until_stopped(instance: VllmInstance) -> None:
    end = time.monotonic() + 60
    while Path(f"/proc/{instance.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < end, "it does not read"
        time.sleep(0.01)


def abort_while_reading(probe: EngineProbe, request: Ask) -> int:
    """Returns how many blocks are free afterwards less those before."""
    before = free_blocks(probe)
    add(probe, request)
    for _ in range(3):
        probe.engine.step()
    probe.engine.abort_request([request.request_id])
    probe.drain()
    return free_blocks(probe) - before


def test_aborts_leave_nothing(engines: Engines) -> None:
    (prefill, _), (decode, _) = engines.prefill[0], engines.decode[0]
    params = {"do_remote_decode": True, "do_remote_prefill": False}
    prompt = random_prompt(5, 3000)
    cold = prefill.call(prefill_only, Ask("aborted-p", prompt, 1, params))
    assert decode.call(abort_while_reading, Ask("aborted-d", prompt, 2, cold.params)) == 0
    rest(engines)


def reset_until_done(probe: EngineProbe) -> list[bool]:
    """As one does who is told to try again. Returns the answers."""
    answers = []
    for _ in range(10_000):
        answers.append(bool(probe.engine.reset_prefix_cache(reset_connector=True)))
        if answers[-1]:
            break
        probe.engine.step()
    return answers


def test_what_was_reset_hands_over(engines: Engines) -> None:
    """vLLM resets nothing while a prompt is held. Then it does, on either side."""
    (prefill, _), (decode, _) = engines.prefill[0], engines.decode[0]
    rest(engines)
    prefill.call(prefill_only, Ask(engines.name(), random_prompt(40, 700), 1))
    answers = prefill.call(reset_until_done)
    assert (answers[0], answers[-1]) == (False, True)
    assert decode.call(reset_until_done) == [True]
    check(*engines.hand_over(random_prompt(41, 700)), 700)
    rest(engines)


def test_a_decode_engine_that_stops_in_a_read_reads_nothing_wrong(engines: Engines) -> None:
    """Meanwhile the blocks come free, and others write into them."""
    (prefill, _), (decode, _) = engines.prefill[0], engines.decode[0]
    rest(engines)
    before = prefill.call(free_blocks)
    name, prompt = engines.name(), random_prompt(30, 3000)
    prefill.call(prefill_only, Ask(name, prompt, 1))
    decode.call(strike_in_the_next_read, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(decode.call, ask, Ask(name, prompt))
        try:
            until_stopped(decode)
            prefill.call(at_rest)
            assert prefill.call(free_blocks) == before
            prefill.call(scribble)
            assert prefill.serve(random_prompt(31, 700)).cached_tokens == 0
        finally:
            os.kill(decode.pid, signal.SIGCONT)
        late = answer.result()
    decode.reset_prefix_cache()
    computed = decode.call(ask, Ask("computed here", prompt))
    assert (computed.finish_reason, computed.served.external_hit_tokens) == ("length", 0)
    assert late.finish_reason == "length"
    assert () != late.served.block_digests == computed.served.block_digests
    prefill.call(until_no_memory_is_reserved)
    check(*engines.hand_over(random_prompt(32, 500)), 500)
    rest(engines)


def test_a_killed_decode_engine_keeps_nothing(engines: Engines) -> None:
    """It has read the prompt, and said nothing yet. Nor does it ever say anything again."""
    prefill, decode = engines.prefill[0][0], engines.decode[0][0]
    rest(engines)
    before = prefill.call(free_blocks), num_open_files(prefill), num_threads(prefill)
    names, prompt = [engines.name() for _ in range(2)], random_prompt(33, 3000)
    for name in names:
        prefill.call(prefill_only, Ask(name, prompt, 1))
    decode.call(strike_in_the_next_read, signal.SIGKILL)
    with pytest.raises(InstanceError):
        decode.call(ask, Ask(names[0], prompt))
    assert prefill.serve(random_prompt(34, 700)).cached_tokens == 0  # it serves on
    prefill.call(at_rest)
    assert prefill.call(free_blocks) == before[0]
    prefill.call(until_no_memory_is_reserved)
    assert num_open_files(prefill) <= before[1]
    assert num_threads(prefill) <= before[2]


@pytest.fixture(scope="module")
def successor(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, engines: Engines
) -> Iterator[None]:
    """Has the place of the decode engine that was killed, and its port."""
    port = engines.decode[0][1]
    folder = tmp_path_factory.mktemp("successor")
    with running(tiny_model, folder, [kv_transfer("kv_consumer", port, **_SETTINGS)]) as (decode,):
        engines.decode[0] = decode, port
        yield


@pytest.mark.usefixtures("successor")
def test_its_successor_reads(engines: Engines) -> None:
    check(*engines.hand_over(random_prompt(35, 2000)), 2000)
    rest(engines)


def test_a_stopped_prefill_engine_costs_a_recompute(engines: Engines) -> None:
    """Its memory can be read, but it gives no proof."""
    (prefill, _), (decode, _) = engines.prefill[0], engines.decode[0]
    name, prompt = engines.name(), random_prompt(6, 3000)
    prefill.call(prefill_only, Ask(name, prompt, 1))
    os.kill(prefill.pid, signal.SIGSTOP)
    started = time.monotonic()
    try:
        answer = decode.call(ask, Ask(name, prompt))
    finally:
        os.kill(prefill.pid, signal.SIGCONT)
    assert (answer.finish_reason, answer.served.external_hit_tokens) == ("length", 0)
    assert time.monotonic() - started < NOTICED_SECONDS
    check(*engines.hand_over(random_prompt(7, 500)), 500)
    rest(engines)


def test_a_killed_prefill_engine_costs_a_recompute(engines: Engines) -> None:
    """Last of all."""
    (prefill, _), (decode, _) = engines.prefill[0], engines.decode[0]
    name, prompt = engines.name(), random_prompt(8, 3000)
    prefill.call(prefill_only, Ask(name, prompt, 1))
    os.kill(prefill.pid, signal.SIGKILL)
    answer = decode.call(ask, Ask(name, prompt))
    assert (answer.finish_reason, answer.served.external_hit_tokens) == ("length", 0)
    decode.call(at_rest)
