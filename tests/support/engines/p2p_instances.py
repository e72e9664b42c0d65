"""Worker sides of whole instances in this process: real ports, real copies, no model.

A step is driven as vLLM drives it; the "forward pass" writes numbers that name their place.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

import torch

from lmcache_connector.copy_kv_blocks.copier import Copier, make_copier
from lmcache_connector.kv_layout.topology import RankTopology, all_ranks
from lmcache_connector.p2p.config import P2PConfig
from lmcache_connector.p2p.control.address import PeerAddress
from lmcache_connector.p2p.control.messages import Card
from lmcache_connector.p2p.data.base import Transport
from lmcache_connector.p2p.plans import (
    HandoverHold,
    HandoverLoad,
    HandoverPlan,
    HandoverReport,
    HandoverResult,
    HeldPrompt,
    Save,
    Start,
)
from lmcache_connector.p2p.reasons import Reason
from lmcache_connector.p2p.worker.adapter import P2PWorkerAdapter
from lmcache_connector.p2p.worker.settings import P2PWorkerSettings
from lmcache_connector.plans import StepOutput
from lmcache_connector.storage.geometry import ChunkGeometry
from tests.support.redis.servers import free_port

BLOCK_SIZE = 16
NUM_BLOCKS = 64
WIDTH = 64
NUM_LAYERS = 3
NUM_HEADS = 4
LAYERS = [f"layer.{i}" for i in range(NUM_LAYERS)]
DIGEST = bytes(range(32))
SECRET = "known to all of them"
PATIENCE_SECONDS = 60.0
SHUFFLED = [9, 3, 4, 30, 2, 11, 60]
OTHERS = [5, 50, 6, 7, 31, 8, 1]


@cache
def _copier() -> Copier:
    """One for all: making one takes a second."""
    return make_copier(torch.device("cpu"))


def free_ports(count: int) -> int:
    """The first of ``count`` ports in a row that nobody listens on, as far as one can know."""
    import socket

    while True:
        port = free_port()
        try:
            for offset in range(1, count):
                with socket.create_server(("127.0.0.1", port + offset)):
                    pass
        except OSError:
            continue
        return port


@dataclass
class FakeRank:
    topology: RankTopology
    caches: dict[str, torch.Tensor]
    worker: P2PWorkerAdapter

    def block(self, layer: int, head: int, block_id: int) -> bytes:
        """Layer and head counted over the model."""
        place = self.topology.read_shards.index(head)
        tensor = self.caches[LAYERS[layer]]
        return bytes(tensor[block_id, place].numpy().tobytes())


@dataclass
class FakeInstance:
    """All ranks of one instance, driven in step."""

    address: PeerAddress
    ranks: list[FakeRank]
    results: dict[str, list[HandoverResult]] = field(default_factory=dict)
    sent: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    unsent: list[tuple[str, Reason]] = field(default_factory=list)

    def step(
        self, plan: HandoverPlan, forward: Callable[[int], None] = lambda layer: None
    ) -> list[StepOutput[HandoverReport]]:
        """``forward(layer)`` computes one layer on all ranks."""
        workers = [rank.worker for rank in self.ranks]
        for worker in workers:
            worker.handle_preemptions(plan)
            worker.start_forward(plan)
        for layer in range(NUM_LAYERS):
            forward(layer)
            for worker in workers:
                worker.save_layer(LAYERS[layer])
        for worker in workers:
            worker.start_loads(plan)
            worker.end_forward(plan)
        outputs = [worker.finish_step() for worker in workers]
        for output in outputs:
            self._note(output)
        return outputs

    def _note(self, output: StepOutput[HandoverReport]) -> None:
        self.sent += output.finished_sending
        if output.report is not None:
            for result in output.report.loads:
                self.results.setdefault(result.request_id, []).append(result)
            self.released += output.report.released
            self.unsent += output.report.unsent

    def compute(self, block_ids: Sequence[int], seed: int) -> Callable[[int], None]:
        """A forward pass that fills these blocks."""

        def forward(layer: int) -> None:
            for rank in self.ranks:
                for block_id in block_ids:
                    for place, head in enumerate(rank.topology.read_shards):
                        generator = torch.Generator().manual_seed(
                            ((seed * 1000 + layer) * 1000 + head) * 1000 + block_id
                        )
                        rank.caches[LAYERS[layer]][block_id, place] = torch.randint(
                            0, 256, (BLOCK_SIZE, WIDTH), dtype=torch.uint8, generator=generator
                        )

        return forward

    def prefill(
        self,
        transfer_id: str,
        block_ids: Sequence[int],
        target: PeerAddress | None = None,
        *,
        per_step: int = 0,
        seed: int = 1,
        num_tokens: int = 0,
    ) -> None:
        """Compute and save a prompt of these blocks, ``per_step`` blocks at a time."""
        num_tokens = num_tokens or len(block_ids) * BLOCK_SIZE
        per_step = per_step or len(block_ids)
        for first in range(0, len(block_ids), per_step):
            ids = tuple(block_ids[first : first + per_step])
            start = Start(transfer_id, DIGEST, num_tokens, target)
            save = Save(transfer_id, first, ids, first + per_step >= len(block_ids))
            plan = HandoverPlan(starts=() if first else (start,), saves=(save,))
            self.step(plan, self.compute(ids, seed))

    def hold(
        self, transfer_id: str, block_ids: Sequence[int], *, seed: int = 1, digest: bytes = DIGEST
    ) -> None:
        """Compute a prompt that stays in these blocks."""
        prompt = HeldPrompt(digest, len(block_ids) * BLOCK_SIZE, tuple(block_ids))
        self.step(HandoverPlan(announced=(transfer_id,)), self.compute(block_ids, seed))
        hold = HandoverHold(f"request of {transfer_id}", transfer_id, prompt)
        self.step(HandoverPlan(holds=(hold,)))

    def load(
        self,
        transfer_id: str,
        block_ids: Sequence[int],
        source: PeerAddress,
        *,
        first_block: int = 0,
        seconds: float = PATIENCE_SECONDS,
        request_id: str = "",
        digest: bytes = DIGEST,
    ) -> None:
        """Begin to wait for it."""
        request_id = request_id or f"request of {transfer_id}"
        num_tokens = (first_block + len(block_ids)) * BLOCK_SIZE
        self.step(
            HandoverPlan(
                loads=(
                    HandoverLoad(
                        request_id,
                        transfer_id,
                        digest,
                        num_tokens,
                        source,
                        first_block,
                        tuple(block_ids),
                        seconds,
                    ),
                )
            )
        )

    def finish(self, request_id: str, seconds: float = PATIENCE_SECONDS) -> list[HandoverResult]:
        """Idle steps until all ranks have reported the request."""
        self.until(lambda: len(self.results.get(request_id, ())) == len(self.ranks), seconds)
        return self.results[request_id]

    def until(self, done: Callable[[], bool], seconds: float = PATIENCE_SECONDS) -> None:
        end = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < end, "it does not come"
            self.step(HandoverPlan(idle=True, waits_for_room=True))

    def content(self, block_ids: Sequence[int]) -> dict[tuple[int, int, int], bytes]:
        """By layer, head and place in ``block_ids``. Replicas must agree."""
        found: dict[tuple[int, int, int], bytes] = {}
        for rank in self.ranks:
            for layer in range(NUM_LAYERS):
                for head in rank.topology.read_shards:
                    for place, block_id in enumerate(block_ids):
                        data = rank.block(layer, head, block_id)
                        assert found.setdefault((layer, head, place), data) == data
        return found

    @property
    def used_bytes(self) -> int:
        return sum(rank.worker.used_bytes for rank in self.ranks)


def check_all_arrived(
    prefill: FakeInstance,
    decode: FakeInstance,
    transfer_id: str,
    sent: Sequence[int] = SHUFFLED,
    received: Sequence[int] = OTHERS,
) -> None:
    """All blocks arrived, byte by byte."""
    results = decode.finish(f"request of {transfer_id}")
    assert [(r.num_blocks, r.cause) for r in results] == [(len(received), None)] * len(results)
    assert decode.content(received) == prefill.content(sent)
    assert sum(r.wire_bytes for r in results) >= (
        len(received) * NUM_LAYERS * NUM_HEADS * BLOCK_SIZE * WIDTH
    )


@contextmanager
def running_instance(
    *,
    tp_size: int = 1,
    num_heads: int = NUM_HEADS,
    produces: bool = False,
    consumes: bool = False,
    model: str = "a model",
    block_size: int = BLOCK_SIZE,
    make_transport: Callable[[P2PConfig], Transport] | None = None,
    port: int = 0,
    **config: object,
) -> Iterator[FakeInstance]:
    """All ranks of one instance, on free ports unless ``port`` is the first. ``config``: settings
    other than the tests' own, in which no silence of a busy machine is a fault."""
    defaults = {"kv_buffer_size": 1 << 24, "transport": "tcp"}
    defaults |= {"stall_seconds": 20.0, "unknown_grace_seconds": 20.0}
    if config.get("transport", "tcp") != "tcp":
        defaults["secret"] = SECRET
    settings = P2PConfig(**{**defaults, **config})  # type: ignore[arg-type]
    address = PeerAddress("127.0.0.1", port or free_ports(tp_size))
    instance = FakeInstance(address, [])
    try:
        for topology in all_ranks(
            tp_size=tp_size, layer_counts=(NUM_LAYERS,), num_kv_heads=num_heads
        ):
            card = _card(address, topology, model, block_size, tp_size)
            rank_settings = _worker_settings(settings, card, topology, produces, consumes)
            transports = [make_transport(settings)] if make_transport is not None else []
            instance.ranks.append(_start_rank(rank_settings, transports))
        yield instance
    finally:
        for rank in instance.ranks:
            rank.worker.shutdown()


