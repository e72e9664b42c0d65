"""Servers in processes of their own, which end with all they started when their user does."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

_STOP_SECONDS = 20.0
_LOG_TAIL_CHARACTERS = 4000
_EXCEPTION = re.compile(r"\b\w+(Error|Exception)\b: ")


class ServerError(RuntimeError):
    """A server does not start. The first line of the message says why; its log's end follows."""


@contextmanager
def running_process(
    command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Start ``command``, whose output goes to ``log``. ``environment``: added to this process's."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | dict(environment or {}),
            start_new_session=True,
        )
    try:
        yield process
    finally:
        end_session(process, signal.SIGTERM)


def end_session(process: subprocess.Popen[bytes], first: signal.Signals) -> None:
    """Send ``first`` and wait for a clean exit; then kill whatever the process's session holds."""
    if process.poll() is None:
        process.send_signal(first)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_until_healthy(
    process: subprocess.Popen[bytes], url: str, seconds: float, log: Path
) -> None:
    """Wait until ``url`` answers. Raises :class:`ServerError` if the server ends or is too slow."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and process.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=1).close()
            return
        except OSError:  # not there yet, or it answers that it is not ready
            time.sleep(0.2)
    text = log.read_text(errors="replace")
    raise ServerError(f"{_first_error(text)}\n{text[-_LOG_TAIL_CHARACTERS:]}")


def _first_error(log: str) -> str:
    """The first line of a log that names an exception: the others follow from it."""
    lines = [line.strip() for line in log.splitlines()]
    errors = [line for line in lines if _EXCEPTION.search(line) and "WARNING" not in line]
    return (errors or lines[-1:] or ["it says nothing"])[0][-300:]


def open_files() -> list[str]:
    """What this process's descriptors are open for. Other threads may close some meanwhile."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(str(link.readlink()))
    return found
