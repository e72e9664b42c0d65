"""Real engines in larger company: the tiered connector beside, other ranks, one of four killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT
from tests.support.engines.handover import Answer, Ask, ask, ask_all
from tests.support.engines.instance import VllmInstance
from tests.support.engines.p2p_engines import Engines, kv_transfer, running
from tests.support.engines.ports import free_ports
from tests.support.engines.probe import EngineProbe
from tests.support.prompts import random_prompt


def multi(role: str, port: int, **extra: Any) -> dict[str, Any]:
    """Hand-overs first, the tiers for everything else."""
    tiered = {
        "kv_connector": "LMCacheTieredConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "cpu_gib": 0.5,
            "compute_or_load": "always",
            "audit_share": 0.0,
        },
    }
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [kv_transfer(role, port, **extra), tiered]},
    }


def hit_tokens(probe: EngineProbe) -> tuple[int, int]:
    """Tokens handed over to this engine, and loaded from its tiers."""
    counts = probe.counts()
    return int(counts.total("p2p_hit_tokens")), int(counts.total("hit_tokens"))


def integrity(probe: EngineProbe) -> None:
    probe.drain()
    for connector in probe.connector.sub_connectors:
        connector._scheduler.check_integrity()


@pytest.fixture(scope="module")
def both(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    ports = free_ports(1), free_ports(1)
    transfers = [multi("kv_producer", ports[0]), multi("kv_consumer", ports[1])]
    with running(tiny_model, tmp_path_factory.mktemp("multi"), transfers) as (prefill, decode):
        yield Engines([(prefill, ports[0])], [(decode, ports[1])], count())


@pytest.mark.soak  # two more engine starts
def test_with_the_tiered_connector(both: Engines) -> None:
    """What was handed over is not the decode engine's to store; what it computes itself is."""
    prefill, decode = both.prefill[0][0], both.decode[0][0]
    prompt = random_prompt(1, 1300)
    for hand_over in (both.hand_over, both.hand_over_by_params):
        cold, served = hand_over(prompt)
        assert () != cold.served.block_digests == served.served.block_digests
        decode.call(integrity)
        prefill.call(integrity)
        decode.reset_prefix_cache()
        prefill.reset_prefix_cache()
    handed_over, _ = decode.call(hit_tokens)
    assert handed_over == 2600
    for name, from_tiers in (("turn-two", 0), ("turn-three", 1280)):
        again = decode.call(ask, Ask(name, [*prompt, *random_prompt(2, 100)]))
        assert decode.call(hit_tokens) == (2600, from_tiers)
        assert again.served.block_digests[:10] == cold.served.block_digests[:10]
        decode.reset_prefix_cache()
    # The prefill engine's own tiers spare it the computation; that KV is handed over as well.
    assert prefill.call(hit_tokens)[1] > 0
    # And a prefill engine that is gone costs a recompute, or a load from the tiers.
    gone = {
        "do_remote_prefill": True,
        "remote_host": "127.0.0.1",
        "remote_port": free_ports(1),
        "remote_request_id": "x",
    }
    answer = decode.call(ask, Ask("gone", random_prompt(3, 700), params=gone))
    assert answer.finish_reason == "length"
    decode.call(integrity)


@pytest.mark.soak  # two more engine starts of a minute each
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)])
def test_other_tensor_parallel_sizes(
    tiny_model: Path, tmp_path: Path, sizes: tuple[int, int]
) -> None:
    ports = free_ports(2), free_ports(2)
    roles = zip(("kv_producer", "kv_consumer"), ports, strict=True)
    transfers = [kv_transfer(role, port, secret="shared by these two") for role, port in roles]
    with running(tiny_model, tmp_path, transfers, tensor_parallel_size=list(sizes)) as pair:
        engines = Engines([(pair[0], ports[0])], [(pair[1], ports[1])], count())
        for way, hand_over in enumerate((engines.hand_over, engines.hand_over_by_params)):
            for num_tokens in (300, 3000):  # which neither engine has seen
                cold, served = hand_over(random_prompt(10 * num_tokens + way, num_tokens))
                assert served.served.external_hit_tokens == num_tokens
                assert () != served.served.shard_digests == cold.served.shard_digests


