"""The environment variables that tell vLLM's build for CPUs which cores to compute with."""

from __future__ import annotations

import os

RESERVED_CORES = "VLLM_CPU_NUM_OF_RESERVED_CPU"
BOUND_CORES = "VLLM_CPU_OMP_THREADS_BIND"


def cores_are_chosen() -> bool:
    """Whether somebody has said it. If nobody has, vLLM chooses by itself."""
    return RESERVED_CORES in os.environ or os.environ.get(BOUND_CORES, "auto") != "auto"
