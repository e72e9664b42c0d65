"""Real engines in larger company: one of four killed, and the example."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from itertools import count
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.engines.handover import Answer, Ask, ask, ask_all
from tests.support.engines.instance import VllmInstance
from tests.support.engines.p2p_engines import Engines, kv_transfer, running
from tests.support.engines.ports import free_ports
from tests.support.prompts import random_prompt


@pytest.mark.soak  # four engines
@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_a_hundred_requests_and_one_engine_of_four_killed(
    tiny_model: Path, tmp_path: Path, victim: str
) -> None:
    """No wrong byte, no failed request, no hang. Of a killed decode engine's requests, those that
    it had not answered are asked of the other one, as a router does."""
    ports = [free_ports(1) for _ in range(4)]
    roles = ["kv_producer"] * 2 + ["kv_consumer"] * 2
    pairs = zip(roles, ports, strict=True)
    settings = {"cpu_gib": 0.5, "audit_share": 0.0}
    transfers = [kv_transfer(role, port, **settings) for role, port in pairs]
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
        assert served.external_hit_tokens == sum(len(prompts[j]) - 1 for j in together), i
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
