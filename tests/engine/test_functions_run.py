"""How far a request travels through the product: counted in functions, to be read in one go."""

from __future__ import annotations

from pathlib import Path

from tests.support.engines.functions_run import functions_run, watch_threads
from tests.support.engines.instance import VllmInstance
from tests.support.engines.settings import kv_transfer

MOST = {"hit": 300, "store": 190}
"""Fewer is the aim: 45 and 35."""


def test_a_hit_and_a_store_pass_through_few_functions(tiny_model: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with VllmInstance(
        tiny_model, kv_transfer(), log, watch_threads, max_model_len=8192
    ) as instance:
        found = instance.call(functions_run)
    too_many = {name: found[name] for name, most in MOST.items() if len(found[name]) > most}
    assert too_many == {}
