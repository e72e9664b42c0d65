"""Two real engines, one prefills and hands over to the other, against a plain socket and recompute.

For every prompt the prefill engine computes and keeps the KV; then the decode engine fetches it all
at once, so that what is timed is the transfer alone. The plain socket moves as many bytes between
two processes, from and to warm memory, with nothing around it. Both are measured in turns.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import socket
import statistics
import tempfile
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rich.progress import Progress

from tests.support.handover import Ask, ask, counters
from tests.support.instance import VllmInstance
from tests.support.p2p_engines import kv_transfer, running
from tests.support.p2p_instances import free_ports
from tests.support.tiny_model import DEMO_SHAPE, build_tiny_model

_VOCABULARY = 2000
_PIECES = (1 << 20, 1 << 22, 1 << 24, 1 << 40)
"""Bytes asked of one call, of which the best counts. The last is all of it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt-tokens", type=int, default=6000, help="length of each prompt")
    parser.add_argument("--rounds", type=int, default=7, help="prompts, for medians")
    parser.add_argument(
        "--send-type", choices=["GET", "PUT", "PUT_ASYNC"], default="GET", help="how KV moves"
    )


def run(args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    task = progress.add_task("Starting two engines", total=args.rounds + 1)
    with tempfile.TemporaryDirectory(prefix="lmcache-connector-p2p-") as name, ExitStack() as stack:
        folder = Path(name)
        ports = free_ports(1), free_ports(1)
        roles = zip(("kv_producer", "kv_consumer"), ports, strict=True)
        transfers = [kv_transfer(role, port, send_type=args.send_type) for role, port in roles]
        prefill, decode = stack.enter_context(
            running(
                build_tiny_model(folder / "model", DEMO_SHAPE),
                folder,
                transfers,
                kv_cache_memory_bytes=512 << 20,
            )
        )
        pair = _Pair(prefill, decode, ports, args.prompt_tokens)
        raw = stack.enter_context(_RawSocket(args.prompt_tokens * DEMO_SHAPE.kv_bytes_per_token))
        pair.round()  # unmeasured: memory is touched for the first time
        pair.recompute()
        rounds, recomputed, raw_gbps = [], [], []
        for number in range(args.rounds):
            progress.update(task, description=f"Round {number + 1}", advance=1)
            rounds.append(pair.round())
            raw_gbps.append(raw.gbps())
            recomputed.append(pair.recompute())
    transfer = statistics.median(r["gbps"] for r in rounds)
    ttft = statistics.median(r["ttft"] for r in rounds)
    cold = statistics.median(recomputed)
    return {
        "send_type": args.send_type,
        "prompt_tokens": args.prompt_tokens,
        "transfer_bytes": rounds[0]["bytes"],
        "kv_bytes_equal": all(r["equal"] for r in rounds),
        "hit_tokens": min(r["hit"] for r in rounds),
        "errors": sum(r["errors"] for r in rounds),
        "transfer_gbps": round(transfer, 3),
        "raw_socket_gbps": round(statistics.median(raw_gbps), 3),
        "transfer_vs_raw": round(transfer / statistics.median(raw_gbps), 3),
        "decode_ttft_s": round(ttft, 4),
        "recompute_ttft_s": round(cold, 4),
        "decode_ttft_vs_recompute": round(ttft / cold, 3),
    }


class _Pair:
    def __init__(
        self, prefill: VllmInstance, decode: VllmInstance, ports: tuple[int, int], num_tokens: int
    ) -> None:
        self._prefill, self._decode = prefill, decode
        self._ports = ports
        self._num_tokens = num_tokens
        self._rng = random.Random(0)
        self._count = 0

    def round(self) -> dict[str, Any]:
        """Hand one new prompt over. ``gbps``: from the first to the last byte received."""
        self._count += 1
        name = (
            f"___prefill_addr_127.0.0.1:{self._ports[0]}"
            f"___decode_addr_127.0.0.1:{self._ports[1]}_{self._count}"
        )
        prompt = self._prompt()
        cold = self._prefill.call(ask, Ask(name, prompt, 1))
        before = self._decode.call(counters)
        hit = self._decode.call(ask, Ask(name, prompt))
        after = self._decode.call(counters)
        num_bytes = after["p2p_received_bytes"] - before["p2p_received_bytes"]
        seconds = after["p2p_receive_seconds"] - before["p2p_receive_seconds"]
        failed = after["p2p_failed_loads"] - before["p2p_failed_loads"]
        return {
            "equal": () != hit.served.block_digests == cold.served.block_digests,
            "hit": hit.served.external_hit_tokens,
            "errors": failed + (hit.finish_reason != "length") + (cold.finish_reason != "length"),
            "bytes": num_bytes,
            "gbps": num_bytes / seconds / 1e9 if seconds else 0.0,
            "ttft": hit.served.ttft_seconds,
        }

    def recompute(self) -> float:
        """Time to first token of a prompt the decode engine computes itself."""
        answer = self._decode.call(ask, Ask(f"recompute-{self._count}", self._prompt()))
        seconds: float = answer.served.ttft_seconds
        return seconds

    def _prompt(self) -> list[int]:
        return [self._rng.randrange(1, _VOCABULARY) for _ in range(self._num_tokens)]


class _RawSocket:
    """Another process that sends ``num_bytes`` when asked to."""

    def __init__(self, num_bytes: int) -> None:
        self._target = _memory(num_bytes)
        self._listener = socket.create_server(("127.0.0.1", 0))
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        port = self._listener.getsockname()[1]
        self._process = context.Process(target=_send_for_ever, args=(theirs, port, num_bytes))

    def __enter__(self) -> _RawSocket:
        self._process.start()
        self._socket, _ = self._listener.accept()
        self.gbps()  # unmeasured
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.send_bytes(json.dumps(False).encode())
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
        self._socket.close()
        self._listener.close()

    def gbps(self) -> float:
        """The fastest of several ways, from the first to the last byte received."""
        return max(self._once(piece_bytes) for piece_bytes in _PIECES)

    def _once(self, piece_bytes: int) -> float:
        self._pipe.send_bytes(json.dumps(True).encode())
        done = self._socket.recv_into(self._target[:1])
        started = time.perf_counter()
        while done < len(self._target):
            piece = self._target[done : done + piece_bytes]
            done += self._socket.recv_into(piece, len(piece), socket.MSG_WAITALL)
        return len(self._target) / (time.perf_counter() - started) / 1e9


def _memory(num_bytes: int) -> memoryview:
    """Of the kind that hand-overs use, touched before."""
    import torch

    return memoryview(torch.ones(num_bytes, dtype=torch.uint8).numpy())


def _send_for_ever(pipe: Connection, port: int, num_bytes: int) -> None:
    source = _memory(num_bytes)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while json.loads(pipe.recv_bytes()):
            connection.sendall(source)
