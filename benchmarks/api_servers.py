"""vLLM's OpenAI server in processes of its own, and vLLM's own client (``vllm bench serve``)."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers import PeerError
from tests.support.api_server import ApiServer
from tests.support.servers import free_port

_STOP_SECONDS = 20.0
_EXCEPTION = re.compile(r"\b\w+(Error|Exception)\b: ")


@dataclass(frozen=True)
class CachedTokens:
    """Prompt tokens so far, and where those came from that were not computed.

    ``declined``: what this connector had, and left to compute as the quicker way. ``dropped``:
    chunks it did not write to Redis.
    """

    prompt: int
    device: int
    host: int
    external: int
    declined: int
    dropped: int

    def since(self, earlier: CachedTokens) -> CachedTokens:
        return CachedTokens(
            self.prompt - earlier.prompt,
            self.device - earlier.device,
            self.host - earlier.host,
            self.external - earlier.external,
            self.declined - earlier.declined,
            self.dropped - earlier.dropped,
        )


@contextmanager
def serving(
    model: Path, transfer: dict[str, Any] | None, log: Path, *arguments: str
) -> Iterator[ApiServer]:
    """Started, to answer as model ``tiny`` in a while; afterwards gone, with all it started."""
    port = free_port()
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)),
        *("--enforce-eager", "--disable-uvicorn-access-log", *arguments),
    ]
    if transfer is not None:
        command += ["--kv-transfer-config", json.dumps(transfer)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield ApiServer(process, port, log)
    finally:
        _end(process)


def wait_ready(server: ApiServer) -> None:
    """Raises :class:`PeerError` with what the log says when the server does not start."""
    try:
        server.wait_ready()
    except AssertionError as error:
        raise PeerError(_first_error(server.log)) from error


def cached_tokens(server: ApiServer) -> CachedTokens:
    """From ``/metrics``."""

    def of(source: str) -> int:
        return sum(
            int(float(line.split()[-1]))
            for line in lines
            if line.startswith("vllm:prompt_tokens_cached_by_source_total")
            and f'source="{source}"' in line
        )

    lines = server.metrics().splitlines()
    return CachedTokens(
        prompt=int(server.metric("vllm:prompt_tokens_total")),
        device=of("device"),
        host=of("host"),
        external=of("external_unspecified"),
        declined=int(server.metric("vllm:lmcache_declined_tokens_total")),
        dropped=int(server.metric("vllm:lmcache_dropped_writes_total")),
    )


def replay(server: ApiServer, model: Path, trace: Path, piece_tokens: int) -> dict[str, Any]:
    """Replay a timed trace with vLLM's own client; its result object. ``ttfts``, in seconds, and
    ``errors`` are by request."""
    from vllm.benchmarks.serve import add_cli_args, main_async
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser: argparse.ArgumentParser = FlexibleArgumentParser()
    add_cli_args(parser)
    host, port = server.address.split(":")
    num_lines = len(trace.read_text(encoding="utf-8").splitlines())
    options = {
        "--backend": "vllm",
        "--host": host,
        "--port": port,
        "--endpoint": "/v1/completions",
        "--model": "tiny",
        "--served-model-name": "tiny",
        "--tokenizer": str(model),
        "--dataset-name": "timed_trace",
        "--dataset-path": str(trace),
        "--timed-trace-chunk-hash-size": str(piece_tokens),
        "--num-prompts": str(num_lines),
        "--percentile-metrics": "ttft,tpot,e2el",
        "--metric-percentiles": "50,90,99",
        "--temperature": "0",
    }
    args = parser.parse_args([word for pair in options.items() for word in pair])
    args.disable_tqdm = True
    args.save_detailed = True  # keeps the figures of each request
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        result: dict[str, Any] = asyncio.run(main_async(args))
    return result


def _first_error(log: str) -> str:
    """The first line of a log that names an exception: the others follow from it."""
    lines = [line.strip() for line in log.splitlines()]
    errors = [line for line in lines if _EXCEPTION.search(line) and "WARNING" not in line]
    return (errors or lines[-1:] or ["it says nothing"])[0][-300:]


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
