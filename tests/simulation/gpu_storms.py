"""Hits on a simulated GPU, against recompute and against whoever knows everything.

The same requests come, in the same phase of a step, to three engines: one that decides for itself,
one that loads nothing and one that loads everything. The better of the latter two for each request
is what an oracle would have chosen.

    python -m tests.simulation.gpu_storms --step-ms 50 --bus-gb-per-s 25

prints one JSON object per measured request.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import random
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.simulation.gpu_engine import Asked, GpuEngine
    from tests.simulation.kernel import Kernel

HITS = (128, 512, 1024, 2048, 4096, 8192, 16384)
_TAIL_TOKENS = 50
_PRIMED_TOKENS = 8  # some steps that only decode
_WARM_UP_ROUNDS = 1
_MAX_SECONDS = 3600.0  # simulated
_RULES: dict[str, dict[str, Any]] = {
    "auto": {},
    "never": {"role": "kv_producer"},
    "always": {"settings": {"compute_or_load": "always"}},
}


@dataclass(frozen=True, slots=True)
class Setting:
    """``neighbours``: requests that decode all the time, in steps of ``step_ms``; none: the engine
    is idle until a measured request comes. ``crowd``: as many requests come at once."""

    step_ms: float
    bus_gb_per_s: float
    neighbours: int
    crowd: int = 1
    depth: int = 2


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured request. ``loaded``: a load of it was planned."""

    rule: str
    hit_tokens: int
    round: int
    ttft: float
    loaded: bool


class Storm:
    """One world."""

    def __init__(self, kernel: Kernel, engine: GpuEngine, setting: Setting, rule: str) -> None:
        self.kernel = kernel
        self.engine = engine
        self.setting = setting
        self.rule = rule
        self.samples: list[Sample] = []
        self._count = 0
        self._over = False

    def run(self, hits: tuple[int, ...], rounds: int) -> None:
        self._sleep_until(lambda: self.engine.is_up)
        prompts = {size: _prompt(size + _TAIL_TOKENS, size) for size in hits}
        for prompt in prompts.values():
            self._ask(prompt, _PRIMED_TOKENS).ended.wait()
            self.kernel.sleep(0.5)
        self._start_neighbours()
        for turn in range(rounds + _WARM_UP_ROUNDS):
            order = random.Random(turn).sample(hits, len(hits))
            for size in order:
                self._measure(turn, size, prompts[size])
        self._over = True

    def _measure(self, turn: int, size: int, prompt: list[int]) -> None:
        chance = random.Random(f"{turn} {size}")
        self.kernel.sleep(0.2 + 5e-3 * self.setting.step_ms)
        self._to_phase(chance.random())
        before = self._num_loads()
        crowd = [self._ask(prompt) for _ in range(self.setting.crowd)]
        for asked in crowd:
            asked.ended.wait()
        if turn >= _WARM_UP_ROUNDS:
            ttft = sum(asked.ttft for asked in crowd) / len(crowd)
            loaded = self._num_loads() > before
            self.samples.append(Sample(self.rule, size, turn, ttft, loaded))

    def _to_phase(self, share: float) -> None:
        """Wait for that share of a step, from its beginning: what happened before differs."""
        if self.setting.neighbours:
            now, free_at = self.kernel.now, self.engine.device.fence().at
            step = self.setting.step_ms / 1000
            self.kernel.sleep((free_at - now) % step + share * step)

    def _start_neighbours(self) -> None:
        from tests.simulation import stdlib

        for number in range(self.setting.neighbours):
            stdlib.Thread(target=self._be_neighbour, args=(number,)).start()

    def _be_neighbour(self, number: int) -> None:
        chance = random.Random(number)
        while not self._over:
            prompt = _prompt(64, chance.randrange(1 << 30))
            self._ask(prompt, chance.randrange(100, 300)).ended.wait()

    def _ask(self, prompt: list[int], max_tokens: int = 1) -> Asked:
        self._count += 1
        return self.engine.ask(f"r{self._count}", prompt, max_tokens)

    def _num_loads(self) -> int:
        return len(self.engine.loads)

    def _sleep_until(self, condition: Any) -> None:
        while not condition():
            self.kernel.sleep(0.001)


