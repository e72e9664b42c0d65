"""A command's output as in a terminal: an SVG."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from io import StringIO

from rich.console import Console
from rich.text import Text

_FONT = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def record(
    shown: str,
    command: Sequence[str],
    columns: int,
    timeout: float = 600,
    last_lines: int | None = None,
) -> str:
    """Runs ``command`` and draws it as if ``shown`` had been typed.

    ``last_lines``: the number of lines to draw; all by default. Raises
    ``subprocess.CalledProcessError`` if it fails, ``TimeoutExpired`` after ``timeout`` seconds.
    """
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
        timeout=timeout,
        env=os.environ | {"COLUMNS": str(columns)},
    )
    lines = done.stdout.splitlines()
    return draw(shown, lines[-last_lines:] if last_lines else lines, columns)


def draw(shown: str, lines: Sequence[str], columns: int) -> str:
    """An SVG of a terminal in which ``shown`` was typed and answered with ``lines``.

    Its fonts are the reader's own: a picture in documentation downloads nothing.
    """
    console = Console(record=True, width=columns, file=StringIO())
    console.print(Text.assemble(("$ ", "green"), (shown, "bold")))
    for line in lines:
        console.print(Text.from_ansi(line), overflow="fold")
    return _FONT.sub("", console.export_svg(title="", unique_id="terminal"))
