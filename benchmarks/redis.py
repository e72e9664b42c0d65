"""The Redis tier's speed, compared with a plain socket and with LMCache's own connectors.

Chunks of a Llama-3-8B (32 layers, 8 KV heads of 128, bf16, 256 tokens: 32 MiB) with checksums, all
in one run on one server on this machine. The plain socket and the tier take turns, so that a ratio
compares neighbours in time; LMCache's follow (``resp://`` has no Unix sockets). Every byte read is
compared with the one written.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from rich.progress import Progress

from benchmarks.harness.ratios import Stopwatch
from benchmarks.harness.redis_tier import (
    lookup_seconds,
    open_lookup,
    open_tier,
    read_all,
    write_all,
)
from benchmarks.peers.raw_resp import RawSettings, RawValue, get_all, set_all
from lmcache_connector.storage.geometry import ChunkGeometry
from lmcache_connector.storage.redis.config import RedisTierConfig
from lmcache_connector.storage.redis.value_names import chunk_tag, stripe_suffix
from tests.support.redis.servers import Server, redis_binary, running_server, valkey_binary

LLAMA_3_8B = ChunkGeometry(
    num_tokens=256,
    layer_start=0,
    layer_widths=(2 * 128 * 2,) * 32,
    shards=tuple(range(8)),
    num_shards_total=8,
    dtype="bfloat16",
)
_RAW_CHOICES = [RawSettings(c, w) for c in (1, 2) for w in (2, 4)]
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
    """Every client writes ``source`` and reads into ``target``."""

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

    def gbps(self, watch: Stopwatch) -> dict[str, float]:
        """Median speeds of moving all chunks once, in GB/s."""
        return {name: self.num_bytes / taken / 1e9 for name, taken in watch.medians().items()}

    def flush(self) -> None:
        with self.server.client() as client:
            client.flushall()

    def forget(self) -> None:
        """Overwrite one byte in 64 KiB of those read before: only a new read makes all equal."""
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


def _own_speeds(bench: Bench, rounds: int, progress: Progress) -> dict[str, float]:
    """Plain client and tier, in turns."""
    watch = Stopwatch()
    with open_tier(bench.url, LLAMA_3_8B) as tier:
        raw = _RawSpeed(bench)
        turns: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
            "raw": (raw.set, raw.get),
            "tier": (
                partial(write_all, tier, bench.keys, bench.source),
                partial(read_all, tier, bench.keys, bench.target),
            ),
        }
        turn = progress.track(watch.rounds(rounds), rounds + 1, description="raw socket and tier")
        for i in turn:
            # The order changes, so that neither always finds the warmer caches.
            for name in sorted(turns, reverse=bool(i % 2)):
                write, read = turns[name]
                bench.flush()
                watch.time(f"{name}_set", write)
                bench.forget()
                for _ in range(2):
                    watch.time(f"{name}_get", read)
                bench.check()
    bench.flush()
    return bench.gbps(watch)


class _RawSpeed:
    """The plain client on the tier's own values, with its best settings."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        stripes = LLAMA_3_8B.stripes(RedisTierConfig(url=bench.url).max_payload_bytes)
        places = [
            (chunk_tag("default", key) + stripe_suffix(stripe), chunk, stripe)
            for chunk, key in enumerate(bench.keys)
            for stripe in stripes
        ]
        # The tier's cuts, without headers, which are the tier's own cost.
        self._sets, self._gets = (
            [
                RawValue(b"raw:" + name, chunks[c][s.offset : s.offset + s.num_bytes])
                for name, c, s in places
            ]
            for chunks in (bench.source, bench.target)
        )
        set_all(bench.address, self._sets, _RAW_CHOICES[0])
        self._best_set = self._fastest(set_all, self._sets)
        self._best_get = self._fastest(get_all, self._gets)

    def set(self) -> None:
        set_all(self._bench.address, self._sets, self._best_set)

    def get(self) -> None:
        get_all(self._bench.address, self._gets, self._best_get)

    def _fastest(self, work: Callable[..., None], values: Sequence[RawValue]) -> RawSettings:
        watch, choices = Stopwatch(), {str(choice): choice for choice in _RAW_CHOICES}
        for _ in range(3):
            for name, choice in choices.items():
                watch.time(name, partial(work, self._bench.address, values, choice))
        medians = watch.medians()
        return choices[min(medians, key=medians.__getitem__)]


def _lmcache_speeds(bench: Bench, rounds: int, progress: Progress) -> dict[str, float]:
    """LMCache's ``redis://``, and ``resp://`` over TCP alone."""
    watch = Stopwatch()
    port, mib = bench.server.port, bench.num_bytes >> 20
    urls = {"lmcache_redis": bench.url}
    if not bench.unix:
        urls["lmcache_resp"] = f"resp://127.0.0.1:{port}"
    for name, url in progress.track(urls.items(), description="LMCache's own connectors"):
        module = "benchmarks.peers.lmcache_remote"
        done = subprocess.run(
            [sys.executable, "-m", module, url, str(port), str(mib), str(rounds)],
            stdout=subprocess.PIPE,
            timeout=_LMCACHE_SECONDS,
            check=True,
        )
        for operation, seconds in json.loads(done.stdout.splitlines()[-1]).items():
            watch.seconds[f"{name}_{operation}"] = seconds
    bench.flush()
    return bench.gbps(watch)


def _exists_ms(bench: Bench, rounds: int) -> float:
    """A lookup of a prompt of 128 chunks, all hits, in milliseconds."""
    config = RedisTierConfig(url=bench.url)
    random = np.random.default_rng(2)
    keys = [random.bytes(32) for _ in range(128)]
    with bench.server.client() as client, client.pipeline(transaction=False) as pipeline:
        for key in keys:
            for stripe in LLAMA_3_8B.stripes(config.max_payload_bytes):
                pipeline.set(chunk_tag(config.namespace, key) + stripe_suffix(stripe), b"x")
        pipeline.execute()
    with open_lookup(bench.url, LLAMA_3_8B) as lookup:
        return 1e3 * lookup_seconds(lookup, keys, 4 * rounds)
