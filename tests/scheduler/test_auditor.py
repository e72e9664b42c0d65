"""Audits under vLLM's real scheduler: what is chosen, computed, compared, and what follows.

:mod:`tests.support.doubles.shadow_worker` checks every block access on the way.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lmcache_connector.plans import AuditJob
from tests.support.doubles.lives import CHUNK, calm, prompt, serve
from tests.support.doubles.shadow_engine import ShadowEngine, Shape
from tests.support.doubles.shadow_memory import Image
from tests.support.doubles.shadow_worker import Faults

FIRST = Shape(audit_share=1e-9, num_blocks=40)


def audits(engine: ShadowEngine) -> Mapping[str, float]:
    return engine.adapter.tally.totals.by_label("audits")


def loaded(engine: ShadowEngine) -> int:
    return engine.ranks[0].num_loaded_chunks


def audit_jobs(engine: ShadowEngine) -> list[AuditJob]:
    return [job for plan in engine.plans for job in plan.stores if isinstance(job, AuditJob)]


def test_what_others_have_stored_is_audited_by_itself(model: Path) -> None:
    """A chunk of its own says nothing about others', and is not compared with itself."""
    shape = Shape(audit_share=1e-9, redis=True, num_blocks=40)
    other, engine = calm(model, shape), calm(model, shape)
    theirs, own = prompt(1, 3 * CHUNK + 5), prompt(2, 3 * CHUNK + 5)
    serve(other, theirs)
    engine.share_redis_of(other)
    serve(engine, own)
    serve(engine, own)
    assert audits(engine) == {"match": 1}
    before = engine.ranks[0].num_stored_chunks
    serve(engine, theirs)
    assert audits(engine) == {"match": 2}
    job = audit_jobs(engine)[-1]
    assert job.may_fetch
    (before_it,) = job.runs[0].parents  # a use of the audited chunk counts for it, too
    assert before_it in engine.ranks[0].tier
    assert before_it != job.keys[0]
    assert engine.ranks[0].num_stored_chunks == before, "the audited chunk is not stored"


def test_salts_share_one_first_audit(model: Path) -> None:
    engine, tokens = calm(model, FIRST), prompt(1, 2 * CHUNK + 5)
    for salt in ("one", "two"):
        serve(engine, tokens, salt=salt)
        serve(engine, tokens, salt=salt)
    assert audits(engine) == {"match": 1}


def test_a_chunk_that_somebody_else_brings_meanwhile_is_not_audited(model: Path) -> None:
    """vLLM's prefix cache has it by then: it would be compared with itself."""
    engine, tokens = calm(model, FIRST), prompt(1, 3 * CHUNK + 5)
    serve(engine, tokens)
    engine.forget_prefixes()
    for _ in range(3):
        engine.add(tokens, 1)
    engine.run_until_idle()
    engine.check_whole()
    assert len(audit_jobs(engine)) <= 1
    assert audits(engine).keys() <= {"match"}


def test_a_mismatch_ends_sharing_for_that_root_alone(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine, tokens = calm(model, FIRST), prompt(1, 2 * CHUNK + 5)
    for adapter in (None, "lora-a"):
        serve(engine, tokens, adapter=adapter)
    (_, last), _ = [job.keys for plan in engine.plans for job in plan.stores]
    tier = engine.ranks[0].tier
    tier[last] = tuple(cell + 1 for cell in tier[last])
    serve(engine, tokens)
    assert audits(engine) == {"mismatch": 1}
    assert "stored for a plain request" in caplog.text
    before = loaded(engine)
    serve(engine, tokens)
    assert loaded(engine) == before, "nothing was stored under its own keys yet"
    serve(engine, tokens)
    assert loaded(engine) == before + 2
    serve(engine, tokens, adapter="lora-a")
    assert loaded(engine) == before + 3, "another root goes on"
    assert audits(engine) == {"mismatch": 1, "match": 1}


@pytest.mark.parametrize(
    ("kind", "of_request", "chunk"),
    [
        ("LoRA", {"adapter": "lora-a"}, 3),
        ("image", {"images": (Image("a", "cat", 2, 2 + CHUNK),)}, 1),
    ],
)
def test_a_mismatch_says_of_what_request(
    model: Path, caplog: pytest.LogCaptureFixture, kind: str, of_request: Any, chunk: int
) -> None:
    """Text after an image may fit what was stored: of such a hit the image's own end is audited."""
    engine, tokens = calm(model, FIRST), prompt(1, 4 * CHUNK + 5)
    serve(engine, tokens, **of_request)
    keys = [key for plan in engine.plans for job in plan.stores for key in job.keys]
    tier = engine.ranks[0].tier
    tier[keys[chunk]] = tuple(cell + 1 for cell in tier[keys[chunk]])
    assert serve(engine, tokens, **of_request) == chunk * CHUNK
    assert audits(engine) == {"mismatch": 1}
    assert f"stored for a {kind} request" in caplog.text
    assert serve(engine, tokens, **of_request) == 0


def test_a_request_that_waits_during_a_mismatch_loads_what_is_stored_later(model: Path) -> None:
    engine = calm(model, Shape(num_blocks=9, prefix_caching=False))
    for _ in range(2):
        engine.add(prompt(1, 2 * CHUNK + 5), 1)
    book = engine.adapter.book
    (root,) = {state.keys.identity.kv_root for state in book.states.values()}
    assert len(book.separate(root)) == 2
    engine.run_until_idle()
    engine.check_whole()
    assert loaded(engine) == 2


# -- resets ------------------------------------------------------------------------------------


def test_an_audit_under_way_during_a_reset_says_nothing(model: Path) -> None:
    faults = Faults(slow=0.0)
    engine = ShadowEngine(model, FIRST, 0, faults)
    tokens = prompt(1, CHUNK + 5)
    serve(engine, tokens)
    engine.forget_prefixes()
    faults.stuck = True
    engine.add(tokens, 1)
    engine.step()
    assert len(engine.adapter.jobs) == 1
    assert engine.reset(new_weights=False)
    faults.stuck = False
    engine.run_until_idle()
    assert audits(engine) == {"inconclusive": 1}
    engine.check_whole()
