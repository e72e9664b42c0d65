"""How tests change weights inside an engine's process, and have them audited, by
:meth:`VllmInstance.call`."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

from lmcache_connector.plans import AuditJob
from tests.support.engines.calls import tiered_of
from tests.support.engines.probe import EngineProbe


def move_weights(
    probe: EngineProbe, strength: float, part: str = "", rank: int | None = None
) -> int:
    """Move all weights with ``part`` in their name by ``strength`` of their spread, in place, as a
    trainer on the same host may: the connector is not told. On one rank or all. Returns how many
    elements changed."""
    return sum(probe.on_ranks(_move, strength, part, rank))


def _move(worker: Any, strength: float, part: str, rank: int | None) -> int:
    import torch

    if rank not in (None, worker.rank):
        return 0
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


def flip_one_bit_of_the_drafter(probe: EngineProbe) -> None:
    """Of one element of a weight that the model does not have."""
    probe.on_ranks(_flip_of_drafter)


def _flip(worker: Any) -> None:
    _flip_bit(dict(_model(worker).named_parameters())["model.layers.1.input_layernorm.weight"])


def _flip_of_drafter(worker: Any) -> None:
    shared = {id(weight) for weight in _model(worker).parameters()}
    runner = worker.model_runner
    drafter = runner.speculator if hasattr(runner, "speculator") else runner.drafter
    own = [each for each in drafter.model.parameters() if id(each) not in shared]
    _flip_bit(next(weight for weight in own if weight.numel()))


def _flip_bit(weight: Any) -> None:
    import torch

    weight.data.view(torch.int16).view(-1)[17] ^= 1


def load_rows(probe: EngineProbe, strength: float) -> None:
    """Hand the model other weights of its embedding, as a worker extension of a trainer does."""
    probe.on_ranks(_load_rows, strength)


def _load_rows(worker: Any, strength: float) -> None:
    model = _model(worker)
    weight = dict(model.named_parameters())["model.embed_tokens.weight"]
    model.load_weights([("model.embed_tokens.weight", weight.detach() * (1 + strength))])


def weights_name(probe: EngineProbe) -> str:
    """Their name, after as many requests as the ranks need to read them."""
    from tests.support.engines.calls import tiered_of

    until = time.monotonic() + 60
    while time.monotonic() < until:
        probe.serve([5, 6, 7], 1)
        if name := tiered_of(probe.connector)._scheduler.book.weights.name:
            return str(name)
    raise AssertionError("the weights have no name")


def update_under_load(probe: EngineProbe, prompts: list[list[int]], strength: float) -> None:
    """Move the weights between two steps of running requests, and reset at once, as a trainer does
    that does not wait for requests. Then serve them to their end."""
    names = [probe.add(prompt, 20) for prompt in prompts]
    while len(probe.scheduler.running) < len(prompts):
        probe.engine.step()
    move_weights(probe, strength)
    assert probe.core.reset_prefix_cache(reset_running_requests=True)
    probe.finish(names, time.perf_counter())


def update_during_a_load(probe: EngineProbe, prompt: list[int], strength: float) -> int:
    """Move the weights and reset while the KV of a request comes from Redis: vLLM says no. Then
    serve it to its end, and reset. Returns how many tokens were on the way."""
    before = probe.external_hit_tokens()
    names = [probe.add(prompt)]
    until = time.monotonic() + 30
    while not (loaded := probe.external_hit_tokens() - before):
        assert time.monotonic() < until, "nothing is loaded"
        probe.engine.step()
    move_weights(probe, strength)
    assert not probe.engine.reset_prefix_cache(), "the load has ended already"
    probe.finish(names, time.perf_counter())
    probe.reset_prefix_cache()
    return loaded


def accept_updates() -> None:
    """For ``prepare``: two backends of weight updates. "test" leaves the writing to the test,
    "folder" has vLLM load a checkpoint layer by layer, as its own backends do."""
    from safetensors.torch import load_file
    from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
    from vllm.model_executor.model_loader import reload

    nothing: dict[str, Any] = {
        name: lambda self, *_: None
        for name in (*WeightTransferEngine.__abstractmethods__, "update_weights")
    }
    in_layers: dict[str, Any] = {
        "start_weight_update": lambda self: reload.initialize_layerwise_reload(self.model),
        "update_weights": lambda self, info: self.model.load_weights(
            load_file(info["file"]).items()
        ),
        "finish_weight_update": lambda self: reload.finalize_layerwise_reload(
            self.model, self.model_config
        ),
    }
    for name, calls in {"test": nothing, "folder": nothing | in_layers}.items():
        backend = type("Backend", (WeightTransferEngine,), calls)
        WeightTransferEngineFactory.register_engine(name, backend)


def update_from(probe: EngineProbe, folder: Path) -> None:
    """vLLM's calls of a trainer, with the backend "folder"."""
    probe.core.collective_rpc("start_weight_update")
    file = str(folder / "model.safetensors")
    probe.core.collective_rpc("update_weights", kwargs={"update_info": {"file": file}})
    probe.core.collective_rpc("finish_weight_update")


def live_on_another_host() -> None:
    """For ``prepare``: an empty cache folder, as on a host where no other engine has run."""
    import tempfile

    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="another-host-")


def _model(worker: Any) -> Any:
    return worker.model_runner.get_model()


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
