"""Time to first token of requests whose prompts were stored before, alone or beside others.

Threads and time are the standard library's, or the simulation's if it loads this module (see
`tests.simulation.loading`).
"""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass

from benchmarks.gpu_storms.engine import Asked, GpuEngine

_TAIL_TOKENS = 50
_PRIMED_TOKENS = 8  # some decode steps
_WARM_UP_ROUNDS = 1
_MAX_SECONDS = 600.0  # for one request


@dataclass(frozen=True, slots=True)
class Setting:
    """``neighbours``: requests that decode all the time, in steps of ``step_ms``; with none the
    engine is idle before a measured request. ``crowd``: requests that come at once.
    ``bus_gb_per_s``: 0 for the device's own. ``stores_ahead``: so many new prompts are
    served first, and the last one is measured while their stores run; 0: a stored one is."""

    step_ms: float
    bus_gb_per_s: float
    neighbours: int
    crowd: int = 1
    depth: int = 2
    stores_ahead: int = 0
    store_gb_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured request, or a crowd's mean. ``loaded``: whether a load was planned."""

    rule: str
    hit_tokens: int
    round: int
    ttft: float
    loaded: bool


class Storm:
    """One setting, on an engine that decides by ``rule``."""

    def __init__(self, engine: GpuEngine, setting: Setting, rule: str) -> None:
        self._engine = engine
        self._setting = setting
        self._rule = rule
        self._samples: list[Sample] = []
        self._count = 0
        self._is_over = False

    def run(self, hits: tuple[int, ...], rounds: int) -> list[Sample]:
        """Raises ``RuntimeError`` if a request gets no answer."""
        _wait(self._engine.is_up)
        prompts = {size: _prompt(size + _TAIL_TOKENS, size) for size in hits}
        for prompt in prompts.values():
            _wait(self._ask(prompt, _PRIMED_TOKENS).ended)
            time.sleep(0.5)
        for number in range(self._setting.neighbours):
            threading.Thread(target=self._be_neighbour, args=(number,), daemon=True).start()
        for turn in range(rounds + _WARM_UP_ROUNDS):
            for size in random.Random(turn).sample(hits, len(hits)):
                self._measure(turn, size, prompts[size])
        self._is_over = True
        return self._samples

    def _measure(self, turn: int, size: int, prompt: list[int]) -> None:
        chance = random.Random(f"{turn} {size}")
        time.sleep(0.2 + 5e-3 * self._setting.step_ms)
        self._to_phase(chance.random())
        if num_new := self._setting.stores_ahead:
            new = [_prompt(len(prompt), chance.randrange(1 << 30)) for _ in range(num_new)]
            for asked in [self._ask(each) for each in new]:
                _wait(asked.ended)
            prompt = new[-1]
        before = self._engine.num_loads
        crowd = [self._ask(prompt) for _ in range(self._setting.crowd)]
        for asked in crowd:
            _wait(asked.ended)
        if turn >= _WARM_UP_ROUNDS:
            ttft = sum(asked.ttft for asked in crowd) / len(crowd)
            loaded = self._engine.num_loads > before
            self._samples.append(Sample(self._rule, size, turn, ttft, loaded))

    def _to_phase(self, share: float) -> None:
        """Wait until ``share`` of a step has passed, whatever phase earlier events have left."""
        if self._setting.neighbours:
            step = self._setting.step_ms / 1000
            time.sleep(self._engine.device.busy_seconds() % step + share * step)

    def _be_neighbour(self, number: int) -> None:
        chance = random.Random(number)
        while not self._is_over:
            prompt = _prompt(64, chance.randrange(1 << 30))
            _wait(self._ask(prompt, chance.randrange(100, 300)).ended)

    def _ask(self, prompt: list[int], max_tokens: int = 1) -> Asked:
        self._count += 1
        return self._engine.ask(f"r{self._count}", prompt, max_tokens)


def _wait(event: threading.Event) -> None:
    if not event.wait(_MAX_SECONDS):
        raise RuntimeError(f"no start or answer within {_MAX_SECONDS:.0f} s")


def _prompt(num_tokens: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(2, 60) for _ in range(num_tokens)]
