"""Nothing of a step that fails is stored. tests/simulation has the failures of Redis."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.calls import forget, wait_for_writes
from tests.support.engines.instance import StartInstance
from tests.support.engines.probe import EngineProbe, Served
from tests.support.engines.settings import kv_transfer, random_prompt
from tests.support.engines.tiny_drafters import build_drafted
from tests.support.planted import PlantedError
from tests.support.redis.servers import Server, value_names


def fail_a_step(probe: EngineProbe, prompt: list[int], call: str) -> Served:
    """vLLM calls the connector also after a forward pass that raised, and not at all in a step that
    raised before. The user goes on, as after Ctrl-C in a notebook."""
    request_id = probe.add(prompt)
    probe.on_ranks(raise_in_next, call)
    with pytest.raises(PlantedError):
        probe.finish([request_id], 0.0)
    probe.engine.abort_request([request_id])  # it would never end
    probe.drain()
    return probe.serve([*prompt, *prompt])


def lose_the_end_of_a_load(probe: EngineProbe, prompt: list[int]) -> None:
    """The user interrupts vLLM before it updates its scheduler from the step that tells the end."""
    usual = probe.scheduler.update_from_output

    def lose(scheduler_output: Any, output: Any) -> Any:
        if output.kv_connector_output and output.kv_connector_output.finished_recving:
            probe.scheduler.update_from_output = usual
            raise PlantedError
        return usual(scheduler_output, output)

    probe.scheduler.update_from_output = lose
    request_id = probe.add(prompt)
    with pytest.raises(PlantedError):
        probe.finish([request_id], 0.0)
    probe.engine.abort_request([request_id])
    probe.drain()


def raise_in_next(worker: Any, call: str) -> None:
    runner = worker.model_runner
    usual = getattr(runner, call)

    def fail(*args: Any, **more: Any) -> Any:
        if call == "execute_model" and not args[0].total_num_scheduled_tokens:
            return usual(*args, **more)  # the request waits for its lookup
        setattr(runner, call, usual)
        raise PlantedError

    setattr(runner, call, fail)


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        ("execute_model", ""),
        ("_model_forward", ""),
        # Each needs an engine; tests/worker/test_failures.py has the rule.
        pytest.param("_prepare_inputs", "", marks=pytest.mark.soak),
        pytest.param("propose_draft_token_ids", "eagle", marks=pytest.mark.soak),
    ],
)
def test_nothing_of_a_failed_step_is_stored(
    start: StartInstance, valkey: Server, tiny_model: Path, tmp_path: Path, call: str, kind: str
) -> None:
    folder, arguments = build_drafted(kind, tmp_path) if kind else (tiny_model, {})
    transfer = kv_transfer(redis_url=valkey.url, namespace=call)
    good, bad = random_prompt(71, 1100), random_prompt(72, 1100)
    with start(transfer, folder, **arguments) as one:
        one.serve(good)
        one.call(wait_for_writes)
        before = len(value_names(valkey))
        after = one.call(fail_a_step, bad, call)
        assert after.cached_tokens > 0, "vLLM takes its blocks for computed"
        assert after.external_hit_tokens == 0
        assert "a step of this engine has failed" in one.log
        one.reset_prefix_cache()
        assert one.serve(good).external_hit_tokens == 1024
        one.reset_prefix_cache()
        one.call(forget)  # loads from memory run inside a step, and end with it
        one.call(lose_the_end_of_a_load, good)
        one.reset_prefix_cache()
        assert one.serve(good).external_hit_tokens == 1024
    assert len(value_names(valkey)) == before, "the engine's end stores nothing either"
