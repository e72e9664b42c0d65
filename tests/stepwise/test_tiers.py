"""What is copied of caches whose user may write to them meanwhile."""

from __future__ import annotations

import threading

import torch

from lmcache_connector.stepwise.tiers import UnwrittenGate


def test_a_copy_of_what_was_written_to_meanwhile_is_not_kept() -> None:
    one, other = torch.zeros(4), torch.zeros(4)
    gate, late = UnwrittenGate([one, other]), UnwrittenGate([one])
    assert gate.passes(threading.Event())
    other[2] = 1.0
    assert not gate.passes(threading.Event())
    assert late.passes(threading.Event()), "nobody has written to what it copies"
    cancelled = threading.Event()
    cancelled.set()
    assert not late.passes(cancelled)
