"""A worker without a model: memory that knows what it holds, and jobs run in any legal order.

A forward pass checks all cells (:mod:`~tests.support.doubles.shadow_memory`) of earlier positions.
If one is wrong, the pass fails, or, if vLLM or another connector may supply wrong KV, it writes
wrong cells.
"""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from vllm.v1.outputs import KVConnectorOutput

from lmcache_connector.change_count import ChangeCount
from lmcache_connector.connector import ReportMetadata
from lmcache_connector.kv_parts.part import BlockIds, Part, Rule
from lmcache_connector.plans import (
    AuditJob,
    CacheEvent,
    Fetched,
    JobResult,
    LayerDifference,
    LoadJob,
    Outcome,
    PartRun,
    RankReport,
    StepPlan,
    StoreJob,
    Tier,
    WeightsInMemory,
)
from lmcache_connector.retention.leaving import LeavingChunks
from tests.support.doubles.shadow_memory import (
    BLOCK_SIZE,
    NO_FOREIGN_WORK,
    Cells,
    ForeignWork,
    ForeignWorker,
    Memory,
    WrongKV,
    cell,
    cells_of_part,
)


@dataclass(frozen=True, slots=True)
class Removed:
    """What a chunk held that is not in the CPU tier any more."""

    cells: Cells

    def ref_count_up(self) -> None: ...

    def ref_count_down(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Pass:
    """One request in one forward pass: compute positions ``[start, end)``. The last ones are those
    of ``drafts``, of which so many are ``accepted``. ``begins``: it has not computed here before,
    or was preempted."""

    request_id: str
    start: int
    end: int
    cells: Cells  # of all positions up to ``end``
    drafts: int = 0
    accepted: int = 0
    begins: bool = True


@dataclass(frozen=True, slots=True)
class Step:
    """What one engine step asks of a rank. ``tables``: whose blocks are whose, from here on, by KV
    cache group. ``rows``: of requests that compute, with the blocks they had before.

    ``zeroed``: blocks that are zeroed before the plan is handed over. ``foreign``: what another
    connector has to do, with the right cells of each of its loads. ``weights``: a digest of them.
    """

    plan: StepPlan
    passes: tuple[Pass, ...]
    tables: Mapping[str, BlockIds]
    rows: Mapping[str, BlockIds]
    zeroed: tuple[int, ...] = ()
    foreign: ForeignWork = NO_FOREIGN_WORK
    weights: str = ""


@dataclass
class Faults:
    """Chances, 0 to 1, except the flags."""

    failed_load: float = 0.0
    no_memory: float = 0.0
    slow: float = 0.5  # a job is left for later
    stuck: bool = False  # while set, no job runs
    others_lie: bool = False  # vLLM's own prefix cache or another connector may supply wrong KV


@dataclass
class KeyBook:
    """Which cells each key must name, as the first job that used it said."""

    cells: dict[bytes, Cells] = field(default_factory=dict)

    def check(self, key: bytes, cells: Cells) -> None:
        if self.cells.setdefault(key, cells) != cells:
            raise WrongKV("one key names two different chunks")


@dataclass
class ShadowRank:
    """Memory, CPU tier and job lanes of one rank. ``parts``: of the model. ``changes``: counts what
    changes behind the scheduler side's back; with it, the rank makes loads inside steps."""

    rank: int
    num_blocks: int
    chunk_size: int
    capacity: int  # chunks in the CPU tier
    chance: random.Random
    faults: Faults
    book: KeyBook
    remote: dict[bytes, Cells]  # this rank's part of every chunk in Redis
    parts: tuple[Part, ...]
    changes: ChangeCount | None = None

    def __post_init__(self) -> None:
        self._leaving = LeavingChunks(self._tell)
        self.memory = Memory(self.num_blocks)
        self.foreign = ForeignWorker(self.memory, self.chance)
        self._tables: Mapping[str, BlockIds] = {}
        self._rows: Mapping[str, BlockIds] = {}
        self._states: dict[str, tuple[int, int]] = {}
        self.tier: OrderedDict[bytes, Cells] = OrderedDict()
        self._events: list[CacheEvent] = []
        self._question, self._told_version = 0, self.weights_version
        self._reads_weights = False
        self._stores: deque[StoreJob] = deque()
        self._loads: deque[LoadJob] = deque()
        self._fetch: deque[LoadJob] = deque()
        self._open: set[int] = set()
        self._gate_is_closed = False
        self._at_gate: list[tuple[StoreJob, list[list[Cells]]]] = []
        self._cancelled: set[int] = set()
        self._done: list[tuple[LoadJob | StoreJob, JobResult]] = []
        self.load_outcomes: list[Outcome] = []
        self.num_loaded_chunks = 0
        self.num_loaded_in_step = self.num_loaded_removed = 0
        self.num_stored_chunks = 0

    # -- an engine step, in the order the real worker adapter takes -------------------------------

    def run(self, step: Step) -> KVConnectorOutput:
        self._gate_is_closed = bool(step.zeroed)
        self.memory.zero(step.zeroed)
        self.run_some_jobs()
        vacated = self._open if step.plan.starts_over else step.plan.vacated_stores
        self._cancelled.update(self._open.intersection(vacated))
        self._open_gate()
        self._tables, self._rows = step.tables, step.rows
        if step.plan.weights_question:
            self._question, self._reads_weights = step.plan.weights_question, True
        self._reads_weights |= step.plan.asks_again
        self.foreign.begin(step.foreign)
        for load in step.plan.loads_in_step():
            self._load_in_step(load)
        if step.plan.acked_leaving:
            self._leaving.note_acked(step.plan.acked_leaving[self.rank])
        for one in step.passes:
            self._forward(one)
            self.run_some_jobs()
        self.foreign.go_on()
        for job in step.plan.loads_and_earlier_stores():
            self._submit(job)
        self._cancelled.update(self._open.intersection(step.plan.cancelled_loads))
        self.run_some_jobs()
        for store in step.plan.later_stores():
            self._submit(store)
        self.run_some_jobs()
        if step.plan.idle:
            self._run_one()
        return self._report(self._read_weights(step))

    def run_some_jobs(self) -> None:
        while self.chance.random() >= self.faults.slow and self._run_one():
            pass

    def evict(self, count: int, unannounced: float = 0.0) -> None:
        """``unannounced``: the chance that a chunk is evicted without an announcement."""
        for _ in range(min(count, len(self.tier))):
            key = self.chance.choice(list(self.tier))
            if self.chance.random() < unannounced or self._may_drop(key):
                self._drop(key)

    @property
    def num_open(self) -> int:
        return len(self._open)

    # -- the forward pass --------------------------------------------------------------------------

    def _forward(self, one: Pass) -> None:
        cells = one.cells
        column = self._move_states(one)
        if not all(self._reads_right(one, i, column) for i in range(len(self.parts))):
            if not self.faults.others_lie:
                raise WrongKV(f"{one.request_id} computes on wrong KV")
            cells = tuple(cell(value, -1) for value in cells)
        for number, part in enumerate(self.parts):
            own = cells_of_part(cells, number)
            for group in part.groups:
                table, start = self._tables[one.request_id][group], one.start
                if part.rule is Rule.STATE:
                    self._write_states(one, group, own)
                    continue
                self.memory.write(table, start, own[start : one.end])
                if 0 in table[start // BLOCK_SIZE : -(-one.end // BLOCK_SIZE)]:
                    raise WrongKV(f"{one.request_id} writes to the null block")
        for ring in self._rings(one):
            self.memory.write(ring, 0, cells[max(one.start, one.end - BLOCK_SIZE) : one.end])
        self._keep_accepted_states(one)

    # As vLLM does in its mode "align". A request's state is in one column of its row, and the
    # states after each of its drafts are in the columns after that.

    def _state_groups(self) -> list[int]:
        return [g for part in self.parts if part.rule is Rule.STATE for g in part.groups]

    def _move_states(self, one: Pass) -> int:
        """Where the pass ends; the column in which the state is that it goes on from."""
        before, accepted = self._states.get(one.request_id, (0, 0))
        if one.begins:
            before, accepted = (one.start - 1) // BLOCK_SIZE, 1
        column = (one.end - 1) // BLOCK_SIZE
        if column != before and before >= 0:
            for group in self._state_groups():
                self._copy_state(one, group, before + accepted - 1, column)
            accepted = 1
        self._states[one.request_id] = column, accepted
        return column + accepted - 1

    def _copy_state(self, one: Pass, group: int, source: int, target: int) -> None:
        row = self._rows[one.request_id][group]
        self.memory.write((row[target],), 0, self.memory.read((row[source],), 0, 1))

    def _write_states(self, one: Pass, group: int, own: Cells) -> None:
        row, (column, _) = self._rows[one.request_id][group], self._states[one.request_id]
        for draft in range(one.drafts + 1):
            if not row[column + draft]:
                raise WrongKV(f"{one.request_id} writes to the null block")
            self.memory.write((row[column + draft],), 0, (own[one.end - one.drafts - 1 + draft],))

    def _keep_accepted_states(self, one: Pass) -> None:
        """If a block ends among the accepted tokens, copy the state there into that block."""
        column, accepted = self._states[one.request_id][0], 1 + one.accepted
        first = one.end - one.drafts  # tokens that the state in ``column`` has seen
        border = (first + one.accepted) // BLOCK_SIZE * BLOCK_SIZE
        if border >= first:
            target = border // BLOCK_SIZE - 1
            for group in self._state_groups():
                self._copy_state(one, group, column + border - first, target)
            accepted = 1 if target == column else accepted
        self._states[one.request_id] = column, accepted

    def _rings(self, one: Pass) -> list[tuple[int, ...]]:
        """The one block (a ring buffer) of each group that the connector does not store."""
        stored = {group for part in self.parts for group in part.groups}
        tables = enumerate(self._tables[one.request_id])
        return [tuple(table[:1]) for group, table in tables if group not in stored]

    def _reads_right(self, one: Pass, number: int, column: int) -> bool:
        """Whether all KV that the first token of the pass attends to is right. ``column``: where
        the state is."""
        part, start = self.parts[number], one.start
        first = part.first_needed(start)
        expected = cells_of_part(one.cells[first:start], number)
        for group in part.groups:
            table = self._tables[one.request_id][group]
            if part.rule is Rule.STATE and start:
                found = self.memory.read((self._rows[one.request_id][group][column],), 0, 1)
            else:
                found = self.memory.read(table, first, start)
            if found != expected:
                return False
        return True

    # -- jobs ------------------------------------------------------------------------------------

    def _submit(self, job: LoadJob | StoreJob) -> None:
        if isinstance(job, LoadJob) and job.may_fetch:
            self._fetch.append(job)
        else:
            if isinstance(job, LoadJob) and job.after_job >= job.job_id > 0:
                raise WrongKV("a load waits for a later job")
            if isinstance(job, StoreJob):
                self._stores.append(job)
            else:
                self._loads.append(job)
        self._open.add(job.job_id)

    def _run_one(self) -> bool:
        """Run one job the real lanes could run next; False if there is none."""
        if self.faults.stuck:
            return False
        ready: list[LoadJob | StoreJob] = [*list(self._stores)[:1]]
        ready += [job for job in (*self._loads, *self._fetch) if job.after_job not in self._open]
        if not ready:
            return False
        job = self.chance.choice(ready)
        if isinstance(job, StoreJob):
            self._stores.popleft()
        else:
            (self._fetch if job.may_fetch else self._loads).remove(job)
        if isinstance(job, LoadJob):
            result = self._load(job)
            self.load_outcomes.append(result.outcome)
            self._end(job, result)
        else:
            self._copy(job)
        return True

    def _end(self, job: LoadJob | StoreJob, result: JobResult) -> None:
        self._open.discard(job.job_id)
        self._done.append((job, result))

    def _copy(self, job: StoreJob) -> None:
        read = [
            [self.memory.read(ids, 0, len(ids) * BLOCK_SIZE) for ids in run.block_ids]
            for run in job.runs
        ]
        self._at_gate.append((job, read))
        if not self._gate_is_closed:
            self._open_gate()

    def _open_gate(self) -> None:
        self._gate_is_closed = False
        for job, read in self._at_gate:
            self._end(job, self._keep(job, read))
        self._at_gate.clear()

    def _keep(self, job: StoreJob, read: list[list[Cells]]) -> JobResult:
        if job.job_id in self._cancelled:
            return JobResult(job.job_id, Outcome.CANCELLED, 0, 0, 0.0)
        if isinstance(job, AuditJob):
            return self._audit(job, read[0][0])
        values = [
            (run, i, groups)
            for run, groups in zip(job.runs, read, strict=True)
            for i in range(len(run.keys))
        ]
        for number, (run, i, groups) in enumerate(values):
            key, cells = run.keys[i], self.book.cells[run.keys[i]]
            cells = cells[run.skip_blocks * BLOCK_SIZE :]  # of a tail: no load needs what is before
            if any(self._value(run, i, group) != cells for group in groups):
                raise WrongKV(f"{job.request_id} stores other KV than chunk {i}'s key names")
            if key in self.tier:
                self._events.append(CacheEvent(key, True))
            if self.chance.random() < self.faults.no_memory:
                return JobResult(job.job_id, Outcome.MISSING, number, 0, 0.0)
            if not self._admit(key, self.book.cells[key]):
                return JobResult(job.job_id, Outcome.MISSING, number, 0, 0.0)
            if job.redis_keys is None or key in job.redis_keys:
                self.remote[key] = self.book.cells[key]
            self.num_stored_chunks += 1
        return JobResult(job.job_id, Outcome.DONE, len(job.keys), 0, 0.0)

    def _value(self, run: PartRun, index: int, cells: Cells) -> Cells:
        """Chunk ``index`` of the run, of all that was read of a group."""
        if self.parts[run.part].rule is Rule.STATE:
            return cells[index * BLOCK_SIZE : index * BLOCK_SIZE + 1]
        if run.tail_tokens:
            return cells[: run.tail_tokens - run.skip_blocks * BLOCK_SIZE]
        return cells[index * self.chunk_size : (index + 1) * self.chunk_size]

    def _audit(self, job: AuditJob, computed: Cells) -> JobResult:
        (key,) = job.keys
        stored = self.tier.get(key) or (self.remote.get(key) if job.may_fetch else None)
        if stored is None:
            return JobResult(job.job_id, Outcome.MISSING, 0, 0, 0.0)
        wrong = sum(one != other for one, other in zip(computed, stored, strict=True))
        size = float(len(stored))
        found = LayerDifference(0, 0, float(wrong), size, size)
        fetched = () if key in self.tier else (Fetched(Tier.REDIS, 1, 0.0),)
        return JobResult(job.job_id, Outcome.DONE, 1, 0, 0.0, fetched, (found,))

    def _load(self, job: LoadJob) -> JobResult:
        if job.job_id in self._cancelled:
            return JobResult(job.job_id, Outcome.CANCELLED, 0, 0, 0.0)
        self._check_owned(job)
        fail_at = len(job.keys)
        if not job.keys:
            return JobResult(job.job_id, Outcome.DEADLINE, 0, 0, 0.0)
        if self.chance.random() < self.faults.failed_load:
            fail_at = self.chance.randrange(len(job.keys))
        done = 0
        for run in job.runs:
            cells: list[int] = []
            for i, key in enumerate(run.keys, done):
                found = self.tier.get(key) or (self.remote.get(key) if job.may_fetch else None)
                if i >= fail_at or found is None:
                    self._write(run, [*cells, *[-1] * self.chance.randrange(self.chunk_size)])
                    self._events.append(CacheEvent(key, key in self.tier))
                    outcome = self.chance.choice([Outcome.MISSING, Outcome.DEADLINE])
                    was_asked = i < fail_at and job.may_fetch and job.source is None
                    fetched = (Fetched(Tier.REDIS, 0, 0.0, lacks_next=True),) * was_asked
                    return JobResult(job.job_id, outcome, i, 0, 0.0, fetched)
                self._admit(key, found)
                cells += found
            self._write(run, cells)
            done += len(run.keys)
        self.num_loaded_chunks += len(job.keys)
        return JobResult(job.job_id, Outcome.DONE, len(job.keys), 0, 0.0)

    def _load_in_step(self, job: LoadJob) -> None:
        """Fails if a chunk is missing: nothing would recompute it."""
        self._check_owned(job)
        for run in job.runs:
            removed = {key: one.cells for key, one in self._leaving.removed.items()}
            if not all(key in self.tier or key in removed for key in run.keys):
                raise WrongKV("a load inside a step found a chunk gone")
            found = [self.tier.get(key) or removed[key] for key in run.keys]
            self._write(run, [cell for cells in found for cell in cells])
            for key in run.keys:
                if key in self.tier:
                    self._admit(key, self.tier[key])
                else:
                    self.num_loaded_removed += 1
        self.num_loaded_chunks += len(job.keys)
        self.num_loaded_in_step += len(job.keys)
        self._done.append((job, JobResult(job.job_id, Outcome.DONE, len(job.keys), 0, 0.0)))

    def _write(self, run: PartRun, cells: list[int]) -> None:
        for block_ids in run.block_ids:
            room = len(block_ids) * BLOCK_SIZE
            self.memory.write(block_ids, 0, cells[run.skip_blocks * BLOCK_SIZE :][:room])

    def _check_owned(self, job: LoadJob) -> None:
        own = self._tables.get(job.request_id)
        for run in job.runs:
            for group, ids in zip(self.parts[run.part].groups, run.block_ids, strict=True):
                if own is None or 0 in ids or not set(ids).issubset(own[group]):
                    raise WrongKV(f"a load of {job.request_id} writes blocks that are not its own")
        if job.in_step:  # vLLM lets others of the step have these blocks: they compute after it
            return
        for other, tables in self._tables.items():
            held = {block for table in tables for block in table}
            if other != job.request_id and not job.blocks.isdisjoint(held):
                raise WrongKV(f"a load of {job.request_id} writes blocks of {other}")

    # -- the CPU tier ----------------------------------------------------------------------------

    def _admit(self, key: bytes, cells: Cells) -> bool:
        """False if there is no room yet: the eviction that makes room is announced now."""
        if key not in self.tier:
            while len(self.tier) >= self.capacity:
                oldest = next(iter(self.tier))
                if not self._may_drop(oldest):
                    return False
                self._drop(oldest)
            self.tier[key] = cells
            self._events.append(CacheEvent(key, True))
        self.tier.move_to_end(key)
        self._leaving.keep([key])
        return True

    def _may_drop(self, key: bytes) -> bool:
        return self.changes is None or self._leaving.announce([key])

    def _drop(self, key: bytes) -> None:
        removed = Removed(self.tier.pop(key))
        if self.changes is not None:
            self._leaving.remove(key, removed)
        self._events.append(CacheEvent(key, False))

    def _tell(self, keys: Iterable[bytes]) -> None:
        self._events += [CacheEvent(key, key in self.tier) for key in keys]

    # -- reports -----------------------------------------------------------------------------------

    def _read_weights(self, step: Step) -> WeightsInMemory | None:
        """A report of the weights: at once if they changed, else now or in a later step."""
        is_changed = self.weights_version != self._told_version
        if not is_changed and (not self._reads_weights or self.chance.random() < self.faults.slow):
            return None
        self._reads_weights, self._told_version = False, self.weights_version
        return WeightsInMemory(self._told_version, self._question, step.weights)

    @property
    def weights_version(self) -> int:
        return self.changes.number if self.changes is not None else 0

    def _report(self, weights: WeightsInMemory | None) -> KVConnectorOutput:
        done, self._done = self._done, []
        events, self._events = self._events, []
        leaving, num_leaving = self._leaving.report([event.key for event in events])
        if self.changes is not None:  # where each is now
            events = [CacheEvent(e.key, e.key in self.tier, e.key in leaving) for e in events]
        results = tuple(result for _, result in done)
        sent, received, lost = self.foreign.take_finished()
        own = {j.request_id for j, _ in done if isinstance(j, LoadJob) and not j.in_step}
        report = RankReport(
            self.rank,
            tuple(events),
            results,
            weights=weights,
            num_leaving=num_leaving,
        )
        return KVConnectorOutput(
            finished_sending=sent or None,
            finished_recving=received | own or None,
            invalid_block_ids=lost,
            kv_connector_worker_meta=ReportMetadata((report,))
            if done or events or weights
            else None,
        )
