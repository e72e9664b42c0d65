"""A model of four KV cache groups that overlay one memory: three parts, through the tiers and back.

Two groups of window layers, one of full attention with other heads and blocks, one of states. What
comes back is compared with what every layer, head and token was given.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache

import pytest
import torch

from lmcache_connector.copy_kv_blocks.copier import Copier, make_copier
from lmcache_connector.kv_layout.topology import GroupLayers, PartLayout, all_ranks, ranks_alike
from lmcache_connector.kv_parts.owners import Owners, Share
from lmcache_connector.kv_parts.part import Part, Rule, part_key
from lmcache_connector.plans import (
    AuditJob,
    JobResult,
    LoadJob,
    Outcome,
    PartRun,
    StepPlan,
    StoreJob,
)
from lmcache_connector.storage.geometry import ChunkGeometry, PartGeometries
from lmcache_connector.storage.redis.config import RedisTierConfig
from lmcache_connector.storage.redis.tier import RedisTier
from lmcache_connector.worker import rank_tiers
from lmcache_connector.worker.adapter import WorkerAdapter
from lmcache_connector.worker.lmcache_engine import RunTransfer
from lmcache_connector.worker.lmcache_start import RankSettings
from tests.support.jobs import tier_config
from tests.support.redis.servers import Server
from tests.support.workers import FixedWeights, SteppedWorker

CHUNK, PAGE, NUM_BLOCKS, NUM_PARTS = 32, 4096, 64, 3
FULL, WINDOW, STATE = range(NUM_PARTS)
CONTENT = (64, 128, 2000)  # bytes of a token and a head, or of a state, by part
HEADS, BLOCK = (4, 2, 1), (16, 16, 1)
LONG = 60.0
# The layers of each group in model order; group 1 is full attention, group 3 holds states.
GROUPS = ((0, 2, 3), (1, 4), (5, 6), (7, 8))
PART_OF_GROUP = (WINDOW, FULL, WINDOW, STATE)
GROUPS_OF = {WINDOW: (0, 2), FULL: (1,), STATE: (3,)}


@cache
def truth(layer: int, head: int, chunk: int, content: int) -> torch.Tensor:
    """uint8 ``[tokens, content]``: what the layer has of that head and chunk."""
    seed = hashlib.sha256(repr((layer, head, chunk)).encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(seed[:4], "big"))
    return torch.randint(0, 256, (CHUNK, content), dtype=torch.uint8, generator=generator)


def parts(tp_size: int) -> tuple[PartLayout, ...]:
    found = []
    for part, rule in enumerate((Rule.PREFIX, Rule.WINDOW, Rule.STATE)):
        layers = sorted(layer for group in GROUPS_OF[part] for layer in GROUPS[group])
        heads = tp_size if part == STATE else HEADS[part]
        ranks = all_ranks(tp_size=tp_size, layer_counts=(len(layers),), num_kv_heads=heads)
        found.append(
            PartLayout(
                part=Part(rule, GROUPS_OF[part], CHUNK if part == STATE else BLOCK[part], 40),
                groups=tuple(
                    GroupLayers(
                        tuple(f"layers.{layer}" for layer in GROUPS[group]),
                        tuple(layers.index(layer) for layer in GROUPS[group]),
                    )
                    for group in GROUPS_OF[part]
                ),
                geometries=tuple(
                    ChunkGeometry(
                        num_tokens=1 if part == STATE else CHUNK,
                        layer_start=0,
                        layer_widths=(CONTENT[part],) * len(layers),
                        shards=rank.shards,
                        num_shards_total=heads,
                        dtype="uint8",
                    )
                    for rank in ranks
                ),
                num_kv_heads=heads // tp_size,
                planes=(),
                formats=("opaque",) * len(layers),
            )
        )
    return tuple(found)


def geometries(tp_size: int, rank: int) -> PartGeometries:
    return PartGeometries(tuple(part.geometries[rank] for part in parts(tp_size)))


@dataclass
class Rank:
    """One rank, its worker and its memory: the n-th layer of every group lies in the n-th slot."""

    tp_size: int
    rank: int
    server: Server | None = None
    rank_gib: float = 0.02
    memory: torch.Tensor = field(init=False)
    caches: dict[str, torch.Tensor] = field(init=False)
    worker: WorkerAdapter = field(init=False)

    def __post_init__(self) -> None:
        slots = max(map(len, GROUPS))
        self.memory = torch.full((slots, NUM_BLOCKS, PAGE), 7, dtype=torch.uint8)
        self.caches = {
            f"layers.{layer}": self._view(slot, PART_OF_GROUP[number])
            for number, group in enumerate(GROUPS)
            for slot, layer in enumerate(group)
        }
        model = parts(self.tp_size)
        settings = RankSettings(
            tier_config(self.rank_gib),
            self.rank,
            self.tp_size,
            parts=model,
        )
        redis = None
        if self.server is not None:
            owners = Owners(tuple(ranks_alike(part.geometries) for part in model))
            config = RedisTierConfig(url=self.server.url, read_timeout_seconds=LONG)
            own = geometries(self.tp_size, self.rank)
            redis = RedisTier(config, own, Share(self.rank, owners).is_owner)
        self.worker = WorkerAdapter(settings, self.caches, redis, FixedWeights())
        self.steps = SteppedWorker(self.worker, self.caches)

    def _view(self, slot: int, part: int) -> torch.Tensor:
        """``[blocks, heads, tokens, content]``, as vLLM registers it: a page may be longer."""
        heads = max(1, HEADS[part] // self.tp_size)
        used = self.memory[slot, :, : heads * BLOCK[part] * CONTENT[part]]
        return used.unflatten(1, (heads, BLOCK[part], CONTENT[part]))

    def fill(self, run: PartRun) -> None:
        """Let the model compute the chunks of a run."""
        for layer, block, expected in self._blocks(run):
            self.caches[f"layers.{layer}"][block] = expected

    def holds(self, run: PartRun) -> bool:
        """Whether the blocks of a run have what the model would have computed."""
        return all(
            torch.equal(self.caches[f"layers.{layer}"][block], expected)
            for layer, block, expected in self._blocks(run)
        )

    def _blocks(self, run: PartRun) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Layer, block, and ``[heads, tokens, content]`` of it."""
        size = BLOCK[run.part]
        per_chunk = 1 if run.part == STATE else CHUNK // size
        shards = parts(self.tp_size)[run.part].geometries[self.rank].shards
        for group, ids in zip(GROUPS_OF[run.part], run.block_ids, strict=True):
            for place, block in enumerate(ids, start=run.skip_blocks):
                chunk, first = run.chunks[place // per_chunk], place % per_chunk * size
                for layer in GROUPS[group]:
                    heads = [truth(layer, s, chunk, CONTENT[run.part]) for s in shards]
                    yield layer, block, torch.stack(heads)[:, first : first + size]

    def result(self, job: StoreJob | LoadJob) -> JobResult:
        if isinstance(job, LoadJob):
            self.steps.run(StepPlan(loads=(job,)))
        else:
            self.steps.run(StepPlan(stores=(job,)))
        return self.steps.wait_for(job.job_id)


def key(chunk: int, part: int) -> bytes:
    return part_key(hashlib.sha256(bytes((chunk,))).digest(), part, NUM_PARTS)


def run_of(part: int, chunks: range, first_block: int, skip: int = 0) -> PartRun:
    """Blocks from ``first_block`` on, downwards in every second group."""
    count = len(chunks) * (1 if part == STATE else CHUNK // BLOCK[part]) - skip
    ids = []
    for number in range(len(GROUPS_OF[part])):
        own = range(first_block + number * count, first_block + (number + 1) * count)
        ids.append(tuple(own if number % 2 else reversed(own)))
    return PartRun(part, tuple(key(i, part) for i in chunks), tuple(chunks), tuple(ids), skip)


PREFIX_RUN = run_of(FULL, range(4), 1)
WINDOW_RUN = run_of(WINDOW, range(2, 4), 9)
STATE_RUN = run_of(STATE, range(3, 4), 17)
RUNS = (PREFIX_RUN, WINDOW_RUN, STATE_RUN)
KEYS = frozenset(key for run in RUNS for key in run.keys)
STORE = StoreJob(1, "r", RUNS, KEYS)
LOADED = (
    run_of(STATE, range(3, 4), 58),
    run_of(WINDOW, range(2, 4), 40, skip=1),
    run_of(FULL, range(4), 20),
)


def load(job_id: int, runs: tuple[PartRun, ...] = LOADED, *, redis: bool = False) -> LoadJob:
    return LoadJob(job_id, "s", runs, LONG, redis, 0)


def store(rank: Rank) -> JobResult:
    for run in RUNS:
        rank.fill(run)
    return rank.result(STORE)


@pytest.fixture(scope="module")
def copier() -> Copier:
    """One for all: making one takes a second."""
    return make_copier(torch.device("cpu"))


@pytest.fixture(autouse=True)
def _(monkeypatch: pytest.MonkeyPatch, copier: Copier) -> None:
    monkeypatch.setattr(rank_tiers, "make_copier", lambda device: copier)


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = Rank(1, 0)
    yield made
    made.worker.shutdown()


def test_every_part_comes_back_from_memory(rank: Rank) -> None:
    assert rank.worker.self_test is not None
    sizes = [part.chunk_bytes for part in geometries(1, 0).parts]
    assert rank.worker.self_test.num_bytes == sum(sizes)
    assert (rank.memory == 7).all()  # as before the self-test
    stored = store(rank)
    assert (stored.outcome, stored.num_chunks) == (Outcome.DONE, 7)
    assert stored.num_bytes == 4 * sizes[FULL] + 2 * sizes[WINDOW] + sizes[STATE]
    before = rank.memory.clone()
    loaded = rank.result(load(2))
    assert (loaded.outcome, loaded.num_chunks) == (Outcome.DONE, 7)
    assert all(rank.holds(run) for run in LOADED)
    others = [i for i in range(NUM_BLOCKS) if i not in load(2).blocks]
    assert torch.equal(rank.memory[:, others], before[:, others])


@pytest.mark.parametrize(("part", "skip"), [(FULL, 0), (WINDOW, 0), (WINDOW, 1)])
def test_a_tail_is_zero_after_its_end(rank: Rank, part: int, skip: int) -> None:
    rank.worker._tiers.engine.cpu._backend.memory_allocator.buffer.fill_(9)
    end, size, geometry = 19, BLOCK[part], geometries(1, 0).parts[part]
    whole = run_of(part, range(3, 4), 9)
    rank.fill(whole)
    tail = replace(
        whole,
        block_ids=tuple(ids[skip : -(-end // size)] for ids in whole.block_ids),
        skip_blocks=skip,
        tail_tokens=end,
    )
    assert rank.result(StoreJob(1, "r", (tail,))).outcome is Outcome.DONE
    lease = rank.worker._tiers.engine.cpu.lease(tail.keys[0])
    assert lease is not None
    value = torch.frombuffer(bytearray(lease.view), dtype=torch.uint8)
    value = value.view(len(geometry.shards), -1, CHUNK, CONTENT[part])
    for shard in range(len(geometry.shards)):
        for place, layer in enumerate(sorted(i for g in GROUPS_OF[part] for i in GROUPS[g])):
            expected = truth(layer, shard, 3, CONTENT[part]).clone()
            expected[end:] = 0
            expected[: skip * size] = 0
            assert torch.equal(value[shard, place], expected)
    lease.release()
    before = rank.memory.clone()
    into = replace(tail, block_ids=tuple(tuple(i + 30 for i in ids) for ids in tail.block_ids))
    assert rank.result(load(2, (into,))).outcome is Outcome.DONE
    for group, ids in zip(GROUPS_OF[part], into.block_ids, strict=True):
        for place, block in enumerate(ids, start=skip):
            for layer in GROUPS[group]:
                heads = [truth(layer, s, 3, CONTENT[part]) for s in geometry.shards]
                expected = torch.stack(heads)
                expected[:, end:] = 0
                found = rank.caches[f"layers.{layer}"][block]
                assert torch.equal(found, expected[:, place * size : (place + 1) * size])
    others = [i for i in range(NUM_BLOCKS) if i not in load(2, (into,)).blocks]
    assert torch.equal(rank.memory[:, others], before[:, others])


def test_a_block_of_two_groups_is_refused(rank: Rank) -> None:
    """It would be written twice, and one of the layers would have the other's bytes."""
    store(rank)
    before = rank.memory.clone()
    twice = PartRun(WINDOW, WINDOW_RUN.keys, WINDOW_RUN.chunks, ((40, 41, 42, 43),) * 2)
    assert rank.result(load(2, (twice,))).outcome is Outcome.FAILED
    short = PartRun(WINDOW, WINDOW_RUN.keys, WINDOW_RUN.chunks, ((40, 41, 42, 43),))
    assert rank.result(load(3, (short,))).outcome is Outcome.FAILED
    assert torch.equal(rank.memory, before)


@pytest.mark.parametrize("part", [FULL, WINDOW])
def test_an_audit_compares_all_groups_of_a_part(rank: Rank, part: int) -> None:
    """The layers of a part in model order, whatever groups they are in."""
    store(rank)
    run = run_of(part, range(3, 4), 50)
    rank.fill(run)
    audit = AuditJob(2, "a", (run,), frozenset(), deadline_seconds=LONG)
    same = rank.result(audit)
    assert (same.outcome, same.num_chunks) == (Outcome.DONE, 1)
    num_layers = sum(len(GROUPS[group]) for group in GROUPS_OF[part])
    assert [each.layer for each in same.differences] == [i for i in range(num_layers) for _ in "KV"]
    assert not any(each.difference for each in same.differences)
    group = GROUPS_OF[part][-1]
    name, block = f"layers.{GROUPS[group][0]}", run.block_ids[-1][0]
    rank.caches[name][block] += 1
    other = rank.result(replace(audit, job_id=3))
    layers = sorted(layer for each in GROUPS_OF[part] for layer in GROUPS[each])
    changed = {each.layer for each in other.differences if each.difference}
    assert changed == {layers.index(GROUPS[group][0])}


def test_the_wait_for_a_forward_pass_is_not_on_an_audits_time(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds, engine = list[float](), rank.worker._tiers.engine

    def retrieve(transfer: RunTransfer) -> None:
        seconds.append(transfer.deadline - time.monotonic())

    monkeypatch.setattr(engine, "_retrieve", retrieve)
    monkeypatch.setattr(engine.copier, "copy", lambda *_: time.sleep(0.5))
    rank.result(AuditJob(2, "a", (run_of(FULL, range(3, 4), 50),), deadline_seconds=60.0))
    assert 59.5 < seconds[0] <= 60.0


def test_a_prompt_larger_than_memory_comes_from_redis(valkey: Server) -> None:
    """Piece by piece: what has reached its blocks may be evicted."""
    runs = (
        run_of(STATE, range(23, 24), 57),
        run_of(WINDOW, range(22, 24), 49),
        run_of(FULL, range(24), 1),
    )
    writer = Rank(1, 0, valkey)
    for run in runs:
        writer.fill(run)
    keys = frozenset(key for run in runs for key in run.keys)
    assert writer.result(StoreJob(1, "r", runs, keys)).outcome is Outcome.DONE
    writer.worker.shutdown()
    reader = Rank(1, 0, valkey, rank_gib=300 / 2**20)
    assert 24 * geometries(1, 0).parts[FULL].chunk_bytes > 300 << 10
    assert reader.result(load(2, runs, redis=True)).outcome is Outcome.DONE
    assert all(reader.holds(run) for run in runs)
    reader.worker.shutdown()


def test_a_load_does_not_push_out_what_it_needs(valkey: Server) -> None:
    """Memory is full, and what it has of the prompt is the oldest in it."""
    writer = Rank(1, 0, valkey)
    store(writer)
    writer.worker.shutdown()
    reader = Rank(1, 0, valkey, rank_gib=300 / 2**20)
    assert reader.result(load(2, LOADED[2:], redis=True)).outcome is Outcome.DONE
    others = run_of(FULL, range(30, 44), 1)
    assert reader.result(StoreJob(3, "o", (others,), frozenset())).num_chunks == 14
    with valkey.client() as client:
        client.delete(*(name for i in range(4) for name in client.keys(f"*{key(i, FULL).hex()}*")))
    assert reader.result(load(4, redis=True)).outcome is Outcome.DONE
    assert all(reader.holds(run) for run in LOADED)
    reader.worker.shutdown()


def test_heads_are_shared_between_tensor_parallel_sizes_and_states_within_one(
    valkey: Server,
) -> None:
    writers = [Rank(2, i, valkey) for i in range(2)]
    for writer in writers:
        assert store(writer).outcome is Outcome.DONE
        writer.worker.shutdown()
    reader = Rank(1, 0, valkey)
    assert reader.result(load(2, LOADED[1:], redis=True)).outcome is Outcome.DONE
    assert all(reader.holds(run) for run in LOADED[1:])
    reader.worker.shutdown()
    for i in range(2):
        same_size = Rank(2, i, valkey)
        assert same_size.result(load(2, redis=True)).outcome is Outcome.DONE
        assert all(same_size.holds(run) for run in LOADED)
        same_size.worker.shutdown()
