"""Hits on a GPU, compared with recompute and with an oracle.

The same requests come, in the same phase of a step, to four engines: one decides for itself, one
loads nothing, one loads everything, and one has all in vLLM's own prefix cache. The oracle's choice
for each request is the better of the second and the third.

    python -m benchmarks.gpu_storms --step-ms 50 --bus-gb-per-s 25
    python -m benchmarks.gpu_storms --step-ms 50 --device cuda

prints a JSON object per measured request or crowd. The device is simulated, in virtual time (see
`device`), or it is a GPU, with LMCache's own engine and copies in real time (see `cuda_device`).
``rehearsed`` runs the GPU's code without one, with a smaller model: TRITON_INTERPRET=1 must be set.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.gpu_storms.passes import GpuShape
    from benchmarks.gpu_storms.storm import Sample, Setting

HITS = (128, 512, 1024, 2048, 4096, 8192, 16384)
DEVICES = ("simulated", "cuda", "rehearsed")
_MAX_SECONDS = 3600.0  # simulated
_RULES: dict[str, dict[str, Any]] = {
    "auto": {},
    "never": {"role": "kv_producer"},
    "always": {"settings": {"compute_or_load": "always"}},
    "own": {"role": "kv_producer", "prefix_caching": True},
}


def _shape(setting: Setting, rule: str, **more: Any) -> GpuShape:
    from benchmarks.gpu_storms.passes import DeviceSpeed, GpuShape

    speed = DeviceSpeed(step_seconds=setting.step_ms / 1000)
    if setting.bus_gb_per_s:
        buses = setting.bus_gb_per_s * 1e9, setting.store_gb_per_s * 1e9
        speed = replace(speed, bus_bytes_per_second=buses[0], store_bytes_per_second=buses[1])
    return GpuShape(speed=speed, depth=setting.depth, **more, **_RULES[rule])


class SimulatedWorlds:
    """Switches the product to simulated time. ``trace``: print all events to stderr."""

    def __init__(self, folder: Path, *, trace: bool) -> None:
        from tests.simulation import loading

        loading.install()
        from benchmarks.gpu_storms.passes import MODEL
        from tests.simulation import setup

        self._model = setup.prepare(folder, MODEL)
        self._trace = (lambda line: print(line, file=sys.stderr)) if trace else None
        gc.freeze()

    def run(
        self, setting: Setting, rule: str, hits: tuple[int, ...], rounds: int
    ) -> Sequence[Sample]:
        """A storm in a new world. Raises ``RuntimeError`` if an invariant of the world fails."""
        from benchmarks.gpu_storms.device import Device, install
        from benchmarks.gpu_storms.engine import GpuEngine
        from benchmarks.gpu_storms.storm import Storm
        from tests.simulation.kernel import Kernel
        from tests.simulation.network import Network
        from tests.simulation.stdlib import RUNTIME

        kernel = Kernel(1, trace=self._trace)
        kernel.preempt_chance = 0.0
        RUNTIME.kernel, RUNTIME.network = kernel, Network(kernel)
        shape = _shape(setting, rule)
        device = Device(kernel, shape.speed)
        install(device, shape)
        samples: list[Sample] = []

        def direct() -> None:
            samples.extend(
                Storm(GpuEngine(self._model, shape, device), setting, rule).run(hits, rounds)
            )

        director = kernel.spawn(kernel.new_process("gpu"), direct, "director")
        is_over = kernel.run(lambda: director.is_done, _MAX_SECONDS)
        kernel.close()
        if kernel.failures or not is_over:
            raise RuntimeError(f"{setting}: {kernel.failures or kernel.describe_tasks()}")
        return samples


class RealWorlds:
    """On a GPU, or rehearsed without one. All storms share one device."""

    def __init__(self, folder: Path, *, is_rehearsal: bool) -> None:
        import torch

        from benchmarks.gpu_storms.cuda_device import CudaDevice, HostDevice
        from benchmarks.gpu_storms.passes import MODEL, GpuShape
        from examples.tiny_model import build_tiny_model
        from lmcache_connector.vllm_compat import parts
        from lmcache_connector.vllm_compat.cpu_attention import Packing

        model, cpu_gib = MODEL, 7.5
        if is_rehearsal:
            model = replace(MODEL, num_layers=2, num_kv_heads=2, num_heads=2, head_dim=64)
            cpu_gib = 0.25
            _rehearse_copies()
        # No attention reads this KV, so the packing of CPU attention does not matter.
        vars(parts)["find_packing"] = lambda *_: Packing("simulated", ())
        self._sizes: dict[str, Any] = {"model": model, "cpu_gib": cpu_gib}
        self._model = build_tiny_model(folder, model)
        shape = GpuShape(**self._sizes)
        self._device = (
            HostDevice(shape) if is_rehearsal else CudaDevice(shape, torch.device("cuda", 0))
        )
        threading.excepthook = _end_at_once

    def run(
        self, setting: Setting, rule: str, hits: tuple[int, ...], rounds: int
    ) -> Sequence[Sample]:
        """A storm on a new engine. Raises ``RuntimeError`` if a pass found wrong KV."""
        from benchmarks.gpu_storms.engine import GpuEngine
        from benchmarks.gpu_storms.storm import Storm

        self._device.reset()
        engine = GpuEngine(self._model, _shape(setting, rule, **self._sizes), self._device)
        samples = Storm(engine, setting, rule).run(hits, rounds)
        engine.stop()
        self._device.check()
        return samples


def _rehearse_copies() -> None:
    from lmcache_connector.worker import rank_tiers
    from tests.support.doubles.rehearsed_cuda import rehearsed_copier

    vars(rank_tiers)["make_copier"] = lambda device: rehearsed_copier()


def _end_at_once(died: threading.ExceptHookArgs) -> None:
    """End the process when a thread fails: the storm could not end."""
    traceback.print_exception(died.exc_type, died.exc_value, died.exc_traceback)
    sys.stderr.flush()
    os._exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_storms")
    parser.add_argument("--step-ms", type=float, nargs="+", default=[10.0, 50.0, 250.0])
    parser.add_argument("--bus-gb-per-s", type=float, nargs="+", default=[25.0, 50.0])
    parser.add_argument("--hits", type=int, nargs="+", default=HITS)
    parser.add_argument("--rules", nargs="+", default=list(_RULES), choices=list(_RULES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--neighbours", type=int, nargs="+", default=[0, 4])
    parser.add_argument("--crowd", type=int, default=1)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--stores-ahead", type=int, default=0)
    parser.add_argument("--store-gb-per-s", type=float, help="default: the bus")
    parser.add_argument("--device", default="simulated", choices=DEVICES)
    parser.add_argument("--trace", action="store_true", help="what happens in simulated worlds")
    arguments = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.gpu_storms", *sys.argv[1:]])
    _run(arguments)
    sys.stdout.flush()
    os._exit(0)  # unloading vLLM and torch takes seconds


def _run(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        worlds = _worlds(arguments, Path(folder))
        logging.getLogger("lmcache_connector").setLevel(logging.ERROR)
        for setting in _settings(arguments):
            for rule in arguments.rules:
                for sample in worlds.run(setting, rule, tuple(arguments.hits), arguments.rounds):
                    print(json.dumps(asdict(setting) | asdict(sample)), flush=True)


def _worlds(arguments: argparse.Namespace, folder: Path) -> SimulatedWorlds | RealWorlds:
    if arguments.device == "simulated":
        return SimulatedWorlds(folder, trace=arguments.trace)
    return RealWorlds(folder, is_rehearsal=arguments.device == "rehearsed")


def _settings(arguments: argparse.Namespace) -> list[Setting]:
    """For an idle engine all step times are alike: one measurement. A real device has one bus."""
    from benchmarks.gpu_storms.storm import Setting

    found = []
    for bus in arguments.bus_gb_per_s if arguments.device == "simulated" else [0.0]:
        for neighbours in arguments.neighbours:
            steps = arguments.step_ms if neighbours else arguments.step_ms[:1]
            found += [
                Setting(
                    step,
                    bus,
                    neighbours,
                    arguments.crowd,
                    arguments.depth,
                    arguments.stores_ahead,
                    arguments.store_gb_per_s or bus,
                )
                for step in steps
            ]
    return found


if __name__ == "__main__":
    main()
