"""The matrix of tools, models and connectors: who takes turns, what fails, and what is compared."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress

from benchmarks.field.matrix import Bounds, Cell, Matrix, Model, Run
from benchmarks.field.table import MP, NONE, OURS
from benchmarks.field.tool import Load, Target
from tests.support.engines.api_server import ApiServer

LOAD = Load(4096, 3072, 1024, 10, 16)
TRAINED = Model("trained", Path("trained"), LOAD)
TINY = Model("tiny", Path("tiny"), LOAD)


class Server(ApiServer):
    """Of which only the metrics are there. Each run that has left a folder in ``outputs`` asked
    1,000 tokens: 250 came from the paged cache and 500 from a connector."""

    def __init__(self, outputs: Path) -> None:
        self.address = "127.0.0.1:1"
        self._outputs = outputs

    def metrics(self) -> str:
        runs = len(list(self._outputs.iterdir()))
        cached = "vllm:prompt_tokens_cached_by_source_total{source="
        return (
            f"vllm:prompt_tokens_total {1000 * runs}\n"
            f'{cached}"device"}} {250 * runs}\n'
            f'{cached}"host"}} {500 * runs}\n'
        )


@dataclass
class Script:
    """A tool that is a line of Python. It is told where its result belongs."""

    code: str = "import json, sys; json.dump({'ttft_p50_ms': 10.0}, open(sys.argv[1], 'w'))"
    name: str = "script"
    known: str | None = "1.0"

    def version(self) -> str | None:
        return self.known

    def command(self, target: Target) -> list[str]:
        return [sys.executable, "-c", self.code, str(target.folder / "result.json")]

    def figures(self, folder: Path) -> dict[str, float]:
        found: dict[str, float] = json.loads((folder / "result.json").read_text())
        return found


def matrix(folder: Path, *tools: Script) -> Matrix:
    @contextmanager
    def served(cell: Cell) -> Iterator[ApiServer]:
        yield Server(folder)

    bounds = Bounds(run_seconds=60, all_seconds=3600)
    return Matrix(tools, [TRAINED, TINY], [NONE, OURS, MP], served, folder, bounds)


def run(one: Matrix, rounds: int = 1) -> list[Run]:
    return one.run(rounds, Progress(console=Console(quiet=True)))


def test_a_run_is_the_tools_figures_and_what_the_server_found_cached(tmp_path: Path) -> None:
    (one, *others) = run(matrix(tmp_path, Script()))
    assert one.figures == {"ttft_p50_ms": 10.0}
    assert (one.from_gpu, one.from_connector) == (0.25, 0.5)
    assert one.failure is None
    assert len(others) == 5
    assert (tmp_path / "trained-vllm-script-0" / "result.json").exists(), "its output is kept"


@pytest.mark.parametrize(
    ("tool", "failure"),
    [
        (Script(known=None), "it is not installed: make field"),
        (Script("print('first'); raise SystemExit('it went wrong')"), "exit status 1: it went"),
        (Script("pass"), "no result: FileNotFoundError"),
        (Script("import sys; open(sys.argv[1], 'w').write('[')"), "no result: JSONDecodeError"),
    ],
)
def test_a_run_that_fails_is_a_row_and_the_next_one_begins(
    tmp_path: Path, tool: Script, failure: str
) -> None:
    found = run(matrix(tmp_path, tool, Script(name="next")))
    assert [one.tool for one in found] == ["script", "next"] * 6
    assert all((one.failure or "").startswith(failure) for one in found[::2])
    assert all(one.failure is None and one.figures for one in found[1::2])
