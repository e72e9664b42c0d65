"""The engines of a benchmark, which share one model."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.engine_timings import come_to_rest
from examples.tiny_model import DEMO_SHAPE, LLAMA_8B, ModelShape, build_tiny_model
from tests.support.engines.api_server import ApiServer, started_api
from tests.support.engines.instance import VllmInstance

# Random weights. "large" means large for two cores.
MODELS = {
    "tiny": DEMO_SHAPE,
    "large": ModelShape(
        num_layers=12,
        hidden_size=1024,
        intermediate_size=2816,
        num_heads=16,
        num_kv_heads=4,
        head_dim=64,
    ),
    "8b": LLAMA_8B,
}


class Engines(contextlib.ExitStack):
    """Engines of one model, with logs in ``folder``. All end on exit. ``model``: a folder with a
    trained model; without it, one of ``shape`` is made."""

    def __init__(self, shape: ModelShape = DEMO_SHAPE, model: Path | None = None) -> None:
        super().__init__()
        # A folder of its own: if files beside the weights change, the weights may have been
        # replaced while they load.
        self.folder, beside = (
            Path(
                self.enter_context(tempfile.TemporaryDirectory(prefix=f"lmcache-connector-{name}-"))
            )
            for name in ("benchmark", "model")
        )
        self.options = {"load_format": "dummy"} if shape is LLAMA_8B else {}
        self.model = model or build_tiny_model(beside / "model", shape, weights=not self.options)

    def instance(
        self, name: str, transfer: dict[str, Any] | None = None, **options: Any
    ) -> VllmInstance:
        """An instance, not started yet, for engines that end before the others.

        ``options`` are those of :class:`~tests.support.engines.instance.VllmInstance`.
        """
        options = self.options | options
        return VllmInstance(self.model, transfer, self.folder / f"{name}.log", **options)

    def start(
        self, name: str, transfer: dict[str, Any] | None = None, **options: Any
    ) -> VllmInstance:
        """A started instance. Raises ``InstanceError`` if it does not start."""
        return self.enter_context(self.instance(name, transfer, **options))

    def serve(self, name: str, transfer: dict[str, Any] | None, *arguments: str) -> ApiServer:
        """vLLM's OpenAI server with this model, starting up."""
        log = self.folder / f"{name}.log"
        return self.enter_context(started_api(self.model, transfer, log, *arguments))


@dataclass(frozen=True)
class Way:
    """A way to run vLLM: an engine's name, and the context ``around`` a measurement in it.

    Two processes differ by a few per cent whatever they run. So the connector's cost is measured in
    one engine, whose connector is taken out for a moment: ``around`` is :func:`without_connector`,
    or :func:`with_empty_connector`.
    """

    engine: str
    around: Callable[..., Any] | None = None

    def measure(
        self, engines: Mapping[str, VllmInstance], function: Callable[..., Any], *args: Any
    ) -> Any:
        """``function(probe, *args)`` in the engine, which then comes to rest."""
        engine = engines[self.engine]
        if self.around is None:
            measured = engine.call(function, *args)
        else:
            measured = engine.call(self.around, function, *args)
        engine.call(come_to_rest)
        return measured