def run_storm(
    setting: Setting, rule: str, hits: tuple[int, ...], rounds: int, model: Path, trace: Any = None
) -> Storm:
    """A world of its own. Raises ``RuntimeError`` if a promise was broken in it."""
    from tests.simulation.device import DeviceSpeed
    from tests.simulation.gpu_engine import GpuEngine, GpuShape
    from tests.simulation.kernel import Kernel
    from tests.simulation.network import Network
    from tests.simulation.stdlib import RUNTIME

    kernel = Kernel(1, trace=trace)
    kernel.preempt_chance = 0.0
    RUNTIME.kernel, RUNTIME.network = kernel, Network(kernel)
    speed = DeviceSpeed(
        step_seconds=setting.step_ms / 1000, bus_bytes_per_second=setting.bus_gb_per_s * 1e9
    )
    shape = replace(GpuShape(speed=speed, depth=setting.depth), **_RULES[rule])
    engine = GpuEngine(kernel, model, shape)
    storm = Storm(kernel, engine, setting, rule)
    director = kernel.spawn(
        kernel.new_process("client"), lambda: storm.run(hits, rounds), "director"
    )
    is_over = kernel.run(lambda: director.is_done, _MAX_SECONDS)
    kernel.close()
    if kernel.failures or not is_over:
        raise RuntimeError(f"{setting}: {kernel.failures or kernel.describe_tasks()}")
    return storm


def _prompt(num_tokens: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(2, 60) for _ in range(num_tokens)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.gpu_storms")
    parser.add_argument("--step-ms", type=float, nargs="+", default=[10.0, 50.0, 250.0])
    parser.add_argument("--bus-gb-per-s", type=float, nargs="+", default=[25.0, 50.0])
    parser.add_argument("--hits", type=int, nargs="+", default=HITS)
    parser.add_argument("--rules", nargs="+", default=list(_RULES), choices=list(_RULES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--neighbours", type=int, nargs="+", default=[0, 4])
    parser.add_argument("--crowd", type=int, default=1)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--trace", action="store_true")
    arguments = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(
            sys.executable, [sys.executable, "-m", "tests.simulation.gpu_storms", *sys.argv[1:]]
        )
    _run(arguments)
    sys.stdout.flush()
    os._exit(0)  # what vLLM and torch have loaded takes seconds to unload


def _run(arguments: argparse.Namespace) -> None:
    from tests.simulation import loading

    loading.install()
    from tests.simulation import setup
    from tests.simulation.gpu_engine import MODEL

    with tempfile.TemporaryDirectory() as folder:
        model = setup.prepare(Path(folder), MODEL)
        logging.getLogger("lmcache_connector").setLevel(logging.ERROR)
        gc.freeze()
        trace = (lambda line: print(line, file=sys.stderr)) if arguments.trace else None
        for setting in _settings(arguments):
            for rule in arguments.rules:
                storm = run_storm(
                    setting, rule, tuple(arguments.hits), arguments.rounds, model, trace
                )
                for sample in storm.samples:
                    print(json.dumps(asdict(setting) | asdict(sample)), flush=True)


def _settings(arguments: argparse.Namespace) -> list[Setting]:
    """Steps of other lengths look alike to an idle engine: it is measured once."""
    found = []
    for bus in arguments.bus_gb_per_s:
        for neighbours in arguments.neighbours:
            steps = arguments.step_ms if neighbours else arguments.step_ms[:1]
            found += [
                Setting(step, bus, neighbours, arguments.crowd, arguments.depth) for step in steps
            ]
    return found


if __name__ == "__main__":
    main()
