"""KV transfers between two real engines: ours by mapped memory or a socket, vLLM's by NIXL.

Mapped memory is the default on one host. The prefill engine computes a prompt once and keeps its
KV. In its turn, the decode engine fetches the KV several times and drops it each time, so that only
transfers are timed. Other pairs are stopped. Each engine computes with one thread: two engines on
two cores would compete.

The limits are one plain NIXL read, a plain socket, or a copy from shared memory, of as many bytes
between two processes and with no work around it, measured after each turn.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, product
from typing import Any

from rich.progress import Progress

from benchmarks.harness.engines import Engines
from benchmarks.harness.turns import go_on, stop, turn_of
from benchmarks.peers.raw_memory import RawMemory
from benchmarks.peers.raw_nixl import RawNixl
from benchmarks.peers.raw_socket import RawSocket
from examples.tiny_model import DEMO_SHAPE
from tests.support.engines.calls import forget
from tests.support.engines.instance import VllmInstance, set_environment
from tests.support.engines.p2p_engines import (
    Ask,
    ask,
    kv_transfer,
    nixl_transfer,
    nixl_transferred,
    prefill,
)
from tests.support.engines.probe import EngineProbe
from tests.support.engines.settings import random_prompt
from tests.support.redis.servers import free_ports

_TRANSPORTS = ("mapped", "socket", "vllm-nixl")
_SHAPE = replace(DEMO_SHAPE, max_position=32768)
_FOR_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}
_CACHE_BYTES = 768 << 20
_HAND_OVERS = 5
_Raw = RawMemory | RawNixl | RawSocket


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompt-tokens", type=int, nargs="+", default=[1000, 6000, 30000], help="lengths"
    )
    parser.add_argument(
        "--rounds", type=int, default=4, help=f"turns of a pair, each of {_HAND_OVERS} hand-overs"
    )
    parser.add_argument(
        "--transport", choices=_TRANSPORTS, nargs="+", default=list(_TRANSPORTS), help="to compare"
    )

    parser.add_argument(
        "--hash-key", action="store_true", help="ours seal values with BLAKE3 instead of xxh3"
    )


def run(args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    lengths, ways = args.prompt_tokens, args.transport
    total = len(ways) * (1 + len(lengths) * (1 + args.rounds))
    task = progress.add_task("Starting engines", total=total)
    runs = []
    with Engines(_SHAPE) as engines:
        pairs = []
        for way in ways:
            pair = _start(engines, way, has_hash_key=args.hash_key)
            pairs.append(pair)
            engines.callback(go_on, pair.pids)  # stopped engines cannot end
            stop(pair.pids)
            progress.advance(task)
        for num_tokens in lengths:
            prompt = random_prompt(num_tokens, num_tokens)
            progress.update(task, description=f"{num_tokens} tokens, computed")
            recomputed = []
            for pair in pairs:
                with turn_of(pair.pids):
                    recomputed.append(pair.compute(prompt))
                progress.advance(task)
            rounds: dict[str, list[_Round]] = {way: [] for way in ways}
            with ExitStack() as stack:
                raw = {way: _raw(stack, way, num_tokens) for way in ways}
                for number, pair in product(range(args.rounds), pairs):
                    progress.update(task, description=f"{num_tokens} tokens, turn {number + 1}")
                    rounds[pair.way] += _turn(pair, prompt, raw[pair.way])
                    progress.advance(task)
            runs += [_fields(way, num_tokens, rounds[way], min(recomputed)) for way in ways]
    _compare(runs)
    return {
        "checksum": True,
        "hash_key": args.hash_key,
        "kv_bytes_equal": all(each["kv_bytes_equal"] for each in runs),
        "errors": sum(each["errors"] for each in runs),
        "runs": runs,
    }


def _turn(pair: _Pair, prompt: Sequence[int], raw: _Raw) -> list[_Round]:
    """After one unmeasured transfer: peers find each other again, and buffers are touched."""
    with turn_of(pair.pids):
        pair.hand_over(prompt)
        rounds = [pair.hand_over(prompt) for _ in range(_HAND_OVERS)]
    gbps = statistics.median(raw.gbps() for _ in range(_HAND_OVERS))
    return [replace(each, raw_gbps=gbps) for each in rounds]


def _raw(stack: ExitStack, way: str, num_tokens: int) -> _Raw:
    num_bytes = num_tokens * _SHAPE.kv_bytes_per_token
    if way == "mapped":
        return stack.enter_context(RawMemory(num_bytes))
    if way == "socket":
        return stack.enter_context(RawSocket(num_bytes))
    return stack.enter_context(RawNixl(num_bytes))


@dataclass(frozen=True)
class _Round:
    """One prompt. ``gbps``: bytes over the connector's own time of the transfer."""

    equal: bool
    hit_tokens: int
    errors: int
    num_bytes: int
    gbps: float
    ttft: float
    raw_gbps: float = 0.0


