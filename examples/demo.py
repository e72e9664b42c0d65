"""The main job, shown: long prompts served cold, from CPU memory, and by another process.

    make demo

Starts a real Valkey server and two vLLM instances, one after the other, on a tiny random model.
Ends with a table and, as its last line, one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.support.engines.instance import InstanceError, VllmInstance
from tests.support.engines.probe import EngineProbe, Served
from tests.support.engines.settings import tiered_transfer
from tests.support.engines.tiny_model import DEMO_SHAPE, build_tiny_model
from tests.support.prompts import random_prompt
from tests.support.redis.servers import running_server, valkey_binary

_WARM_UP_TOKENS = 700


@dataclass(frozen=True)
class Way:
    """How one way of serving all prompts went. ``gbps``: speed of loading from the tier, GB/s."""

    served: tuple[Served, ...]
    gbps: float | None = None

    @property
    def ttft_seconds(self) -> float:
        return statistics.median(served.ttft_seconds for served in self.served)

    @property
    def hit_tokens(self) -> int:
        """The fewest of any prompt."""
        return min(served.external_hit_tokens for served in self.served)

    def same_bytes_as(self, other: Way, block_size: int) -> bool:
        """Whether every block that was a hit holds the same bytes as in the other run."""
        return all(
            _hit_blocks(mine, mine, block_size) == _hit_blocks(mine, theirs, block_size) != ()
            for mine, theirs in zip(self.served, other.served, strict=True)
        )


def _hit_blocks(hit: Served, of: Served, block_size: int) -> tuple[str, ...]:
    return of.block_digests[: hit.external_hit_tokens // block_size]


@dataclass(frozen=True)
class Outcome:
    """Everything the demo measured."""

    prompt_tokens: int
    cold: Way
    cpu: Way
    redis: Way
    kv_bytes_equal: bool

    def as_json(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "ttft_cold_s": round(self.cold.ttft_seconds, 4),
            "ttft_cpu_hit_s": round(self.cpu.ttft_seconds, 4),
            "ttft_redis_hit_s": round(self.redis.ttft_seconds, 4),
            "cpu_hit_tokens": self.cpu.hit_tokens,
            "redis_hit_tokens": self.redis.hit_tokens,
            "kv_bytes_equal": self.kv_bytes_equal,
        }


def main() -> int:
    args = _arguments()
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="lmcache-connector-demo-") as folder:
        try:
            outcome = run_demo(Path(folder), args.prompt_tokens, args.rounds, console)
        except InstanceError as error:
            console.print(str(error), markup=False, style="red")
            return 1
    Console().print(_table(outcome))
    print(json.dumps(outcome.as_json()), flush=True)
    return 0


def run_demo(folder: Path, num_tokens: int, rounds: int, console: Console) -> Outcome:
    """Serve ``rounds`` prompts of ``num_tokens`` tokens each way. Raises ``InstanceError``."""
    prompts = [random_prompt(seed, num_tokens) for seed in range(rounds)]
    warm_up = random_prompt(rounds, _WARM_UP_TOKENS)
    with console.status("Building a tiny random Llama"):
        model = build_tiny_model(folder / "model", DEMO_SHAPE)
    with running_server(valkey_binary() or "valkey-server") as server:
        console.print("A real Valkey server is up, and a model is built")

        transfer = tiered_transfer(cpu_gib=2, redis_url=server.unix_url)

        def instance(name: str) -> VllmInstance:
            return VllmInstance(model, transfer, folder / f"{name}.log")

        with console.status("Starting vLLM instance A (about 20 s)") as status, instance("a") as a:
            a.serve(warm_up)
            status.update("Instance A computes the prompts")
            cold = _serve(a, prompts)
            console.print(f"Instance A computed {rounds} prompts of {num_tokens} tokens")
            status.update("Instance A serves them from the CPU tier")
            cpu = _serve(a, prompts, a.reset_prefix_cache)
            console.print("Instance A served them again, from the CPU tier")
            status.update("Stopping instance A; its last writes go to Valkey")
        with console.status("Starting vLLM instance B (about 20 s)") as status, instance("b") as b:
            b.serve(warm_up)
            status.update("Instance B serves the prompts from Valkey")
            redis = _serve(b, prompts)
            console.print("Instance B, which never saw them, served them from Valkey")
            status.update("Stopping instance B")
    block_size = num_tokens // len(cold.served[0].block_digests)
    return Outcome(
        prompt_tokens=num_tokens,
        cold=cold,
        cpu=cpu,
        redis=redis,
        kv_bytes_equal=all(way.same_bytes_as(cold, block_size) for way in (cpu, redis)),
    )


def _serve(
    instance: VllmInstance,
    prompts: Sequence[list[int]],
    before_each: Callable[[], None] = lambda: None,
) -> Way:
    before = instance.call(EngineProbe.metrics)
    served = []
    for prompt in prompts:
        before_each()
        served.append(instance.serve(prompt))
    after = instance.call(EngineProbe.metrics)
    return Way(tuple(served), _load_gbps(before, after))


def _load_gbps(before: dict[str, float], after: dict[str, float]) -> float | None:
    """10^9 bytes per second of all loads between two looks at the metrics; ``None``: there were
    none."""
    new = {name: value - before.get(name, 0) for name, value in after.items()}
    num_bytes = new["loaded_bytes_total cpu"]  # copied to the KV cache, wherever they came from
    seconds = sum(new.get(f"load_seconds_sum {tier}", 0) for tier in ("cpu", "redis"))
    return num_bytes / seconds / 1e9 if num_bytes else None


def _table(outcome: Outcome) -> Table:
    table = Table(title=f"One prompt of {outcome.prompt_tokens} tokens, three ways", width=78)
    table.add_column("served")
    for heading in ("time to first token", "of cold", "hit tokens", "load GB/s"):
        table.add_column(heading, justify="right")
    ways = (
        ("cold, computed", outcome.cold),
        ("from the CPU tier", outcome.cpu),
        ("from Valkey, elsewhere", outcome.redis),
    )
    for name, way in ways:
        table.add_row(
            name,
            f"{way.ttft_seconds * 1000:.0f} ms",
            f"{way.ttft_seconds / outcome.cold.ttft_seconds:.2f}",
            str(way.hit_tokens),
            f"{way.gbps:.1f}" if way.gbps else "-",
        )
    return table


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make demo ARGS=...", description=__doc__)
    parser.add_argument("--prompt-tokens", type=int, default=6200, help="length of each prompt")
    parser.add_argument("--rounds", type=int, default=3, help="prompts to take medians over")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
