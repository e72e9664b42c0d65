"""A server with the connector: one long request sent twice, and its metrics.

    python examples/serve.py MODEL
    python examples/serve.py MODEL --redis-url redis://localhost:6379 --keep

vLLM's own prefix cache is off here, so that all cached tokens of the second request come from the
connector. Leave it on in production: the connector continues where its hits end.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPResponse
from pathlib import Path

from lmcache_connector.net.address import Address

_START_SECONDS = 600.0
_REQUEST_SECONDS = 600.0
_STOP_SECONDS = 60.0


def main() -> None:
    args, vllm_args = parse_args()
    # Before the server starts, as whoever listens there would answer for it.
    if reason := Address("127.0.0.1", args.port).why_not_listen():
        sys.exit(f"cannot listen on port {args.port}: {reason}; give another --port")
    command = serve_command(args, vllm_args)
    print("$", subprocess.list2cmdline(command), flush=True)
    url = f"http://127.0.0.1:{args.port}"
    with running(command, url) as server:
        prompt = " ".join(f"w{number % 997 + 2}" for number in range(args.words))
        for name in ("first", "again"):
            loaded_before = loaded_tokens(url)
            seconds, num_tokens = complete(url, args.model, prompt)
            num_loaded = loaded_tokens(url) - loaded_before
            print(f"{name}: {num_loaded} of {num_tokens} prompt tokens loaded, {seconds:.3f} s")
        if args.keep:
            print(f"Serving on {url} until it is interrupted", flush=True)
            server.wait()


def serve_command(args: argparse.Namespace, vllm_args: Sequence[str]) -> list[str]:
    """The command line that one would type."""
    command = [str(Path(sys.executable).with_name("lmcache-connector")), "serve", args.model]
    command += ["--cpu-gib", str(args.cpu_gib)]
    if args.redis_url:
        command += ["--redis-url", args.redis_url]
    command += ["--host", "127.0.0.1", "--port", str(args.port)]
    return [*command, "--no-enable-prefix-caching", *vllm_args]


@contextmanager
def running(command: Sequence[str], url: str) -> Iterator[subprocess.Popen[bytes]]:
    """The server, once it answers. Its log goes to standard error."""
    with subprocess.Popen(command, stdout=sys.stderr) as server:
        try:
            wait_until_healthy(server, url)
            yield server
        finally:
            server.terminate()
            try:
                server.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                server.kill()


def wait_until_healthy(server: subprocess.Popen[bytes], url: str) -> None:
    """Exits with a message if the server ends or takes too long."""
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            sys.exit(f"the server ended with status {server.returncode}; see its log above")
        try:
            get(f"{url}/health")
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.5)  # between two tries
        else:
            return
    sys.exit(f"the server did not answer on {url} within {_START_SECONDS:.0f} s")


def complete(url: str, model: str, prompt: str) -> tuple[float, int]:
    """Seconds until the answer of one token, and the number of tokens of the prompt."""
    body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    started = time.perf_counter()
    with ask(request, _REQUEST_SECONDS) as response:
        answer = json.load(response)
    return time.perf_counter() - started, answer["usage"]["prompt_tokens"]


def ask(request: urllib.request.Request, seconds: float) -> HTTPResponse:
    """The answer. If the server refuses, for instance a prompt too long for the model, the program
    ends with the server's words."""
    try:
        answer: HTTPResponse = urllib.request.urlopen(request, timeout=seconds)
    except urllib.error.HTTPError as error:
        sys.exit(f"{error.url}: {error}\n{error.read().decode(errors='replace')}")
    return answer


def loaded_tokens(url: str) -> int:
    """Prompt tokens that the connector has loaded so far."""
    text = get(f"{url}/metrics")
    found = re.findall(r"^vllm:lmcache_prefill_saved_tokens_total\{.*\} (\S+)$", text, re.M)
    return int(sum(map(float, found)))


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as response:
        text: str = response.read().decode()
        return text


def parse_args() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="Further options go to vllm serve as they are.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="name or folder of a model")
    parser.add_argument("--port", type=int, default=8000, help="port to serve on (8000)")
    parser.add_argument("--cpu-gib", type=float, default=8.0, help="CPU tier, GiB (8)")
    parser.add_argument("--redis-url", help="share through this Redis or Valkey (none)")
    parser.add_argument("--words", type=int, default=1000, help="words of the prompt (1000)")
    parser.add_argument("--keep", action="store_true", help="keep serving afterwards")
    return parser.parse_known_args()


if __name__ == "__main__":
    main()
