"""Every tool on every model and connector, one server at a time.

A server is started for a model and a connector; all tools measure it in turn; then it ends. The
next server has the machine to itself, and empty caches. The order of connectors changes. A failed
run, or a server that does not start, is a row with its reason.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from rich.progress import Progress

from benchmarks.field.run_tool import RunFailed, run_tool
from benchmarks.field.tool import Load, Target, Tool
from benchmarks.harness.ratios import in_turn
from benchmarks.harness.replay import CachedTokens, cached_tokens
from benchmarks.peers.connectors import reason
from tests.support.engines.api_server import SERVED_MODEL, ApiServer
from tests.support.processes import ServerError

_FAILURES = (RunFailed, ServerError, OSError, subprocess.TimeoutExpired)


@dataclass(frozen=True)
class Model:
    """``folder`` holds its weights and tokenizer."""

    name: str
    folder: Path
    load: Load


@dataclass(frozen=True)
class Cell:
    """One server of a round."""

    model: Model
    connector: str
    round: int


@dataclass(frozen=True)
class Run:
    """One tool's measurement of one server. ``from_gpu`` and ``from_connector``: shares of all
    prompt tokens that vLLM counted as hits there. ``failure``: why there are no figures."""

    tool: str
    cell: Cell
    seconds: float = 0.0
    figures: Mapping[str, float] = field(default_factory=dict)
    from_gpu: float = 0.0
    from_connector: float = 0.0
    failure: str | None = None


@dataclass(frozen=True)
class Bounds:
    """Seconds for one run of a tool, and for all runs, after which no run begins."""

    run_seconds: float
    all_seconds: float


@dataclass(frozen=True)
class Matrix:
    """``serve`` starts a cell's server and ends it. Output of the tools stays in ``outputs``."""

    tools: Sequence[Tool]
    models: Sequence[Model]
    connectors: Sequence[str]
    serve: Callable[[Cell], AbstractContextManager[ApiServer]]
    outputs: Path
    bounds: Bounds
    clock: Callable[[], float] = time.monotonic

    def cells(self, rounds: int) -> Iterator[Cell]:
        """All servers, in their order."""
        for number in range(rounds):
            for place, model in enumerate(self.models):
                for connector in in_turn(self.connectors, number + place):
                    yield Cell(model, connector, number)

    def run(self, rounds: int, progress: Progress) -> list[Run]:
        """Each tool once on each of the :meth:`cells`."""
        cells = list(self.cells(rounds))
        until = self.clock() + self.bounds.all_seconds
        task = progress.add_task("", total=len(cells) * len(self.tools))
        runs: list[Run] = []
        for cell in cells:
            title = f"{cell.model.name}, {cell.connector}"
            progress.update(task, description=f"{title}: starting a server")
            for run in self._on_one_server(cell, until):
                runs.append(run)
                progress.update(task, description=f"{title}: after {run.tool}", advance=1)
        progress.remove_task(task)
        return runs

    def _on_one_server(self, cell: Cell, until: float) -> Iterator[Run]:
        num_done = 0
        try:
            if self.clock() > until:
                raise RunFailed("no time was left")
            with self.serve(cell) as server:
                for tool in self.tools:
                    run = self._measure(tool, cell, server, until)
                    num_done += 1
                    yield run
        except _FAILURES as error:
            for tool in self.tools[num_done:]:
                yield Run(tool.name, cell, failure=reason(error))

    def _measure(self, tool: Tool, cell: Cell, server: ApiServer, until: float) -> Run:
        folder = self.outputs / f"{cell.model.name}-{cell.connector}-{tool.name}-{cell.round}"
        target = Target(server.address, SERVED_MODEL, cell.model.folder, cell.model.load, folder)
        started = self.clock()
        try:
            before = cached_tokens(server)
            figures = run_tool(tool, target, min(self.bounds.run_seconds, until - started))
            cached = cached_tokens(server).since(before)
        except _FAILURES as error:
            return Run(tool.name, cell, self.clock() - started, failure=reason(error))
        return Run(tool.name, cell, self.clock() - started, figures, *_parts(cached))


def _parts(cached: CachedTokens) -> tuple[float, float]:
    total = max(1, cached.prompt)
    return cached.device / total, (cached.host + cached.external) / total
