"""Engines of one host that share their CPU tiers, without Redis.

Two engines of one model find each other by themselves. One computes a prompt; the other loads it
from the first one's memory (``host``), and then from its own (``cpu``), in turns; with and without
a ``hash_key``. ``decode_throughput_vs_empty``: of the second engine beside the idle first one, over
a connector that does nothing in the same process.

``tp2_memory_vs_tp1``: bytes of chunks in the CPU tiers after the same prompts, of an engine with
two tensor-parallel ranks over one with one rank, for a model whose one KV head both ranks have.

``lookups``: one lookup at so many peers over loopback, all of them in another process:
``lookup_us`` until every chunk is found, ``asker_cpu_us`` of the asking thread, ``answer_cpu_us``
of one peer for its answer, and ``answers_core_share_at_1000``, a peer's time for answers if 1,000
peers each look up once per second.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from rich.progress import Progress

from benchmarks.growth_parts import SMALL
from benchmarks.harness.engine_timings import decode_tokens_per_second, with_empty_connector
from benchmarks.harness.engines import Engines, Way
from benchmarks.harness.ratios import median, median_ratio, pairwise, spread
from examples.tiny_model import DEMO_SHAPE
from lmcache_connector.kv_parts.owners import Share
from lmcache_connector.net.address import Address
from lmcache_connector.net.deadline import Deadline
from lmcache_connector.peers.commands import Greeting
from lmcache_connector.peers.lookup import PeerLookup
from lmcache_connector.peers.topology import PeerTopology
from lmcache_connector.storage.geometry import PartGeometries
from lmcache_connector.storage.redis.config import RedisTierConfig
from tests.support.engines.calls import forget, stored_on_ranks
from tests.support.engines.instance import VllmInstance
from tests.support.engines.probe import Served
from tests.support.engines.settings import random_prompt, tiered_transfer
from tests.support.peers import HeldChunks, serving
from tests.support.redis.chunks import chunk_key

_HASH_KEY = "shared by the two engines"
_PEERS = (1, 8, 32)
_LOOKUP_CHUNKS = 24
_LOOKUPS = 200
_PARTS = PartGeometries((SMALL,))
_DECODING = Way("reader")
_DECODING_EMPTY = Way("reader", with_empty_connector)
_SECONDS = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt-tokens", type=int, default=6000, help="length of a prompt")
    parser.add_argument("--rounds", type=int, default=8, help="hits of each kind")
    parser.add_argument("--decode-rounds", type=int, default=6, help="of eight requests")


def run(args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    task = progress.add_task("lookups", total=4)
    lookups = [_look_up(number) for number in _PEERS]
    progress.update(task, advance=1, description="memory of tensor-parallel ranks")
    memory = [_stored_bytes(args, ranks) for ranks in (1, 2)]
    progress.advance(task)
    hits, ratios = [], []
    for hash_key in (None, _HASH_KEY):
        progress.update(task, description=f"hits {'with' if hash_key else 'without'} a hash_key")
        with _pair(hash_key) as (owner, reader):
            hits.append(_hits(args, owner, reader, hash_key))
            if hash_key is None:
                ratios = _decode(args, reader)
        progress.advance(task)
    plain, keyed = hits
    return {
        "prompt_tokens": args.prompt_tokens,
        "host_hit_vs_cpu_hit": plain["host_hit_vs_cpu_hit"],
        "host_hit_vs_cpu_hit_with_hash_key": keyed["host_hit_vs_cpu_hit"],
        "tp1_stored_bytes": memory[0],
        "tp2_memory_vs_tp1": round(memory[1] / memory[0], 3),
        "decode_throughput_vs_empty": median(ratios),
        "decode_ratios": spread(ratios),
        "kv_bytes_equal": all(each["kv_bytes_equal"] for each in hits),
        "hits": hits,
        "lookups": lookups,
    }


# -- hits ----------------------------------------------------------------------------------------


@contextmanager
def _pair(hash_key: str | None) -> Iterator[list[VllmInstance]]:
    """An engine that computes and one that loads. Each is idle while the other is measured."""
    with Engines() as engines:
        extra: dict[str, Any] = {"hash_key": hash_key} if hash_key else {}
        # An audited chunk is computed, and its rounding may differ.
        extra |= {"compute_or_load": "always", "audit_share": 0.0}
        folder = str(engines.folder / "host")
        transfer = tiered_transfer(cpu_gib=1, host_folder=folder, **extra)
        yield [
            engines.start(name, transfer, max_model_len=8192, kv_cache_memory_bytes=512 << 20)
            for name in ("owner", "reader")
        ]


def _hits(
    args: argparse.Namespace, owner: VllmInstance, reader: VllmInstance, hash_key: str | None
) -> dict[str, Any]:
    cold, host, cpu = list[Served](), list[Served](), list[Served]()
    before = _mapped_chunks(reader)
    for number in range(args.rounds + 1):  # the first is unmeasured
        prompt = random_prompt(number, args.prompt_tokens)
        cold.append(owner.serve(prompt))
        reader.call(forget)
        host.append(reader.serve(prompt))
        reader.reset_prefix_cache()
        cpu.append(reader.serve(prompt))
    here, own, computed = (
        [each.ttft_seconds for each in served[1:]] for served in (host, cpu, cold)
    )
    return {
        "hash_key": hash_key is not None,
        "host_hit_vs_cpu_hit": median_ratio(here, own),
        "host_hit_s": median(here),
        "cpu_hit_s": median(own),
        "cold_s": median(computed),
        "hit_tokens": min(each.external_hit_tokens for each in (*host, *cpu)),
        "mapped_chunks_per_hit": (_mapped_chunks(reader) - before) / len(host),
        "kv_bytes_equal": all(
            () != first.block_digests == second.block_digests == third.block_digests
            for first, second, third in zip(cold, host, cpu, strict=True)
        ),
    }


def _mapped_chunks(instance: VllmInstance) -> float:
    return instance.counts().total("peer_mapped_chunks")


def _decode(args: argparse.Namespace, reader: VllmInstance) -> list[float]:
    """Throughput with the connector over that with an empty one, round by round."""
    engines, measured = {"reader": reader}, dict[Way, list[float]]()
    prompts = [random_prompt(50_000 + i, 64) for i in range(8)]
    for number in range(args.decode_rounds + 1):
        ways = [_DECODING, _DECODING_EMPTY][:: -1 if number % 2 else 1]
        for way in ways:
            speed = way.measure(engines, decode_tokens_per_second, prompts, 256)
            if number:
                measured.setdefault(way, []).append(speed)
    return pairwise(measured[_DECODING], measured[_DECODING_EMPTY])


# -- memory --------------------------------------------------------------------------------------


def _stored_bytes(args: argparse.Namespace, num_ranks: int) -> int:
    """In the CPU tiers of all ranks, after the same prompts."""
    with Engines(replace(DEMO_SHAPE, num_kv_heads=1)) as engines:
        engine = engines.start(
            f"tp{num_ranks}",
            tiered_transfer(cpu_gib=1, host_folder=str(engines.folder / "host")),
            tensor_parallel_size=num_ranks,
            max_model_len=8192,
            kv_cache_memory_bytes=512 << 20,
        )
        for number in range(2):
            engine.serve(random_prompt(number, args.prompt_tokens))
        return sum(size for size, _ in engine.call(stored_on_ranks))


# -- lookups ------------------------------------------------------------------------------------


def _look_up(number: int) -> dict[str, Any]:
    """Look up chunks that only the last of so many peers has."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, number), daemon=True)
    process.start()
    try:
        addresses = [Address("127.0.0.1", port) for port in pipe.recv()]
        config = RedisTierConfig(url="redis://peers")
        own = Greeting(1, "asker")
        topology = PeerTopology(config, addresses, own, Share(0), time.monotonic)
        lookup = PeerLookup(config, [_PARTS], topology, connect_share=1.0)
        try:
            return {"peers": number} | _ask(lookup, pipe, number)
        finally:
            lookup.close()
    finally:
        process.kill()
        process.join()


