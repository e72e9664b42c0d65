"""What tests of audits have done inside an engine's process, by :meth:`VllmInstance.call`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tests.support.engines.calls import tiered_of
from tests.support.engines.probe import EngineProbe

ROWS = slice(1000, 1064)
"""Rows of the embedding that are retrained."""
UNUSED_ROWS = slice(2000, 2004)
"""Rows that no prompt has."""


def audits(probe: EngineProbe) -> dict[str, float]:
    """Ended audits by result, once none is under way."""
    for _ in range(2000):
        if not tiered_of(probe.connector)._scheduler.auditor.num_open:
            break
        probe.core.step()
    return probe.counts().by_label("audits")


def retrain_rows(probe: EngineProbe, strength: float, rows: slice) -> None:
    """Change some rows of the embedding in every rank's memory; 0 is as they were loaded."""
    probe.on_ranks(_retrain, strength, rows)


def _retrain(worker: Any, strength: float, rows: slice) -> None:
    import torch

    weights = dict(worker.model_runner.get_model().named_parameters())
    (name,) = (name for name in weights if "embed_tokens" in name)
    found = weights[name][rows]
    as_loaded = worker.__dict__.setdefault("rows_as_loaded", found.clone())
    with torch.no_grad():
        found.copy_(retrained(as_loaded, strength))


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


def build_int8_model(folder: Path, model: Path) -> Path:
    """A model whose linear layers compute in 8 bits, as llm-compressor writes it: vLLM's build for
    CPUs hands their weights and scales to oneDNN, and keeps none of them."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder)
    file, found = folder / "model.safetensors", {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if "_proj." not in name:
            found[name] = weight
            continue
        scale = weight.float().abs().amax(dim=1, keepdim=True) / 127
        found[name] = (weight.float() / scale).round().to(torch.int8)
        found[f"{name}_scale"] = scale
    save_file(found, file, metadata={"format": "pt"})
    eight_bits = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**eight_bits, "strategy": "channel", "dynamic": False},
        "input_activations": {**eight_bits, "strategy": "token", "dynamic": True},
    }
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
