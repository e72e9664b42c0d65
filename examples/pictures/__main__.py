"""Draws the pictures of the documentation anew: ``make pictures``.

Two servers share a Valkey and answer random prompts with common beginnings; ``stats`` looks at
them, with ``--watch`` and without. The demo runs by itself. Takes about four minutes on two cores.
"""

from __future__ import annotations

import random
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from examples.pictures.terminal import record
from tests.support import ROOT
from tests.support.engines.api_server import ApiServer, running_api
from tests.support.engines.settings import tiered_transfer
from tests.support.engines.tiny_model import build_tiny_model
from tests.support.prompts import random_prompt
from tests.support.redis.servers import running_valkey

IMAGES = ROOT / "docs/images"
_CLI = (str(Path(sys.executable).with_name("lmcache-connector")),)
_LOOKS = 20
_DOCUMENTS, _DOCUMENT_TOKENS, _QUESTION_TOKENS = 40, 2048, 300  # more than vLLM keeps


def main() -> None:
    demo = (sys.executable, "-m", "examples.demo")
    _save("demo.svg", record("make demo", demo, columns=80))
    with tempfile.TemporaryDirectory() as folder, _two_servers(Path(folder)) as servers:
        addresses = [server.address for server in servers]
        with _clients(servers):
            watch = (*_CLI, "stats", "--watch", *addresses, "--count", str(_LOOKS))
            shown = "lmcache-connector stats --watch A:8000 B:8000"
            # A pipe gets each look; a terminal shows the last.
            _save("watch.svg", record(shown, watch, columns=180, last_lines=1 + len(addresses)))
        stats = (*_CLI, "stats", addresses[1])
        _save("stats.svg", record("lmcache-connector stats B:8000", stats, columns=90))


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