@pytest.mark.soak  # four engines
@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_a_hundred_requests_and_one_engine_of_four_killed(
    tiny_model: Path, tmp_path: Path, victim: str
) -> None:
    """No wrong byte, no failed request, no hang. Of a killed decode engine's requests, those that
    it had not answered are asked of the other one, as a router does."""
    ports = [free_ports(1) for _ in range(4)]
    roles = ["kv_producer"] * 2 + ["kv_consumer"] * 2
    secret = "shared by all of them"
    pairs = zip(roles, ports, strict=True)
    transfers = [kv_transfer(role, port, secret=secret) for role, port in pairs]
    lengths = (200 + 37 * i % 1500 for i in range(100))
    prompts = [random_prompt(n, n + (n % 128 == 0)) for n in lengths]
    with running(
        tiny_model,
        tmp_path,
        transfers,
        max_num_batched_tokens=1024,
        kv_cache_memory_bytes=128 << 20,
    ) as instances:
        engines = Engines(
            list(zip(instances[:2], ports[:2], strict=True)),
            list(zip(instances[2:], ports[2:], strict=True)),
            count(),
        )
        killed = engines.prefill[0] if victim == "prefill" else engines.decode[0]
        answers, prefilled, alone = _serve_all(engines, prompts, killed[0])
    for i, prompt in enumerate(prompts):
        assert answers[i].finish_reason == "length"
        assert len(answers[i].served.token_ids) == 2
        assert len(answers[i].served.block_digests) == len(prompt) // 128
    # What an engine computed itself, in a batch of its own, may differ in its last bits.
    handed_over = [i for i in answers if i in prefilled and i not in alone]
    for i in handed_over:
        served = answers[i].served
        together = [j for j in handed_over if (j // 10, j // 2 % 2) == (i // 10, i // 2 % 2)]
        assert served.external_hit_tokens == sum(len(prompts[j]) for j in together), i
        assert served.block_digests == prefilled[i].served.block_digests, i
    assert len(handed_over) >= 60


Answers = dict[int, Answer]


def _serve_all(
    engines: Engines, prompts: list[list[int]], victim: VllmInstance
) -> tuple[Answers, Answers, set[int]]:
    """Rounds of ten requests over all engines; one is killed in the middle of the fifth.

    Returns what decode and prefill engines answered, and which requests were not handed over, or
    perhaps only in part: those of the round that was struck, and what was asked of the other decode
    engine instead, which computed it alone.
    """
    answers: Answers = {}
    prefilled: Answers = {}
    dead: set[int] = set()
    alone = set(range(40, 50))
    for number in range(0, len(prompts), 10):
        batch = list(range(number, number + 10))
        names = {i: engines.name(prefill=i % 2, decode=i // 2 % 2) for i in batch}
        threads = []
        for side, instances, max_tokens in (
            ("p", engines.prefill, 1),
            ("d", engines.decode, 2),
        ):
            for index, (instance, _) in enumerate(instances):
                mine = [i for i in batch if (i if side == "p" else i // 2) % 2 == index]
                asks = [Ask(names[i], prompts[i], max_tokens) for i in mine]
                if id(instance) in dead or not asks:
                    continue
                found = prefilled if side == "p" else answers
                threads.append(threading.Thread(target=_ask, args=(instance, asks, mine, found)))
        for thread in threads:
            thread.start()
        if number == 40:
            threading.Timer(0.3, os.kill, (victim.pid, signal.SIGKILL)).start()
            dead.add(id(victim))
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive(), "a request hangs"
        for i in batch:  # what the dead decode engine left unanswered
            if i not in answers:
                living = next(d for d, _ in engines.decode if id(d) not in dead)
                alone.add(i)
                answers[i] = living.call(ask, Ask(f"again-{i}", prompts[i]))
    return answers, prefilled, alone


def _ask(instance: VllmInstance, asks: list[Ask], places: list[int], answers: Answers) -> None:
    with contextlib.suppress(RuntimeError, OSError):  # it may be the one that is killed
        answers.update(zip(places, instance.call(ask_all, asks), strict=True))


@pytest.mark.soak  # two servers and a proxy
def test_the_example_runs() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples.disaggregated.run"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "handed over" in done.stdout
