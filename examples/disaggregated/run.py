"""One prefill and one decode instance behind the proxy, and a chat answer that came through both.

    python -m examples.disaggregated.run                 # a tiny model with random weights
    python -m examples.disaggregated.run --model MODEL --keep --max-model-len 8192

Further options go to both instances, such as --gpu-memory-utilization 0.45 where they share a GPU.
Every process listens on loopback, on ports that are free.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.console import Console

from examples.serve import ask, get, loaded_tokens
from examples.tiny_model import build_tiny_model

_START_SECONDS = 600  # a real model takes long
_STOP_SECONDS = 30
_TINY = "--enforce-eager", "--max-model-len", "4096", "--kv-cache-memory-bytes", str(256 << 20)


def main() -> None:
    args, vllm_args = parse_args()
    console = Console()
    with tempfile.TemporaryDirectory(prefix="lmcache-connector-pd-") as name, ExitStack() as stack:
        folder = Path(name)
        model = args.model
        if model is None:
            model, vllm_args = str(build_tiny_model(folder / "model")), [*_TINY, *vllm_args]
        secret = secrets.token_hex(16)
        proxy, prefill, decode = (free_port() for _ in range(3))
        environment = {**os.environ, "P2P_SECRET": secret}
        stack.enter_context(process(proxy_command(proxy), folder / "proxy.log", environment))
        for role, port in (("kv_producer", prefill), ("kv_consumer", decode)):
            command = instance_command(model, role, port, f"http://127.0.0.1:{proxy}")
            command += vllm_args
            stack.enter_context(process(command, folder / f"{role}.log", environment))
        console.print("Starting a prefill and a decode instance ...")
        wait_for_both(proxy, folder)
        console.print(f"Both are registered with the proxy at http://127.0.0.1:{proxy}")
        before = loaded_tokens(f"http://127.0.0.1:{decode}")
        started = time.perf_counter()
        answer = chat(proxy, args.words)
        seconds = time.perf_counter() - started
        num_loaded = loaded_tokens(f"http://127.0.0.1:{decode}") - before
        console.print(f"Answer after {seconds:.2f} s: {answer[:200]!r}")
        console.print(f"The prefill instance served {num_loaded} tokens of KV")
        if not num_loaded:
            raise SystemExit("no KV was transferred")
        if args.keep:
            console.print("Still serving; stop with Ctrl-C")
            time.sleep(float("inf"))


def proxy_command(port: int) -> list[str]:
    module = "examples.disaggregated.proxy"
    return ["-m", module, "--secret", "env:P2P_SECRET", "--port", str(port)]


def instance_command(model: str, role: str, port: int, router: str) -> list[str]:
    transfer = {
        "kv_connector": "LMCacheP2PConnector",
        "kv_role": role,
        "kv_port": free_port(),
        "kv_connector_extra_config": {
            "cpu_gib": 1.0,
            "hash_key": "env:P2P_SECRET",
            "router_secret": "env:P2P_SECRET",
            "router": router,
            "http_address": f"127.0.0.1:{port}",
            "heartbeat_seconds": 1.0,
        },
    }
    return [
        *("-m", "vllm.entrypoints.openai.api_server", "--model", model),
        *("--served-model-name", "model", "--host", "127.0.0.1", "--port", str(port)),
        *("--kv-transfer-config", json.dumps(transfer)),
    ]


@contextmanager
def process(arguments: list[str], log: Path, environment: dict[str, str]) -> Iterator[None]:
    """Python with these arguments, stopped at the end as by an operator."""
    with log.open("wb") as output:
        running = subprocess.Popen(
            [sys.executable, *arguments], stdout=output, stderr=subprocess.STDOUT, env=environment
        )
    try:
        yield
    finally:
        running.terminate()
        try:
            running.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()


def wait_for_both(proxy: int, folder: Path) -> None:
    for _ in range(_START_SECONDS):
        try:
            counts = json.loads(get(f"http://127.0.0.1:{proxy}/health"))
        except OSError:
            counts = {}
        if counts.get("prefill") and counts.get("decode"):
            return
        time.sleep(1)
    logs = "\n".join(log.read_text(errors="replace")[-2000:] for log in folder.glob("*.log"))
    raise SystemExit(f"the instances did not register:\n{logs}")


def chat(proxy: int, num_words: int) -> str:
    """Streamed. The tiny model knows the words w2, w3, ... and makes no sense."""
    rng = random.Random(0)
    words = " ".join(f"w{rng.randrange(2, 2000)}" for _ in range(num_words))
    body = {
        "model": "model",
        "messages": [{"role": "user", "content": words}],
        "max_tokens": 12,
        "stream": True,
        "ignore_eos": True,
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{proxy}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    pieces = []
    with ask(request, 120.0) as response:
        for line in response:
            data = line.decode().removeprefix("data: ").strip()
            if data and data != "[DONE]":
                pieces.append(json.loads(data)["choices"][0]["delta"].get("content") or "")
    return "".join(pieces)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def parse_args() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="name or folder of a model (a tiny one is built)")
    parser.add_argument("--words", type=int, default=1500, help="words of the prompt (1500)")
    parser.add_argument("--keep", action="store_true", help="keep serving afterwards")
    return parser.parse_known_args()


if __name__ == "__main__":
    main()
