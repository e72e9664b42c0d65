"""The thread that makes the tiers is often not the one that generates. OpenMP threads of both would
exceed the cores, and those that generate would sleep between two loops."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from lmcache_connector.transformers import KVTiers
from lmcache_connector.transformers.continuous_batching import TieredBatching

_CONFIG = {"cpu_gib": 0.05}


def tiers_of(model: Any) -> AbstractContextManager[Any]:
    return KVTiers(model, _CONFIG)


def batching_of(model: Any) -> AbstractContextManager[Any]:
    sizes = {"page_size": 32, "num_blocks": 128, "max_batch_tokens": 512}
    manager = model.init_continuous_batching(
        GenerationConfig(eos_token_id=-1), ContinuousBatchingConfig(**sizes)
    )
    return TieredBatching(manager, _CONFIG)


def look_at_team(make: Callable[[Any], AbstractContextManager[Any]], folder: str) -> None:
    """Runs in its own process, whose first thread has not computed yet."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with make(model):
        threads = Path("/proc/self/task")
        before = set(threads.iterdir())
        torch.ones(1 << 20).add_(1.0)
        assert len(set(threads.iterdir()) - before) == 1, "the team was there already"
        assert torch.get_num_threads() == 2


@pytest.mark.parametrize("make", [tiers_of, pytest.param(batching_of, marks=pytest.mark.soak)])
def test_making_the_tiers_starts_no_openmp_threads(
    make: Callable[[Any], AbstractContextManager[Any]], tiny_model: Path
) -> None:
    code = f"from {__name__} import *; look_at_team({make.__name__}, {str(tiny_model)!r})"
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=240.0,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
