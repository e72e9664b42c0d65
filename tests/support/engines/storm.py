"""A storm of requests on one engine, and a witness who saw every byte that was stored.

Runs in the engine's process. The :class:`Witness` digests the blocks of each store as they lie in
vLLM's cache, and those of each load when it has ended: whatever a load brought must have been
stored under its key.
"""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blake3 import blake3

from lmcache_connector.metrics.samples import Samples
from lmcache_connector.plans import LoadJob
from tests.support.engines.asks import Ask, far_blocks, kv_at_first_token
from tests.support.engines.calls import preemptions, worker_of
from tests.support.engines.probe import EngineProbe
from tests.support.prompts import random_prompt

_MAX_IN_FLIGHT = 10
_NUM_PREFIXES = 20
_SAMPLES = 6
_CROWD = 8
_CROWD_TOKENS = 380


@dataclass
class StormReport:
    """Outcome of a storm. ``rss_bytes``: memory of the process when it was warm and at the end."""

    requests: int = 0
    failed_requests: int = 0
    aborted: int = 0
    preemptions: int = 0
    checked_blocks: int = 0
    mismatches: int = 0
    far_blocks: int = 0
    evictions: int = 0
    rss_bytes: list[int] = field(default_factory=list)
    counts: Samples = field(default_factory=Samples)

    def __str__(self) -> str:
        counts = self.counts
        warm, end = (f"{size / 2**20:.0f}" for size in (self.rss_bytes[0], self.rss_bytes[-1]))
        return (
            f"{self.requests} requests ({self.failed_requests} failed, {self.aborted} aborted), "
            f"hits: {counts.total('hit_tokens', 'cpu'):.0f} tokens from memory, "
            f"{counts.total('hit_tokens', 'redis'):.0f} from Redis, {self.evictions} evictions, "
            f"{self.preemptions} preemptions, failed loads {counts.by_label('failed_loads')} "
            f"({counts.total('recomputed_tokens'):.0f} tokens recomputed), "
            f"{self.checked_blocks} loaded "
            f"blocks checked, {self.mismatches} mismatches, {self.far_blocks} far from a "
            f"recompute, memory {warm} -> {end} MiB"
        )