def _ask(lookup: PeerLookup, pipe: Connection, number: int) -> dict[str, Any]:
    keys = [chunk_key(i) for i in range(_LOOKUP_CHUNKS)]
    until = time.monotonic() + _SECONDS
    while None in lookup.find_places(keys, Deadline(until, time.monotonic)):
        if time.monotonic() > until:
            raise RuntimeError("a peer does not answer")
    taken, cpu = list[float](), list[float]()
    served = _cpu_seconds(pipe)
    for _ in range(_LOOKUPS):
        started, cpu_started = time.perf_counter(), time.thread_time()
        places = lookup.find_places(keys, Deadline(time.monotonic() + 1.0, time.monotonic))
        cpu.append(time.thread_time() - cpu_started)
        taken.append(time.perf_counter() - started)
        if None in places:
            raise RuntimeError("a lookup has no answer")
    answer = (_cpu_seconds(pipe) - served) / _LOOKUPS / number
    return {
        "chunks": len(keys),
        "lookup_us": round(1e6 * statistics.median(taken)),
        "asker_cpu_us": round(1e6 * statistics.median(cpu)),
        "answer_cpu_us": round(1e6 * answer),
        "answers_core_share_at_1000": round(1000 * answer, 3),
    }


def _cpu_seconds(pipe: Connection) -> float:
    """CPU time of the serving process so far."""
    pipe.send("cpu")
    seconds: float = pipe.recv()
    return seconds


def _serve(pipe: Connection, number: int) -> None:
    """Peers in one process, the last of which has chunks."""
    held: Sequence[HeldChunks] = [
        HeldChunks(range(_LOOKUP_CHUNKS if i == number - 1 else 0), _PARTS) for i in range(number)
    ]
    with ExitStack() as stack:
        start = partial(serving, ranks=[_PARTS])
        servers = [
            stack.enter_context(start(each, engine_id=f"peer-{i}")) for i, each in enumerate(held)
        ]
        pipe.send([server.port for server in servers])
        while pipe.recv():
            pipe.send(time.process_time())
