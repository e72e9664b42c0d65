"""A server that is paused and put to sleep in all of vLLM's ways, while it serves and stores."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import count

from tests.support.engines.api_server import ApiServer
from tests.support.prompts import random_prompt

_NUM_TOKENS = 700
_PATIENCE_SECONDS = 60.0


def check_pauses(api: ApiServer) -> None:
    """Each time it comes to rest, as it would without a connector, and then goes on."""
    seeds, stop = count(50_000), threading.Event()

    def serve() -> None:
        while not stop.is_set():
            api.complete(random_prompt(next(seeds), _NUM_TOKENS))

    with ThreadPoolExecutor(1) as pool:
        client = pool.submit(serve)
        try:
            for mode in ("abort", "wait", "keep"):
                for begin, end in (("/pause", "/resume"), ("/sleep", "/wake_up")):
                    api.complete(random_prompt(next(seeds), _NUM_TOKENS))
                    api.post(f"{begin}?mode={mode}")
                    api.post(end)
        finally:
            stop.set()
        client.result(_PATIENCE_SECONDS)
    answer = json.loads(api.complete(random_prompt(next(seeds), _NUM_TOKENS)))
    assert answer["choices"][0]["finish_reason"] == "length"
