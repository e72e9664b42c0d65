"""The engines of a benchmark: one model, and all that run it."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.engine_timings import come_to_rest
from examples.tiny_model import DEMO_SHAPE, ModelShape, build_tiny_model
from tests.support.engines.api_server import ApiServer, started_api
from tests.support.engines.instance import VllmInstance

# With random weights. "large" is large for two cores.
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
}


class Engines(contextlib.ExitStack):
    """Engines of one model, their logs in ``folder``. All are gone on exit. ``model``: a folder
    with a trained one; without it, one of ``shape`` is made."""

    def __init__(self, shape: ModelShape = DEMO_SHAPE, model: Path | None = None) -> None:
        super().__init__()
        # Apart: weights beside which files come and go may have been replaced while they load.
        self.folder, beside = (
            Path(
                self.enter_context(tempfile.TemporaryDirectory(prefix=f"lmcache-connector-{name}-"))
            )
            for name in ("benchmark", "model")
        )
        self.model = model or build_tiny_model(beside / "model", shape)

    def instance(
        self, name: str, transfer: dict[str, Any] | None = None, **options: Any
    ) -> VllmInstance:
        """An instance that is not started yet, for those that leave before the others.

        ``options`` are those of :class:`~tests.support.engines.instance.VllmInstance`.
        """
        return VllmInstance(self.model, transfer, self.folder / f"{name}.log", **options)

    def start(
        self, name: str, transfer: dict[str, Any] | None = None, **options: Any
    ) -> VllmInstance:
        """An instance that serves. Raises ``InstanceError`` if it does not start."""
        return self.enter_context(self.instance(name, transfer, **options))

    def serve(self, name: str, transfer: dict[str, Any] | None, *arguments: str) -> ApiServer:
        """vLLM's OpenAI server with this model, just started."""
        log = self.folder / f"{name}.log"
        return self.enter_context(started_api(self.model, transfer, log, *arguments))


@dataclass(frozen=True)
class Way:
    """A way to run vLLM: the name of an engine, and what runs ``around`` a measurement in it.

    Two processes differ by a few per cent whatever they run. What a connector costs is therefore
    measured against the same engine, whose connector is taken out for a moment: ``around`` is
    :func:`without_connector`, or :func:`with_empty_connector`.
    """

    engine: str
    around: Callable[..., Any] | None = None

    def measure(
        self, engines: Mapping[str, VllmInstance], function: Callable[..., Any], *args: Any
    ) -> Any:
        """``function(probe, *args)`` in the engine, which comes to rest afterwards."""
        engine = engines[self.engine]
        if self.around is None:
            measured = engine.call(function, *args)
        else:
            measured = engine.call(self.around, function, *args)
        engine.call(come_to_rest)
        return measured
