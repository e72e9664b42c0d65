"""``examples/warm.py`` with a server that answers as vLLM's API."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT


class Api(BaseHTTPRequestHandler):
    """Counts ten prompt tokens for each request, four of them loaded by the connector."""

    asked: list[tuple[str, dict[str, Any]]]

    def do_GET(self) -> None:
        metric = f'vllm:lmcache_prefill_saved_tokens_total{{engine="0"}} {4.0 * len(self.asked)}\n'
        models = json.dumps({"data": [{"id": "first"}, {"id": "second"}]})
        self.answer(200, metric if self.path == "/metrics" else models)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append((self.path, body))
        self.answer(200, json.dumps({"usage": {"prompt_tokens": 10}}))

    def answer(self, code: int, text: str) -> None:
        self.send_response(code)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        """Quiet."""


@pytest.fixture
def url() -> Iterator[str]:
    Api.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Api)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def warm(file: Path, url: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "examples" / "warm.py"), str(file), url]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_each_line_is_one_request(url: str, tmp_path: Path) -> None:
    (tmp_path / "texts").write_text("one\n\ntwo\n")
    done = warm(tmp_path / "texts", url.removeprefix("http://") + "/")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "20 prompt tokens, of which the connector loaded 8; 0 failed\n"
    assert {body["prompt"] for _, body in Api.asked} == {"one", "two"}
    assert all(body["max_tokens"] == 1 and body["model"] == "first" for _, body in Api.asked)


def test_what_sets_the_answer_is_left_out(url: str, tmp_path: Path) -> None:
    """vLLM refuses some of it in a request for one token that is not streamed."""
    answers = {"stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 2}
    prompt = {"messages": [], "cache_salt": "s", "stream": True, "max_completion_tokens": 9}
    (tmp_path / "prompts.jsonl").write_text(json.dumps(prompt | answers))
    assert warm(tmp_path / "prompts.jsonl", url).returncode == 0
    ((path, body),) = Api.asked
    assert path == "/v1/chat/completions"
    fixed = {"model": "first", "temperature": 0, "max_tokens": 1, "stream": False, "n": 1}
    assert body == {"messages": [], "cache_salt": "s"} | fixed