def _fields(
    way: str, num_tokens: int, rounds: Sequence[_Round], recomputed: float
) -> dict[str, Any]:
    """Medians, and counts of failures. ``recomputed``: time to first token."""
    transfer = statistics.median(r.gbps for r in rounds)
    raw = statistics.median(r.raw_gbps for r in rounds)
    ttft = statistics.median(r.ttft for r in rounds)
    return {
        "transport": way,
        "prompt_tokens": num_tokens,
        "transfer_bytes": rounds[0].num_bytes,
        "transfer_gbps": round(transfer, 3),
        "raw_gbps": round(raw, 3),
        "transfer_vs_raw": round(transfer / raw, 3),
        "decode_ttft_s": round(ttft, 4),
        "recompute_ttft_s": round(recomputed, 4),
        "decode_ttft_vs_recompute": round(ttft / recomputed, 3),
        "kv_bytes_equal": all(r.equal for r in rounds),
        "hit_tokens": min(r.hit_tokens for r in rounds),
        "errors": sum(r.errors for r in rounds),
    }


def _compare(runs: Sequence[dict[str, Any]]) -> None:
    """Each with vLLM's own of the same length."""
    own = {r["prompt_tokens"]: r["decode_ttft_s"] for r in runs if r["transport"] == "vllm-nixl"}
    for each in runs:
        if each["prompt_tokens"] in own:
            ratio = each["decode_ttft_s"] / own[each["prompt_tokens"]]
            each["decode_ttft_vs_vllm_nixl"] = round(ratio, 3)


@dataclass(frozen=True)
class _Pair:
    """Two engines with one way to transfer KV, and a counter for request names."""

    way: str
    prefill: VllmInstance
    decode: VllmInstance
    numbers: Iterator[int] = field(default_factory=count)

    @property
    def pids(self) -> tuple[int, int]:
        return self.prefill.pid, self.decode.pid

    def compute(self, prompt: Sequence[int]) -> float:
        """Time to first token of a new prompt, whose KV the prefill engine then has."""
        seconds: float = self.prefill.serve(prompt).ttft_seconds
        return seconds

    def hand_over(self, prompt: Sequence[int]) -> _Round:
        number = next(self.numbers)
        cold = self.prefill.call(prefill, Ask(f"p-{number}", prompt, 1, dict(_FOR_DECODE)))
        before = self._received()
        hit = self.decode.call(ask, Ask(f"d-{number}", prompt, 2, cold.params))
        num_bytes, seconds, failed, num_mapped = (
            now - then for now, then in zip(self._received(), before, strict=True)
        )
        if self.way == "vllm-nixl":
            self.decode.reset_prefix_cache()
        else:
            self.decode.call(forget)
        missed = hit.finish_reason != "length" or cold.params is None
        missed |= (num_mapped > 0) != (self.way == "mapped")  # another way was used
        return _Round(
            equal=() != hit.served.block_digests == cold.served.block_digests,
            hit_tokens=hit.served.cached_tokens,  # vLLM's own prefix cache is empty
            errors=int(failed) + missed,
            num_bytes=int(num_bytes),
            gbps=num_bytes / seconds / 1e9 if seconds else 0.0,
            ttft=hit.served.ttft_seconds,
        )

    def _received(self) -> tuple[float, ...]:
        """The decode engine's received bytes, seconds and failures so far, and its chunks from
        mapped memory."""
        if self.way == "vllm-nixl":
            return (*self.decode.call(nixl_transferred), 0.0)
        counts = self.decode.counts()
        names = "p2p_received_bytes", "p2p_receive_seconds", "p2p_failed_loads"
        return tuple(counts.total(name) for name in (*names, "peer_mapped_chunks"))


def _start(engines: Engines, way: str, *, has_hash_key: bool) -> _Pair:
    instances = []
    ours: dict[str, Any] = {"cpu_gib": 1.0, "audit_share": 0.0}
    if has_hash_key:
        ours["hash_key"] = "shared by the two of a pair"
    if way == "mapped":
        ours |= {"host_sharing": True, "host_folder": str(engines.folder / "host")}
    for role in ("kv_producer", "kv_consumer"):
        port = free_ports(1)
        transfer = nixl_transfer(role) if way == "vllm-nixl" else kv_transfer(role, port, **ours)
        environment = {
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        instances.append(
            engines.start(
                f"{way}-{role}",
                transfer,
                prepare=partial(set_environment, environment),
                kv_cache_memory_bytes=_CACHE_BYTES,
                max_model_len=_SHAPE.max_position,
            )
        )
    for instance in instances:
        instance.call(_touch_cache)
    pair = _Pair(way, instances[0], instances[1])
    pair.compute(random_prompt(0, 1000))  # compilation, page faults
    return pair


def _touch_cache(probe: EngineProbe) -> None:
    """Touch every block, as in an engine that has served for a while."""
    probe.on_ranks(_touch_cache_on_rank)


def _touch_cache_on_rank(worker: Any) -> None:
    for cache in worker.model_runner.kv_caches:
        cache.fill_(0)
