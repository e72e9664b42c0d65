"""How close the Redis tier comes to the socket, and how far ahead of LMCache's own connectors.

Chunks of a Llama-3-8B (32 layers, 8 KV heads of 128, bf16, 256 tokens: 32 MiB), checksums on, all
in one run against one server on this machine. Clients take turns, so that a ratio compares
neighbours in time. Every byte read is compared with what was written.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from rich.progress import Progress

from benchmarks.raw_resp import RawSettings, RawValue, get_all, set_all
from lmcache_connector.storage.geometry import ChunkGeometry
from lmcache_connector.storage.redis.config import RedisTierConfig
from lmcache_connector.storage.redis.lookup import RedisLookup
from lmcache_connector.storage.redis.tier import RedisTier
from lmcache_connector.storage.redis.value_names import chunk_tag, stripe_suffix
from tests.support.servers import Server, redis_binary, running_server, valkey_binary

LLAMA_3_8B = ChunkGeometry(
    num_tokens=256,
    layer_start=0,
    layer_widths=(2 * 128 * 2,) * 32,
    shards=tuple(range(8)),
    num_shards_total=8,
    dtype="bfloat16",
)
_RAW_CHOICES = [RawSettings(c, w) for c in (1, 2) for w in (2, 4)]
_SECONDS = 60.0
_LMCACHE_SECONDS = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = "redis" if redis_binary() else "valkey"
    parser.add_argument("--server", choices=("redis", "valkey"), default=default)
    parser.add_argument("--unix", action="store_true", help="Unix socket instead of loopback TCP")
    parser.add_argument("--mib", type=int, default=512, help="bytes to move, in MiB")
    parser.add_argument("--rounds", type=int, default=5, help="measurements, for the medians")
    parser.add_argument("--no-lmcache", action="store_true", help="leave LMCache's own out")


@dataclass(frozen=True)
class Bench:
    """The same bytes for every client: ``source`` is written, ``target`` read into."""

    server: Server
    unix: bool
    keys: list[bytes]
    source: list[memoryview]
    target: list[memoryview]

    @property
    def url(self) -> str:
        return self.server.unix_url if self.unix else self.server.url

    @property
    def address(self) -> tuple[str, int] | str:
        return str(self.server.socket_path) if self.unix else ("127.0.0.1", self.server.port)

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.source))

    def flush(self) -> None:
        with self.server.client() as client:
            client.flushall()

    def forget(self) -> None:
        """Spoil what was read before, so that equal bytes prove a read."""
        for view in self.target:
            view[:: 1 << 16] = bytes(len(view[:: 1 << 16]))

    def check(self) -> None:
        for source, target in zip(self.source, self.target, strict=True):
            if not np.array_equal(
                np.frombuffer(source, np.uint64), np.frombuffer(target, np.uint64)
            ):
                raise RuntimeError("what was read is not what was written")


def run(args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Speeds in GB/s (10**9 bytes of payload a second), medians over the rounds."""
    binary = redis_binary() if args.server == "redis" else valkey_binary()
    if binary is None:
        raise SystemExit(f"no {args.server}-server on this machine")
    with running_server(binary) as server:
        bench = _bench(server, args.unix, args.mib)
        with server.client() as client:
            info = client.info("server")
        version = info.get("valkey_version", info["redis_version"])
        fields: dict[str, Any] = {"server": f"{args.server} {version}", "unix": args.unix}
        fields |= {"mib": bench.num_bytes / 2**20, "rounds": args.rounds}
        gbps = _own_speeds(bench, args.rounds, progress)
        if not args.no_lmcache:
            gbps |= _lmcache_speeds(bench, args.rounds, progress)
        fields |= {f"{name}_gbps": round(speed, 3) for name, speed in gbps.items()}
        fields |= {name: round(ratio, 3) for name, ratio in _ratios(gbps).items()}
        fields["exists_128_chunks_ms"] = round(_exists_ms(bench, args.rounds), 3)
        return fields


def _ratios(gbps: dict[str, float]) -> dict[str, float]:
    ratios = {f"{op}_vs_raw": gbps[f"tier_{op}"] / gbps[f"raw_{op}"] for op in ("get", "set")}
    for other in ("lmcache_redis", "lmcache_resp"):
        for op in ("get", "set"):
            if f"{other}_{op}" in gbps:
                ratios[f"{op}_vs_{other}"] = gbps[f"tier_{op}"] / gbps[f"{other}_{op}"]
    return ratios


