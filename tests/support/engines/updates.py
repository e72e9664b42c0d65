"""How tests change weights inside an engine's process, by :meth:`VllmInstance.call`."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from tests.support.engines.probe import EngineProbe


def move_weights(probe: EngineProbe, strength: float, part: str = "") -> int:
    """Move all weights with ``part`` in their name by ``strength`` of their spread, in place, as a
    trainer on the same host may: the connector is not told. Returns how many elements changed."""
    return sum(probe.on_ranks(_move, strength, part))


def _move(worker: Any, strength: float, part: str) -> int:
    import torch

    changed = 0
    with torch.no_grad():
        for seed, (name, weight) in enumerate(_model(worker).named_parameters()):
            if part not in name or weight.dim() < 2:
                continue
            noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
            moved = weight + (strength * weight.float().std() * noise).to(weight.dtype)
            changed += int((weight != moved).sum())
            weight.copy_(moved)
    return changed


def flip_one_bit(probe: EngineProbe) -> None:
    """Of one element, of one weight."""
    probe.on_ranks(_flip)


def _flip(worker: Any) -> None:
    import torch

    weight = dict(_model(worker).named_parameters())["model.layers.1.input_layernorm.weight"]
    weight.data.view(torch.int16)[17] ^= 1


def load_rows(probe: EngineProbe, strength: float) -> None:
    """Hand the model other weights of its embedding, as a worker extension of a trainer does."""
    probe.on_ranks(_load_rows, strength)


def _load_rows(worker: Any, strength: float) -> None:
    model = _model(worker)
    weight = dict(model.named_parameters())["model.embed_tokens.weight"]
    model.load_weights([("model.embed_tokens.weight", weight.detach() * (1 + strength))])


def reload_from(probe: EngineProbe, folder: Path) -> None:
    """vLLM's own reload from disk."""
    probe.core.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})


def weights_name(probe: EngineProbe) -> str:
    """After as many requests as it takes the ranks to read them."""
    from tests.support.engines.calls import tiered_of

    for _ in range(20):
        probe.serve([5, 6, 7], 1)
        if name := tiered_of(probe.connector)._scheduler.book.weights.name:
            return str(name)
    raise AssertionError("the weights have no name")


def live_on_another_host() -> None:
    """For ``prepare``: nothing is kept here of what others have found out."""
    import tempfile

    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="another-host-")


def replace_files_after_loading() -> None:
    """For ``prepare``: another checkpoint comes to FOLDER, from OTHER, when this one is loaded."""
    from vllm.v1.worker.cpu_worker import CPUWorker

    load = CPUWorker.load_model

    def load_and_replace(worker: Any, *args: Any, **kwargs: Any) -> None:
        load(worker, *args, **kwargs)
        folder, other = Path(os.environ["FOLDER"]), Path(os.environ["OTHER"])
        shutil.copy(other / "model.safetensors", folder / "arriving")
        (folder / "arriving").replace(folder / "model.safetensors")

    CPUWorker.load_model = load_and_replace


def _model(worker: Any) -> Any:
    return worker.model_runner.get_model()