class Witness:
    """Stands between the worker's threads and its LMCache engine, and sees every byte moved."""

    def __init__(self, probe: EngineProbe, report: StormReport) -> None:
        engine = worker_of(probe)._engine
        self._layers = probe.core.model_executor.driver_worker.worker.model_runner.kv_caches
        self._report = report
        self._lock = threading.Lock()
        self._seen: dict[tuple[bytes, int], set[bytes]] = defaultdict(set)
        self._store, self._load, self._take = engine._engine.store, engine.load, engine.take_events
        engine._engine.store = self.store
        engine.load, engine.take_events = self.load, self.take_events

    def store(self, *, tokens: Any, transfer: Any) -> None:
        # Before the copy, which fails if the blocks are taken back by its end.
        digests = [self._digest(block) for block in transfer.block_ids[0]]
        self._store(tokens=tokens, transfer=transfer)
        per_chunk = len(digests) // len(transfer.keys)
        with self._lock:
            for i, key in enumerate(transfer.keys[: transfer.num_chunks]):
                for at in range(per_chunk):
                    self._seen[key, at].add(digests[i * per_chunk + at])

    def load(self, job: LoadJob, *rest: Any) -> Any:
        transfer = self._load(job, *rest)
        (run,) = job.runs
        per_chunk = (len(run.block_ids[0]) + run.skip_blocks) // len(run.keys)
        arrived = transfer.num_chunks * per_chunk - run.skip_blocks
        for at, block in enumerate(run.block_ids[0][: max(0, arrived)], start=run.skip_blocks):
            digest = self._digest(block)
            with self._lock:
                self._report.checked_blocks += 1
                stored = self._seen[job.keys[at // per_chunk], at % per_chunk]
                self._report.mismatches += digest not in stored
        return transfer

    def take_events(self) -> Any:
        events = self._take()
        self._report.evictions += sum(not event.admitted for event in events)
        return events

    def _digest(self, block: int) -> bytes:
        import torch

        hasher = blake3()
        for layer in self._layers:
            hasher.update(layer[block].contiguous().view(torch.uint8).numpy())
        return hasher.digest()


class Storm:
    """Random requests on shared and own prefixes, a few of which are aborted."""

    def __init__(self, probe: EngineProbe, seed: int) -> None:
        self._probe = probe
        self._chance = random.Random(seed)
        self._prefixes = [
            random_prompt(5000 + i, self._chance.choice([200, 512, 700, 1024, 1300]))
            for i in range(_NUM_PREFIXES)
        ]
        self._wanted: dict[str, int] = {}
        self.prompts: list[list[int]] = []
        self.report = StormReport()
        Witness(probe, self.report)

    def blow(self, num_requests: int) -> None:
        """Serve that many more, to the end."""
        probe, last = self._probe, self.report.requests + num_requests
        while self.report.requests < last or self._wanted:
            if self.report.requests < last and len(self._wanted) < _MAX_IN_FLIGHT:
                self._add()
            for output in probe.engine.step():
                if output.finished:
                    wanted = self._wanted.pop(output.request_id, None)
                    if wanted is not None:
                        got = len(output.outputs[0].token_ids)
                        self.report.failed_requests += got != wanted
            if self._wanted and self._chance.random() < 0.002:
                victim = self._chance.choice(list(self._wanted))
                del self._wanted[victim]
                probe.engine.abort_request([victim])
                self.report.aborted += 1
        probe.drain()

    def crowd(self) -> None:
        """Requests that fit together until they have generated some tokens: one is preempted."""
        for _ in range(_CROWD):
            self._ask(random_prompt(self._chance.randrange(10**9), _CROWD_TOKENS), 150)
        self.blow(0)

    def check_against_recompute(self) -> None:
        """Some prompts, loaded and computed anew, one at a time."""
        for prompt in self._chance.sample(self.prompts, _SAMPLES):
            self._probe.reset_prefix_cache()
            served, _ = kv_at_first_token(self._probe, Ask(prompt))
            fresh = {"skip_reading_prefix_cache": True}
            computed, _ = kv_at_first_token(self._probe, Ask(prompt, sampling=fresh))
            self.report.far_blocks += len(far_blocks(served, computed))

    def note_memory(self) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self.report.rss_bytes.append(pages * 4096)

    def _add(self) -> None:
        chance = self._chance
        prefix: Sequence[int] = chance.choice(self._prefixes)
        if chance.random() < 0.2:
            prefix = random_prompt(chance.randrange(10**9), len(prefix))
        prompt = [*prefix, *random_prompt(chance.randrange(10**9), chance.choice([5, 60, 300]))]
        self._ask(prompt, chance.choice([2, 10, 60, 150]))

    def _ask(self, prompt: list[int], wanted: int) -> None:
        self._wanted[self._probe.add(prompt, wanted)] = wanted
        self.report.requests += 1
        self.prompts.append(prompt)


def run_storm(probe: EngineProbe, num_requests: int, seconds: float, seed: int) -> StormReport:
    """A storm of ``num_requests`` that lasts ``seconds``, or longer.

    Memory counts as warm after the first fifth of the requests.
    """
    storm = Storm(probe, seed)
    started = time.monotonic()
    with preemptions(probe) as preempted:
        storm.blow(max(10, num_requests // 5))
        storm.note_memory()
        while storm.report.requests < num_requests or time.monotonic() - started < seconds:
            storm.blow(min(20, max(1, num_requests - storm.report.requests)))
        storm.crowd()
    storm.report.preemptions = len(preempted)
    storm.note_memory()
    storm.check_against_recompute()
    storm.report.counts = probe.counts()
    return storm.report
