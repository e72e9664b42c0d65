"""The demo's results: a table to read, and one JSON object."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from rich.table import Table

from tests.support.engines.probe import Served


@dataclass(frozen=True)
class Way:
    """The results of one way to serve prompts. ``gbps``: speed of loading from the tier, GB/s."""

    served: tuple[Served, ...]
    gbps: float | None = None

    @property
    def ttft_seconds(self) -> float:
        return statistics.median(served.ttft_seconds for served in self.served)

    @property
    def hit_tokens(self) -> int:
        """The fewest of any prompt."""
        return min(served.external_hit_tokens for served in self.served)

    def same_bytes_as(self, computed: tuple[Served, ...], block_size: int) -> bool:
        """Whether every block of a hit has the bytes that were computed for it."""
        return all(
            _hit_blocks(mine, mine, block_size) == _hit_blocks(mine, theirs, block_size) != ()
            for mine, theirs in zip(self.served, computed, strict=True)
        )


def _hit_blocks(hit: Served, of: Served, block_size: int) -> tuple[str, ...]:
    return of.block_digests[: hit.external_hit_tokens // block_size]


@dataclass(frozen=True)
class Outcome:
    """All results of the demo. ``prompt_tokens``: of the shortest prompt."""

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

    def table(self) -> Table:
        table = Table(title=f"Prompts of {self.prompt_tokens} tokens, three ways", width=78)
        table.add_column("served")
        for heading in ("time to first token", "of cold", "hit tokens", "load GB/s"):
            table.add_column(heading, justify="right")
        ways = (
            ("cold, computed", self.cold),
            ("from the CPU tier", self.cpu),
            ("from Valkey, elsewhere", self.redis),
        )
        for name, way in ways:
            table.add_row(
                name,
                f"{way.ttft_seconds * 1000:.0f} ms",
                f"{way.ttft_seconds / self.cold.ttft_seconds:.3f}",
                str(way.hit_tokens),
                f"{way.gbps:.1f}" if way.gbps else "-",
            )
        return table
