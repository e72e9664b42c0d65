"""``warm`` against a server that answers as vLLM's API does."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support.command_line import Cli

KEY = "a key of the API"
STRANGE = {
    "nothing": "",
    "a list": "[]",
    "deep": "[" * 100_000,
    "infinite": '{"usage": {"prompt_tokens": Infinity}}',
    "words": '{"usage": {"prompt_tokens": "7"}}',
}
"""What is answered to a prompt."""


class Api:
    """Counts ten prompt tokens for each request: vLLM has 1, memory 2, Redis 4."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.most_at_once = 0
        self.is_silent = threading.Event()
        self.closed = threading.Event()
        self._now = 0
        self._lock = threading.Lock()
        api = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(200, api.metrics() if self.path == "/metrics" else api.models())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.headers["Authorization"] != f"Bearer {KEY}":
                    self._answer(401, json.dumps({"error": {"message": "who are you?"}}))
                    return
                with api._lock:
                    api._now += 1
                    api.most_at_once = max(api.most_at_once, api._now)
                    api.asked.append((self.path, body))
                threading.Event().wait(0.01)
                with api._lock:
                    api._now -= 1
                if body.get("prompt") == "never answered":
                    api.is_silent.set()
                    api.closed.wait(60.0)
                elif body.get("prompt") == "garbage":
                    self.wfile.write(b"-ERR this is no HTTP\r\n")
                elif str(body.get("prompt")) in STRANGE:
                    self._answer(200, STRANGE[body["prompt"]])
                elif body.get("prompt") == "too long":
                    self._answer(400, json.dumps({"error": {"message": "it is too long"}}))
                else:
                    self._answer(200, json.dumps({"usage": {"prompt_tokens": 10}}))

            def _answer(self, code: int, text: str) -> None:
                self.send_response(code)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: Any) -> None:
                """Quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"127.0.0.1:{self._server.server_port}"

    def models(self) -> str:
        return json.dumps({"data": [{"id": "first"}, {"id": "second"}]})

    def metrics(self) -> str:
        done = sum(body.get("prompt") != "too long" for _, body in self.asked)
        counts = {
            "vllm:prompt_tokens": 100 + 10 * done,
            "vllm:prefix_cache_hits": 50 + done,
            'vllm:lmcache_hit_tokens_total{tier="cpu"}': 2 * done,
            'vllm:lmcache_hit_tokens_total{tier="redis"}': 4 * done,
            'vllm:lmcache_queried_tokens_total{model_name="first"}': 9 * done,
        }
        lines = []
        for name, value in counts.items():
            bare = name.partition("{")[0].removesuffix("_total")
            lines.append(f"# TYPE {bare} counter")
            lines.append(f"{name if '{' in name else name + '_total'} {value}")
        return "\n".join(dict.fromkeys(lines)) + "\n"

    def close(self) -> None:
        self.closed.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    monkeypatch.setenv("API_KEY", KEY)
    api = Api()
    yield api
    api.close()


def warm(cli: Cli, api: Api, file: Path, *more: str) -> Any:
    return cli("warm", str(file), "--engine", api.url, "--api-key", "env:API_KEY", *more)


def test_lines_of_text_are_asked_a_few_at_a_time(cli: Cli, api: Api, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(f"prompt {i}" for i in range(12)) + "\n\n", encoding="utf-8")
    found = warm(cli, api, file, "--json", "--concurrency", "3")
    assert found.code == 0
    assert found.document["tokens"] == {
        "prompt": 120,
        "vllm": 12,
        "cpu": 24,
        "redis": 48,
        "computed": 36,
        "fetched_ahead_bytes": 0,
    }
    assert (found.document["prompts"], found.document["failed"]) == (12, 0)
    assert {path for path, _ in api.asked} == {"/v1/completions"}
    assert {body["prompt"] for _, body in api.asked} == {f"prompt {i}" for i in range(12)}
    assert all(body["max_tokens"] == 1 and body["model"] == "first" for _, body in api.asked)
    assert 1 < api.most_at_once <= 3


def test_lines_of_json_are_texts_token_ids_and_chats(cli: Cli, api: Api, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 99}
    lines = ["a text", [1, 2, 3], {"prompt": [4], "cache_salt": "s"}, chat]
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    found = warm(cli, api, file, "--concurrency", "1", "--model", "second")
    assert found.code == 0
    assert "4 of 4 prompts" in found.out
    paths, bodies = zip(*api.asked, strict=True)
    assert paths == (*["/v1/completions"] * 3, "/v1/chat/completions")
    assert [body.get("prompt") for body in bodies] == ["a text", [1, 2, 3], [4], None]
    assert bodies[2]["cache_salt"] == "s"
    assert bodies[3]["messages"] == chat["messages"]
    assert {body["max_tokens"] for body in bodies} == {1}
    assert {body["model"] for body in bodies} == {"second"}


def test_a_prompt_that_fails_is_named_and_the_others_go_on(
    cli: Cli, api: Api, tmp_path: Path
) -> None:
    file = tmp_path / "prompts"
    file.write_text("one\ntoo long\nthree\n", encoding="utf-8")
    found = warm(cli, api, file, "--json")
    assert found.code == 1
    assert found.document["errors"] == [{"line": 2, "error": "400 it is too long"}]
    assert len(api.asked) == 3
    assert "line 2: 400 it is too long" in warm(cli, api, file).err


def test_an_answer_that_makes_no_sense_is_one_prompt_that_fails(
    cli: Cli, api: Api, tmp_path: Path
) -> None:
    file = tmp_path / "prompts"
    file.write_text("\n".join([*STRANGE, "garbage", "fine"]), encoding="utf-8")
    found = warm(cli, api, file, "--json")
    assert found.code == 1
    assert (found.document["prompts"], found.document["failed"]) == (7, 6)
    assert {each["line"] for each in found.document["errors"]} == set(range(1, 7))
    assert all(each["error"] for each in found.document["errors"])


def test_an_interrupt_waits_for_no_answer(api: Api, tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text("never answered\n" * 3, encoding="utf-8")
    # Under nohup tests ignore SIGINT, and so would their children.
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += "from lmcache_connector.cli.app import main; main()"
    command = [sys.executable, "-c", code, "warm", str(file), "--engine", api.url]
    command += ["--api-key", "env:API_KEY"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert api.is_silent.wait(60.0)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=20.0)
        finally:
            process.kill()
    assert process.returncode == 130
    assert "Traceback" not in err


def test_a_line_that_is_no_prompt_is_told_without_waiting_for_answers(
    cli: Cli, api: Api, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('"never answered"\n7\n', encoding="utf-8")
    begun = time.monotonic()
    found = warm(cli, api, file)
    assert (found.code, time.monotonic() - begun < 30.0) == (2, True)
    assert "line 2" in found.err


def test_of_a_logged_request_only_the_prompt_counts(cli: Cli, api: Api, tmp_path: Path) -> None:
    """What it says of the answer would make that long, or the request fail."""
    file = tmp_path / "logged.jsonl"
    logged = {"max_completion_tokens": 4096, "stream": True, "stream_options": {"x": 1}, "n": 8}
    logged |= {"min_tokens": 50, "prompt_logprobs": 1, "logprobs": True, "top_logprobs": 5}
    chat = {"messages": [{"role": "user", "content": "hello"}], "tools": [], **logged}
    text = {"prompt": "a", "echo": True, "best_of": 8, "use_beam_search": True, **logged}
    file.write_text("\n".join(map(json.dumps, (chat, text))), encoding="utf-8")
    assert warm(cli, api, file, "--concurrency", "1").code == 0
    fixed = {"model": "first", "temperature": 0, "max_tokens": 1, "stream": False, "n": 1}
    assert [body for _, body in api.asked] == [
        {"messages": chat["messages"], "tools": [], **fixed},
        {"prompt": "a", **fixed},
    ]


def test_an_address_that_speaks_no_http_is_said(cli: Cli, tmp_path: Path) -> None:
    """Such as that of a Redis server."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            peer = server.accept()[0]
            with peer:
                peer.recv(4096)
                peer.sendall(b"-ERR unknown command\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        found = cli("warm", str(tmp_path), "--engine", f"127.0.0.1:{server.getsockname()[1]}")
        thread.join(10.0)
    assert found.code == 3
    assert "is this its API port?" in found.err


def test_a_wrong_key_is_not_shown(cli: Cli, api: Api, tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text("one\n", encoding="utf-8")
    found = cli("warm", str(file), "--engine", api.url, "--api-key", "a wrong secret")
    assert found.code == 1
    assert "401 who are you?" in found.err
    assert "a wrong secret" not in found.out + found.err
    assert "NO_SUCH" in cli("warm", str(file), "--engine", api.url, "--api-key", "env:NO_SUCH").err


@pytest.mark.parametrize(
    "line",
    [
        *("{", "7", '""', "[" * 100_000, '{"prompt": [-1]}', '{"prompt": [true]}'),
        *('{"messages": []}', '{"other": 1}', '{"prompt": "a", "messages": [1]}'),
    ],
)
def test_a_line_that_is_no_prompt_is_named(cli: Cli, api: Api, tmp_path: Path, line: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'"fine"\n{line}\n', encoding="utf-8")
    found = warm(cli, api, file)
    assert found.code == 2
    assert "line 2" in found.err


def test_what_cannot_be_reached_or_read_is_said(cli: Cli, api: Api, tmp_path: Path) -> None:
    assert warm(cli, api, tmp_path / "none").code == 2
    assert warm(cli, api, tmp_path).code == 2
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    assert "is not UTF-8" in warm(cli, api, tmp_path / "binary").err
    empty = tmp_path / "empty"
    empty.write_text("\n\n", encoding="utf-8")
    assert "holds no prompts" in warm(cli, api, empty).err
    assert cli("warm", str(empty), "--engine", "127.0.0.1:1").code == 3
    assert cli("warm", str(empty), "--engine", "ftp://host").code == 2