def _card(
    address: PeerAddress, topology: RankTopology, model: str, block_size: int, tp_size: int
) -> Card:
    return Card(
        engine_id=f"engine at {address}",
        host=address.host,
        port=address.port,
        rank=topology.rank,
        model={"weights": model},
        block_size=block_size,
        tp_size=tp_size,
        layer_counts=(NUM_LAYERS,),
        num_kv_heads=topology.num_shards_total,
        is_mla=False,
        transports={},
    )


def _worker_settings(
    config: P2PConfig, card: Card, topology: RankTopology, produces: bool, consumes: bool
) -> P2PWorkerSettings:
    geometry = ChunkGeometry(
        card.block_size,
        0,
        (WIDTH,) * NUM_LAYERS,
        topology.read_shards,
        card.num_kv_heads,
        "uint8",
    )
    return P2PWorkerSettings(
        config=config,
        card=card,
        own=topology,
        block_geometry=geometry,
        layer_widths=dict.fromkeys(LAYERS, WIDTH),
        num_kv_heads=len(topology.read_shards),
        max_block_bytes=geometry.chunk_bytes,
        max_blocks=NUM_BLOCKS,
        produces=produces,
        consumes=consumes,
    )


def _start_rank(settings: P2PWorkerSettings, transports: Sequence[Transport]) -> FakeRank:
    shape = (NUM_BLOCKS, settings.num_kv_heads, settings.card.block_size, WIDTH)
    caches = {name: torch.zeros(shape, dtype=torch.uint8) for name in LAYERS}
    by_name = {transport.name: transport for transport in transports}
    worker = P2PWorkerAdapter(settings, caches, transports=by_name, copier=_copier())
    return FakeRank(settings.own, caches, worker)
