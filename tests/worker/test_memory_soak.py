"""An owner that evicts all the time, a reader that maps it, both stopped at random, one killed."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from lmcache_connector.peers.host import HostFolder
from lmcache_connector.peers.server import Limits
from lmcache_connector.peers.tier import PeerTier
from lmcache_connector.storage.geometry import PartGeometries
from tests.support.peers.chunks import serving
from tests.support.peers.hosts import CONFIG, name_of, topology
from tests.support.waits import within
from tests.worker.test_what_is_kept import CROWD, GEOMETRY, Rank, key

pytestmark = pytest.mark.soak

PARTS = PartGeometries((GEOMETRY,))
PROMPTS = range(1, 25)
SECONDS = 30.0
READ_SECONDS = 0.5


def own(path: Path) -> None:
    rank = Rank(shares_memory=True)
    listener = HostFolder(path).listen(name_of("one"))
    limits = Limits(stall_seconds=0.2)
    chunks = rank.engine.chunks
    with serving(chunks, ranks=(PARTS,), engine_id="one", listener=listener, limits=limits):
        while True:
            for prompt in PROMPTS:
                rank.store(prompt, CROWD, 2)


def read(path: Path, pipe: Connection) -> None:
    """Tells that it begins, and then hits, wrong bytes, chunks mapped, and the longest read."""
    tier = PeerTier(CONFIG, PARTS, topology(path))
    chance, hits, wrong, longest = random.Random(1), 0, 0, 0.0
    pipe.send("ready")
    assert within(120.0, lambda: bool(list(path.glob("*.sock"))))
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        prompt = chance.choice(PROMPTS)
        buffers = [bytearray(GEOMETRY.chunk_bytes) for _ in range(2)]
        keys, views = [key(prompt, i) for i in range(2)], [memoryview(b) for b in buffers]
        started = time.monotonic()
        found = tier.read(keys, views, started + READ_SECONDS)
        longest = max(longest, time.monotonic() - started)
        for chunk, hit in enumerate(found.hits):
            hits += hit
            wrong += hit and buffers[chunk].count(10 * prompt + chunk) != GEOMETRY.chunk_bytes
    pipe.send((hits, wrong, tier.num_mapped, longest))
    tier.close(1.0)


def test_a_hit_is_right_whatever_happens_to_either_side(tmp_path: Path) -> None:
    spawn, path, chance = multiprocessing.get_context("spawn"), tmp_path / "host", random.Random(2)
    ours, theirs = spawn.Pipe()
    owner = spawn.Process(target=own, args=(path,))
    owner.start()
    reader = spawn.Process(target=read, args=(path, theirs))
    reader.start()
    assert ours.poll(120.0)
    assert ours.recv() == "ready"
    assert within(120.0, lambda: bool(list(path.glob("*.sock"))))
    until, longest_stop = time.monotonic() + SECONDS, 0.0
    while time.monotonic() < until - 4.0:
        time.sleep(chance.random() * 0.5)
        victim = chance.choice((owner, reader))
        assert victim.pid is not None
        stopped = chance.choice((0.02, 0.1, 0.6))
        os.kill(victim.pid, signal.SIGSTOP)
        time.sleep(stopped)
        os.kill(victim.pid, signal.SIGCONT)
        longest_stop = max(longest_stop, stopped)
    owner.kill()
    assert ours.poll(30.0), f"the reader has ended with {reader.exitcode}"
    hits, wrong, mapped, longest = ours.recv()
    reader.join(10.0)
    owner.join()
    print(f"{hits} hits, {mapped} mapped, {wrong} wrong, the longest read took {longest:.2f} s")
    assert wrong == 0
    assert mapped > 100
    assert longest < READ_SECONDS + longest_stop + 2.0, "the reader itself is stopped, too"
