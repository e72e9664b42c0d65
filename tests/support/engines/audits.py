"""What tests of audits have done inside an engine's process, by :meth:`VllmInstance.call`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from lmcache_connector.plans import AuditJob
from tests.support.engines.calls import tiered_of
from tests.support.engines.probe import EngineProbe

ROWS = slice(1000, 1064)
"""Rows of the embedding that are retrained."""


def audits(probe: EngineProbe) -> dict[str, float]:
    """Ended audits by result, once none is under way."""
    for _ in range(2000):
        jobs = tiered_of(probe.connector)._scheduler.jobs._jobs.values()
        if not any(isinstance(planned.job, AuditJob) for planned in jobs):
            break
        probe.core.step()
    return probe.counts().by_label("audits")


def retrained(rows: Any, strength: float) -> Any:
    """Other directions, of about the same length: a norm makes up for lengths."""
    return rows.float() + strength * rows.float().roll(1, dims=-1)


def build_retrained_model(folder: Path, tiny: Path, strength: float) -> Path:
    """The tiny model with other values in ``ROWS`` of its embedding."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(tiny, folder)
    file = folder / "model.safetensors"
    weights = load_file(file)
    rows = weights["model.embed_tokens.weight"]
    rows[ROWS] = retrained(rows[ROWS], strength).to(rows.dtype)
    save_file(weights, file, metadata={"format": "pt"})
    return folder


def build_other_layers(folder: Path, tiny: Path) -> Path:
    """The tiny model with other values in its first layer's projections, and nowhere else."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(tiny, folder)
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if "layers.0." in name and "_proj." in name:
            weights[name] = weight.flip(0).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
