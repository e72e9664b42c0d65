"""The example programs, run one after the other on one Valkey."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_engine import served
from tests.support import ROOT
from tests.support.redis.servers import Server, free_port

NUM_WORDS = 3000  # as many tokens: 23 full chunks of 128
FULL_CHUNKS_TOKENS = 2944
SMALL = ("--cpu-gib", "1", "--words", str(NUM_WORDS))


def run_example(name: str, *arguments: str) -> str:
    """Its standard output. Fails with the example's log."""
    command = [sys.executable, str(ROOT / "examples" / name), *arguments]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def tokens(output: str, name: str) -> tuple[int, int]:
    """The hit tokens and prompt tokens that an example printed for one request."""
    found = re.search(rf"^{name}: (\d+) of (\d+) prompt tokens", output, re.MULTILINE)
    assert found is not None, output
    return int(found[1]), int(found[2])


@pytest.mark.soak  # two processes of half a minute; test_demo and test_serve run the paths
@pytest.mark.engine
@pytest.mark.timeout(900)
def test_a_server_loads_an_offline_runs_chunks(valkey: Server, tiny_model: Path) -> None:
    """vLLM's own prefix cache is reset offline and off in the server: all hits are ours."""
    sharing = (str(tiny_model), "--redis-url", valkey.url, *SMALL)

    offline = run_example("offline.py", *sharing, "--kv-cache-gib", "0.5")
    assert tokens(offline, "first") == (0, NUM_WORDS)
    # One chunk of the first hit of each kind is audited.
    assert tokens(offline, "again") == (FULL_CHUNKS_TOKENS - 128, NUM_WORDS)

    vllm_options = ("--enforce-eager", "--kv-cache-memory-bytes", str(1 << 29))
    serve = run_example("serve.py", *sharing, "--port", str(free_port()), *vllm_options)
    assert tokens(serve, "first") == (FULL_CHUNKS_TOKENS - 128, NUM_WORDS)
    assert tokens(serve, "again") == (FULL_CHUNKS_TOKENS, NUM_WORDS)


@pytest.mark.soak  # three processes, as tests/transformers/test_generate.py has them
@pytest.mark.timeout(600)
def test_generate_hits_a_document_here_and_elsewhere(valkey: Server, tiny_model: Path) -> None:
    sharing = ("--redis-url", valkey.url, "--compute-or-load", "always")
    output = run_example("transformers_generate.py", str(tiny_model), *sharing, *SMALL)
    assert tokens(output, "first") == (0, NUM_WORDS + 4)
    assert tokens(output, "second") == (FULL_CHUNKS_TOKENS, NUM_WORDS + 4)
    assert tokens(output, "elsewhere") == (FULL_CHUNKS_TOKENS, NUM_WORDS + 3)


@pytest.mark.soak  # two servers and a proxy
@pytest.mark.engine
@pytest.mark.timeout(600)
def test_the_proxy_transfers_a_prompt() -> None:
    command = [sys.executable, "-m", "examples.disaggregated.run"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tokens of KV" in done.stdout, done.stdout


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("examples/serve.py m --port {taken}", "cannot listen on port {taken}: Address already"),
        ("examples/chat.py http://u:hunter2@h", "leave user and password out of the address"),
        ("examples/chat.py localhost:{free}", "Is the server up, and is this its address?"),
        ("examples/warm.py w localhost:{free}", "localhost:{free}: "),
        ("examples/warm.py w localhost:{taken}/", "this is no answer of vLLM's API"),
        ("examples/warm.py w http://u:hunter2@h:x", "leave user and password out of the address"),
        ("examples/warm.py w h --concurrency 0", "--concurrency must be at least 1"),
        ("examples/warm.py none h", "cannot read none: No such file or directory"),
        ("examples/warm.py empty h", "empty has no prompts"),
        ("examples/warm.py cut.jsonl h", "cut.jsonl: line 2 is not a JSON object"),
        ("examples/warm.py list.jsonl h", "list.jsonl: line 1 is not a JSON object"),
        ("-m examples.disaggregated.proxy --port {taken}", "127.0.0.1:{taken}: Address already in"),
        ("-m examples.disaggregated.proxy --secret env:NO", "--secret: environment variable NO"),
        ("examples/observability/render.py http://localhost:{free} x.png", "running Prometheus?"),
        ("examples/observability/render.py http://u:hunter2@h:x x.png", "leave user and password"),
    ],
)
def test_a_users_mistake_is_a_sentence(command: str, words: str, tmp_path: Path) -> None:
    files = {"w": "w", "empty": "\n", "cut.jsonl": '{"prompt": ""}\n{"prompt":', "list.jsonl": "[]"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with served(lambda: b"healthy") as url:
        ports = {"taken": url.rpartition(":")[2], "free": free_port()}
        line = command.replace("examples/", f"{ROOT}/examples/").format(**ports).split()
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        options: dict[str, Any] = {"cwd": tmp_path, "capture_output": True, "env": env}
        done = subprocess.run(
            [sys.executable, *line], text=True, timeout=60, check=False, **options
        )
    assert done.returncode in (1, 2)
    assert words.format(**ports) in done.stderr
    assert "Traceback" not in done.stderr
    assert "hunter2" not in done.stdout + done.stderr
