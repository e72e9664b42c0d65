"""Two real engines, one prefills and hands over to the other, against a plain socket and recompute.

For every prompt the prefill engine computes and keeps the KV; then the decode engine fetches it all
at once, so that what is timed is the transfer alone. The plain socket moves as many bytes between
two processes, from and to warm memory, with nothing around it. Both are measured in turns.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from rich.progress import Progress

from benchmarks.harness.engines import Engines
from benchmarks.peers.raw_socket import RawSocket
from tests.support.engines.handover import Ask, ask
from tests.support.engines.p2p_engines import Engines as PrefillDecode
from tests.support.engines.p2p_engines import kv_transfer, running
from tests.support.engines.p2p_instances import free_ports
from tests.support.engines.tiny_model import DEMO_SHAPE
from tests.support.prompts import random_prompt


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt-tokens", type=int, default=6000, help="length of each prompt")
    parser.add_argument("--rounds", type=int, default=7, help="prompts, for medians")
    parser.add_argument(
        "--send-type", choices=["GET", "PUT", "PUT_ASYNC"], default="GET", help="how KV moves"
    )


def run(args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    task = progress.add_task("Starting two engines", total=args.rounds + 1)
    ports = free_ports(1), free_ports(1)
    roles = zip(("kv_producer", "kv_consumer"), ports, strict=True)
    transfers = [kv_transfer(role, port, send_type=args.send_type) for role, port in roles]
    num_bytes = args.prompt_tokens * DEMO_SHAPE.kv_bytes_per_token
    with (
        Engines() as engines,
        running(engines.model, engines.folder, transfers, kv_cache_memory_bytes=512 << 20) as (
            prefill,
            decode,
        ),
        RawSocket(num_bytes) as raw,
    ):
        handing_over = PrefillDecode([(prefill, ports[0])], [(decode, ports[1])], count())
        pair = _Pair(handing_over, args.prompt_tokens)
        pair.round()  # unmeasured: memory is touched for the first time
        pair.recompute()
        rounds, recomputed, raw_gbps = [], [], []
        for number in range(args.rounds):
            progress.update(task, description=f"Round {number + 1}", advance=1)
            rounds.append(pair.round())
            raw_gbps.append(raw.gbps())
            recomputed.append(pair.recompute())
    return {
        "send_type": args.send_type,
        "prompt_tokens": args.prompt_tokens,
        **_fields(rounds, raw_gbps, recomputed),
    }


def _fields(
    rounds: Sequence[dict[str, Any]], raw_gbps: Sequence[float], recomputed: Sequence[float]
) -> dict[str, Any]:
    """Medians, and sums of what must not happen. ``recomputed``: times to first token."""
    transfer = statistics.median(r["gbps"] for r in rounds)
    ttft = statistics.median(r["ttft"] for r in rounds)
    cold, raw_speed = statistics.median(recomputed), statistics.median(raw_gbps)
    return {
        "transfer_bytes": rounds[0]["bytes"],
        "kv_bytes_equal": all(r["equal"] for r in rounds),
        "hit_tokens": min(r["hit"] for r in rounds),
        "errors": sum(r["errors"] for r in rounds),
        "transfer_gbps": round(transfer, 3),
        "raw_socket_gbps": round(raw_speed, 3),
        "transfer_vs_raw": round(transfer / raw_speed, 3),
        "decode_ttft_s": round(ttft, 4),
        "recompute_ttft_s": round(cold, 4),
        "decode_ttft_vs_recompute": round(ttft / cold, 3),
    }


@dataclass(frozen=True)
class _Pair:
    """Both engines, and seeds for prompts that neither has seen."""

    engines: PrefillDecode
    num_tokens: int
    seeds: Iterator[int] = field(default_factory=count)

    def round(self) -> dict[str, Any]:
        """Hand one new prompt over. ``gbps``: from the first to the last byte received."""
        ((decode, _),) = self.engines.decode
        before = decode.counts()
        cold, hit = self.engines.hand_over(random_prompt(next(self.seeds), self.num_tokens))
        after = decode.counts()
        num_bytes = int(after.total("p2p_received_bytes") - before.total("p2p_received_bytes"))
        seconds = after.total("p2p_receive_seconds") - before.total("p2p_receive_seconds")
        failed = int(after.total("p2p_failed_loads") - before.total("p2p_failed_loads"))
        return {
            "equal": () != hit.served.block_digests == cold.served.block_digests,
            "hit": hit.served.external_hit_tokens,
            "errors": failed + (hit.finish_reason != "length") + (cold.finish_reason != "length"),
            "bytes": num_bytes,
            "gbps": num_bytes / seconds / 1e9 if seconds else 0.0,
            "ttft": hit.served.ttft_seconds,
        }

    def recompute(self) -> float:
        """Time to first token of a prompt that the decode engine computes itself."""
        ((decode, _),) = self.engines.decode
        seed = next(self.seeds)
        prompt = random_prompt(seed, self.num_tokens)
        seconds: float = decode.call(ask, Ask(f"recompute-{seed}", prompt)).served.ttft_seconds
        return seconds
