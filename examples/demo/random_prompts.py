"""The quick demo: prompts of random tokens on a tiny random model."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from examples.demo.outcome import Outcome, Way
from examples.demo.stage import Stage, served_by, stage
from examples.tiny_model import DEMO_SHAPE, build_tiny_model
from tests.support.engines.instance import VllmInstance
from tests.support.engines.probe import Served
from tests.support.engines.settings import random_prompt

_CPU_GIB = 2


def serve_random_prompts(folder: Path, num_tokens: int, rounds: int, console: Console) -> Outcome:
    """Serve ``rounds`` prompts of ``num_tokens`` tokens each way. Raises ``InstanceError``."""
    with console.status("Building a tiny random Llama"):
        model = build_tiny_model(folder / "model", DEMO_SHAPE)
    length = DEMO_SHAPE.max_position
    with stage(model, folder, console, cpu_gib=_CPU_GIB, max_model_len=length) as on:
        return _three_ways(on, [random_prompt(seed, num_tokens) for seed in range(rounds)])


def _three_ways(on: Stage, prompts: list[list[int]]) -> Outcome:
    say = on.console.print
    with on.instance("A") as a:
        cold = _serve(a, prompts, forget=False)
        say(f"Instance A computed {len(prompts)} prompts of {len(prompts[0])} tokens")
        cpu = _serve(a, prompts, forget=True)
        say("Instance A served them again, from the CPU tier")
    with on.instance("B") as b:
        redis = _serve(b, prompts, forget=False)
        say("Instance B, which never saw them, served them from Valkey")
    size = len(prompts[0]) // len(cold.served[0].block_digests)
    equal = all(way.same_bytes_as(cold.served, size) for way in (cpu, redis))
    return Outcome(len(prompts[0]), cold, cpu, redis, kv_bytes_equal=equal)


def _serve(instance: VllmInstance, prompts: list[list[int]], *, forget: bool) -> Way:
    """``forget``: reset vLLM's own prefix cache before each."""

    def serve_one(prompt: list[int]) -> Served:
        if forget:
            instance.reset_prefix_cache()
        return instance.serve(prompt)

    return served_by(instance, lambda: tuple(map(serve_one, prompts)))
