"""One run of a tool within a time limit: its figures, or the reason for their absence."""

from __future__ import annotations

import shutil
import subprocess

from benchmarks.field.tool import Target, Tool
from tests.support.processes import running_process

_NO_RESULT = (OSError, ValueError, KeyError, TypeError, AttributeError)
_LOG = "output.txt"
_PLAIN = {"NO_COLOR": "1"}


class RunFailed(Exception):
    """The run has no figures, for the reason in the message."""


def run_tool(tool: Tool, target: Target, seconds: float) -> dict[str, float]:
    """The tool's figures. Its output stays in ``target.folder``, which is emptied before.

    Raises :class:`RunFailed`.
    """
    if tool.version() is None:
        raise RunFailed("it is not installed: make field")
    shutil.rmtree(target.folder, ignore_errors=True)
    target.folder.mkdir(parents=True)
    log = target.folder / _LOG
    try:
        with running_process(tool.command(target), log, _PLAIN) as process:
            status = process.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        raise RunFailed(f"no end after {seconds:.0f} s") from None
    except (OSError, ValueError) as error:
        raise RunFailed(f"it does not start: {error}") from error
    if status:
        raise RunFailed(f"exit status {status}: {_last_line(log.read_text(errors='replace'))}")
    try:
        return tool.figures(target.folder)
    except _NO_RESULT as error:
        raise RunFailed(f"no result: {type(error).__name__}: {error}") from error


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][-200:] if lines else "it says nothing"
