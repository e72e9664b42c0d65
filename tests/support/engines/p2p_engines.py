"""A prefill and a decode engine for the tests, each in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from tests.support.engines.asks import Answer, Ask, ask, prefill
from tests.support.engines.instance import VllmInstance
from tests.support.engines.probe import EngineProbe

NOTICED_SECONDS = 28.0
"""Within which a request is served that waits for what will not come: less than the deadline of a
load, which is 30 s, though most of it is computing, perhaps on a busy machine."""


def kv_transfer(role: str, port: int, **extra: Any) -> dict[str, Any]:
    """The JSON of ``--kv-transfer-config``."""
    extra.setdefault("host_sharing", False)
    return {
        "kv_connector": "LMCacheP2PConnector",
        "kv_role": role,
        "kv_port": port,
        "kv_connector_extra_config": extra,
    }


@dataclass
class Engines:
    """Some prefill and decode engines with their control ports, and names for requests."""

    prefill: list[tuple[VllmInstance, int]]
    decode: list[tuple[VllmInstance, int]]
    numbers: count[int]

    def name(self, prefill: int = 0, decode: int = 0) -> str:
        """A request id that names one of each."""
        ports = self.prefill[prefill][1], self.decode[decode][1]
        return (
            f"___prefill_addr_127.0.0.1:{ports[0]}___decode_addr_127.0.0.1:{ports[1]}"
            f"_n{next(self.numbers)}"
        )

    def hand_over(self, prompt: Sequence[int]) -> tuple[Answer, Answer]:
        """By request id, one after the other, as a router does."""
        name = self.name()
        cold = self.prefill[0][0].call(prefill, Ask(name, prompt, 1))
        return cold, self.decode[0][0].call(ask, Ask(name, prompt))

    def hand_over_by_params(self, prompt: Sequence[int]) -> tuple[Answer, Answer]:
        params = {"do_remote_decode": True, "do_remote_prefill": False}
        cold = self.prefill[0][0].call(prefill, Ask(f"p{next(self.numbers)}", prompt, 1, params))
        served = self.decode[0][0].call(
            ask, Ask(f"d{next(self.numbers)}", prompt, params=cold.params)
        )
        return cold, served


def metrics(probe: EngineProbe) -> dict[str, float]:
    """Hand-overs as vLLM's own logger has them for Prometheus, by name and reason, in short."""
    prefix = "p2p_"
    found = probe.metrics().items()
    return {name.removeprefix(prefix): value for name, value in found if name.startswith(prefix)}


def log_stats(probe: EngineProbe) -> None:
    """What vLLM does every ten seconds."""
    probe.engine.do_log_stats()


@contextmanager
def running(
    model: Path, folder: Path, transfers: Sequence[dict[str, Any]], **args: Any
) -> Iterator[list[VllmInstance]]:
    """Engines that start at the same time. ``args`` may hold lists, one entry per engine."""
    instances = []
    for index, transfer in enumerate(transfers):
        settings: dict[str, Any] = {"kv_cache_memory_bytes": 256 << 20, "max_model_len": 8192}
        settings |= {k: v[index] if isinstance(v, list) else v for k, v in args.items()}
        settings = {name: value for name, value in settings.items() if value is not None}
        log = folder / f"{transfer['kv_role']}-{index}.log"
        instances.append(VllmInstance(model, transfer, log, **settings))
    with ExitStack() as stack:
        with ThreadPoolExecutor(len(instances)) as pool:
            list(pool.map(stack.enter_context, instances))
        yield instances