def make_chunks(mib: int) -> tuple[list[bytes], list[memoryview]]:
    """Keys and contents, the same in every process: at least ``mib`` MiB of chunks."""
    size = LLAMA_3_8B.chunk_bytes
    count = max(1, -(-(mib << 20) // size))
    random = np.random.default_rng(1)
    keys = [random.bytes(32) for _ in range(count)]
    return keys, [memoryview(bytearray(random.bytes(size))) for _ in range(count)]


def _bench(server: Server, unix: bool, mib: int) -> Bench:
    keys, source = make_chunks(mib)
    target = [memoryview(bytearray(len(view))) for view in source]
    return Bench(server=server, unix=unix, keys=keys, source=source, target=target)


@contextmanager
def _open_tier(bench: Bench) -> Iterator[RedisTier]:
    # A claim outlives the flush between rounds by nothing: flushing removes it.
    tier = RedisTier(RedisTierConfig(url=bench.url), LLAMA_3_8B)
    try:
        yield tier
    finally:
        tier.close(1.0)


def _own_speeds(bench: Bench, rounds: int, progress: Progress) -> dict[str, float]:
    """Raw client and tier, taking turns."""
    seconds: dict[str, list[float]] = {}
    with _open_tier(bench) as tier:
        raw = _RawSpeed(bench)
        set_tier, get_tier = partial(_tier_set, bench, tier), partial(_tier_get, bench, tier)
        task = progress.add_task("raw socket and tier", total=rounds + 1)
        for i in range(rounds + 1):
            measured = {} if i == 0 else seconds
            turns: dict[str, tuple[Callable[[], None], Callable[[], None]]]
            turns = {"raw": (raw.set, raw.get), "tier": (set_tier, get_tier)}
            # Who goes first changes, so that neither always finds the warmer caches.
            for name in sorted(turns, reverse=bool(i % 2)):
                bench.flush()
                _time(measured, f"{name}_set", turns[name][0])
                bench.forget()
                for _ in range(2):
                    _time(measured, f"{name}_get", turns[name][1])
                bench.check()
            progress.advance(task)
    bench.flush()
    return {name: bench.num_bytes / statistics.median(s) / 1e9 for name, s in seconds.items()}


class _RawSpeed:
    """The plain client over the tier's own values, with the settings that suit it best."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        stripes = LLAMA_3_8B.stripes(RedisTierConfig(url=bench.url).max_payload_bytes)
        places = [
            (chunk_tag("default", key) + stripe_suffix(stripe), chunk, stripe)
            for chunk, key in enumerate(bench.keys)
            for stripe in stripes
        ]
        # The tier's cuts, but payloads only: headers are the tier's own cost.
        self._sets = [
            RawValue(b"raw:" + name, bench.source[c][s.offset : s.offset + s.num_bytes])
            for name, c, s in places
        ]
        self._gets = [
            RawValue(b"raw:" + name, bench.target[c][s.offset : s.offset + s.num_bytes])
            for name, c, s in places
        ]
        set_all(bench.address, self._sets, _RAW_CHOICES[0])
        self._best_set = self._fastest(set_all, self._sets)
        self._best_get = self._fastest(get_all, self._gets)

    def set(self) -> None:
        set_all(self._bench.address, self._sets, self._best_set)

    def get(self) -> None:
        get_all(self._bench.address, self._gets, self._best_get)

    def _fastest(self, work: Callable[..., None], values: Sequence[RawValue]) -> RawSettings:
        seconds: dict[RawSettings, list[float]] = {choice: [] for choice in _RAW_CHOICES}
        for _ in range(3):
            for choice in _RAW_CHOICES:
                start = time.perf_counter()
                work(self._bench.address, values, choice)
                seconds[choice].append(time.perf_counter() - start)
        return min(seconds, key=lambda choice: statistics.median(seconds[choice]))


def _tier_set(bench: Bench, tier: RedisTier) -> None:
    left = threading.Semaphore(0)
    ends: list[bool] = []

    def on_done(stored: bool) -> None:
        ends.append(stored)
        left.release()

    for order, (key, view) in enumerate(zip(bench.keys, bench.source, strict=True)):
        tier.put(key, view, on_done, order)
    for _ in bench.keys:
        left.acquire(timeout=_SECONDS)
    if ends != [True] * len(bench.keys):
        raise RuntimeError(f"writes failed: {tier.stats()}")


def _tier_get(bench: Bench, tier: RedisTier) -> None:
    if not all(tier.read(bench.keys, bench.target, time.monotonic() + _SECONDS).hits):
        raise RuntimeError(f"reads failed: {tier.stats()}")


def _lmcache_speeds(bench: Bench, rounds: int, progress: Progress) -> dict[str, float]:
    """LMCache's ``redis://`` and ``resp://``; the latter knows no Unix sockets."""
    gbps = {}
    port = bench.server.port
    urls = {"lmcache_redis": bench.url, "lmcache_resp": f"resp://127.0.0.1:{port}"}
    for name, url in urls.items():
        task = progress.add_task(f"LMCache's own {url.split(':')[0]}://", total=1)
        mib = bench.num_bytes >> 20
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "benchmarks.lmcache_remote",
                url,
                f"{port}",
                f"{mib}",
                f"{rounds}",
            ],
            stdout=subprocess.PIPE,
            timeout=_LMCACHE_SECONDS,
            check=True,
        )
        for operation, seconds in json.loads(done.stdout.splitlines()[-1]).items():
            gbps[f"{name}_{operation}"] = bench.num_bytes / statistics.median(seconds) / 1e9
        progress.advance(task)
    bench.flush()
    return gbps


def _exists_ms(bench: Bench, rounds: int) -> float:
    """The look-up of a prompt of 128 chunks that are all there, in milliseconds."""
    config = RedisTierConfig(url=bench.url)
    random = np.random.default_rng(2)
    keys = [random.bytes(32) for _ in range(128)]
    with bench.server.client() as client, client.pipeline(transaction=False) as pipeline:
        for key in keys:
            for stripe in LLAMA_3_8B.stripes(config.max_payload_bytes):
                pipeline.set(chunk_tag(config.namespace, key) + stripe_suffix(stripe), b"x")
        pipeline.execute()
    lookup = RedisLookup(config, [LLAMA_3_8B])
    seconds = []
    for i in range(4 * rounds + 1):
        start = time.perf_counter()
        found = lookup.exists_prefix(keys, time.monotonic() + _SECONDS)
        if i:
            seconds.append(time.perf_counter() - start)
        if found != len(keys):
            raise RuntimeError(f"{found} of {len(keys)} chunks found")
    lookup.close()
    return statistics.median(seconds) * 1e3


def _time(seconds: dict[str, list[float]], name: str, work: Callable[[], None]) -> None:
    start = time.perf_counter()
    work()
    seconds.setdefault(name, []).append(time.perf_counter() - start)
