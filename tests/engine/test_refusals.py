"""Settings that cannot work stop the start with one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.instance import InstanceError, StartInstance, VllmInstance
from tests.support.engines.settings import kv_transfer
from tests.support.engines.tiny_families import build_family


def refusal(instance: VllmInstance) -> str:
    with pytest.raises(InstanceError) as error, instance:
        pass
    return str(error.value)


def test_unknown_keys_and_wrong_values_are_listed_together(start: StartInstance) -> None:
    instance = start(kv_transfer(cpu_gb=3, chunk_size="big"))
    message = refusal(instance)
    assert "did you mean 'cpu_gib'" in message
    assert "'chunk_size': input should be a valid integer" in message
    assert "Starting to load model" not in instance.log, "it takes minutes"


@pytest.mark.soak  # it looks at vLLM alone
def test_recurrent_states_with_drafts_still_end_vllms_own_engine(tmp_path: Path) -> None:
    """vLLM 0.32 copies the states of accepted tokens by a Triton kernel that its CPU build lacks,
    so what the connector refuses cannot be tried here. When this fails, try it."""
    folder = build_family("qwen3-next", tmp_path / "states")
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    sizes: Any = {"kv_cache_memory_bytes": 256 << 20, "max_model_len": 4096}
    log = tmp_path / "log"
    with (
        VllmInstance(folder, None, log, speculative_config=drafts, **sizes) as instance,
        pytest.raises(InstanceError, match=r"^TypeError: 'function' object is not subscri"),
    ):
        instance.serve([5, 6, 7, 8] * 80, 12)
    assert "in run_fused_precopy" in instance.log
