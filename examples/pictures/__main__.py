"""Draws the pictures of the documentation: ``make pictures``, or one kind with ``ARGS=demo`` or
``ARGS=servers``.

The demo runs by itself. Two servers share a Valkey and answer random prompts with common prefixes;
``stats`` reads their metrics with and without ``--watch``, and so does a Prometheus, if it is
installed, for the dashboard. Takes about eight minutes on two cores.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from examples.pictures.terminal import record
from examples.tiny_model import build_tiny_model
from tests.support import ROOT
from tests.support.engines.api_server import ApiServer, running_api
from tests.support.engines.settings import random_prompt, tiered_transfer
from tests.support.redis.servers import free_ports, running_valkey

IMAGES = ROOT / "docs/images"
_CLI = (str(Path(sys.executable).with_name("lmcache-connector")),)
_LOOKS = 20
_MINUTES = 4
"""The dashboard's time range."""
_DOCUMENTS, _DOCUMENT_TOKENS, _QUESTION_TOKENS = 40, 2048, 300  # more than vLLM caches


def main() -> None:
    wanted = sys.argv[1:] or ["demo", "servers"]
    if "demo" in wanted:
        demo = (sys.executable, "-m", "examples.demo")
        _save("demo.svg", record("make demo", demo, columns=80))
    if "servers" in wanted:
        _draw_servers()


def _draw_servers() -> None:
    with tempfile.TemporaryDirectory() as folder, _two_servers(Path(folder)) as servers:
        addresses = [server.address for server in servers]
        with _prometheus(Path(folder), addresses) as prometheus, _clients(servers):
            if prometheus is not None:
                time.sleep(60 * _MINUTES)
                render = (sys.executable, str(ROOT / "examples/observability/render.py"))
                image = (str(IMAGES / "dashboard.png"), "--minutes", str(_MINUTES))
                subprocess.run((*render, prometheus, *image, "--rate-seconds", "30"), check=True)
            _wait_for_hits(addresses)
            watch = (*_CLI, "stats", "--watch", *addresses, "--count", str(_LOOKS))
            shown = "lmcache-connector stats --watch A:8000 B:8000"
            # A pipe gets every update; a terminal shows the last.
            _save("watch.svg", record(shown, watch, columns=150, last_lines=1 + len(addresses)))
        stats = (*_CLI, "stats", addresses[1])
        _save("stats.svg", record("lmcache-connector stats B:8000", stats, columns=90))


def _wait_for_hits(addresses: Sequence[str]) -> None:
    """Wait until each server has loaded a fifth of its looked-up tokens."""
    for address in addresses:
        while True:
            command = (*_CLI, "stats", address, "--json")
            shown = json.loads(subprocess.check_output(command))["engines"][0]
            if shown["prefill_saved_tokens"] > shown["queried_tokens"] / 5:
                break
            time.sleep(5.0)


@contextmanager
def _two_servers(folder: Path) -> Iterator[Sequence[ApiServer]]:
    model = build_tiny_model(folder / "model")
    with running_valkey() as valkey:
        transfer = tiered_transfer("kv_both", cpu_gib=1, redis_url=valkey.url)
        with (
            running_api(model, transfer, folder / "a.log") as first,
            running_api(model, transfer, folder / "b.log") as second,
        ):
            yield first, second


@contextmanager
def _prometheus(folder: Path, addresses: Sequence[str]) -> Iterator[str | None]:
    """Its URL; ``None`` if it is not installed: the dashboard's picture stays as it is."""
    binary = shutil.which("prometheus")
    if binary is None:
        print("There is no prometheus here: dashboard.png stays as it is")
        yield None
        return
    config = folder / "prometheus.yml"
    config.write_text(
        f"scrape_configs: [{{job_name: vllm, scrape_interval: 5s, "
        f"static_configs: [{{targets: {list(addresses)}}}]}}]"
    )
    address = f"127.0.0.1:{free_ports(1)}"
    command = (binary, f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}")
    with (
        (folder / "prometheus.log").open("w") as log,
        subprocess.Popen(
            (*command, f"--web.listen-address={address}"), stdout=log, stderr=log
        ) as process,
    ):
        try:
            yield f"http://{address}"
        finally:
            process.terminate()


@contextmanager
def _clients(servers: Sequence[ApiServer]) -> Iterator[None]:
    """One per server, each with questions about the same documents."""
    done = threading.Event()
    threads = [
        threading.Thread(target=_ask, args=(server, seed, done))
        for seed, server in enumerate(servers)
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()


def _ask(server: ApiServer, seed: int, done: threading.Event) -> None:
    choice = random.Random(seed)
    while not done.is_set():
        document = random_prompt(choice.randrange(_DOCUMENTS), _DOCUMENT_TOKENS)
        question = random_prompt(choice.randrange(_DOCUMENTS, 1 << 32), _QUESTION_TOKENS)
        server.complete([*document, *question])


def _save(name: str, svg: str) -> None:
    (IMAGES / name).write_text(svg)
    print(IMAGES / name)


if __name__ == "__main__":
    main()
