"""The demo's servers: a real Valkey, and vLLM instances that share it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from examples.demo.outcome import Way
from tests.support.engines.instance import VllmInstance
from tests.support.engines.probe import EngineProbe, Served
from tests.support.engines.settings import random_prompt, tiered_transfer
from tests.support.redis.servers import running_server, valkey_binary

_WARM_UP_TOKENS = 700
_WARM_UP_SEED = 10**6


@dataclass(frozen=True)
class Stage:
    """Instances of ``model`` that share one server. ``folder``: for their logs."""

    model: Path
    folder: Path
    transfer: dict[str, Any]
    console: Console
    max_model_len: int

    @contextmanager
    def instance(self, name: str) -> Iterator[VllmInstance]:
        """A new vLLM process that has served one short prompt twice: the first hit is audited,
        which computes one of its chunks."""
        log = self.folder / f"{name}.log"
        with ExitStack() as stack:
            with self.console.status(f"Starting vLLM instance {name} (about 20 s)"):
                instance = VllmInstance(
                    self.model, self.transfer, log, max_model_len=self.max_model_len
                )
                stack.enter_context(instance)
                warm_up = random_prompt(_WARM_UP_SEED, _WARM_UP_TOKENS)
                instance.serve(warm_up)
                instance.reset_prefix_cache()
                instance.serve(warm_up)
            yield instance
            stack.enter_context(
                self.console.status(f"Stopping instance {name}; its last writes go to Valkey")
            )


@contextmanager
def stage(
    model: Path, folder: Path, console: Console, *, cpu_gib: float, max_model_len: int
) -> Iterator[Stage]:
    """Starts the server."""
    with running_server(valkey_binary() or "valkey-server") as server:
        console.print("A real Valkey server is up")
        transfer = tiered_transfer(cpu_gib=cpu_gib, redis_url=server.unix_url)
        yield Stage(model, folder, transfer, console, max_model_len)


def served_by(instance: VllmInstance, serve: Callable[[], tuple[Served, ...]]) -> Way:
    """The results of ``serve``, and the speed of its instance's loads."""
    before = instance.call(EngineProbe.metrics)
    served = serve()
    return Way(served, _load_gbps(before, instance.call(EngineProbe.metrics)))


def _load_gbps(before: dict[str, float], after: dict[str, float]) -> float | None:
    """10^9 bytes per second of all loads between two readings of the metrics; ``None`` without
    loads."""
    new = {name: value - before.get(name, 0) for name, value in after.items()}
    num_bytes = new["loaded_bytes_total cpu"]  # copied to the KV cache, from any tier
    seconds = sum(new.get(f"load_seconds_sum {tier}", 0) for tier in ("cpu", "redis"))
    return num_bytes / seconds / 1e9 if num_bytes else None
