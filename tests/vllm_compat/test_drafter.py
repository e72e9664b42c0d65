"""Which drafters are served, and what of them is in the key: with vLLM's own configurations."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

from lmcache_connector.errors import UnsupportedError
from lmcache_connector.vllm_compat.drafter import drafter_problems, find_drafter
from lmcache_connector.vllm_compat.model import ModelDescription, describe_model
from lmcache_connector.vllm_compat.weights import weights_identity
from tests.support.vllm_configs import kv_cache


@pytest.fixture(scope="module")
def head(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An EAGLE head, with only the files that these tests read."""
    folder = tmp_path_factory.mktemp("head")
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    shutil.copy(model / "model.safetensors", folder)
    return folder


def configured(model: Path, drafter: Path | None, method: str = "eagle", **more: Any) -> VllmConfig:
    speculative: dict[str, Any] | None = None
    if drafter is not None:
        speculative = {"method": method, "model": str(drafter), "num_speculative_tokens": 2, **more}
    return EngineArgs(model=str(model), speculative_config=speculative).create_engine_config()


def described(config: VllmConfig) -> ModelDescription:
    return describe_model(config, kv_cache(), chunk_size=128)


@pytest.mark.parametrize("method", ["ngram", None])
def test_without_a_drafter_that_has_kv_keys_are_as_ever(model: Path, method: str | None) -> None:
    speculative = {"method": method, "num_speculative_tokens": 2} if method else None
    config = EngineArgs(model=str(model), speculative_config=speculative).create_engine_config()
    assert find_drafter(config) is None
    found = described(config)
    assert (found.lookahead, found.drafted_len) == (0, None)
    assert found.configuration == described(configured(model, None)).configuration


def test_the_kv_of_a_head_follows_from_the_token_after_it(model: Path, head: Path) -> None:
    assert described(configured(model, head)).lookahead == 1


@pytest.mark.parametrize(
    ("method", "is_v2", "max_len"),
    [("eagle", False, 98), ("eagle", True, None), ("draft_model", True, 98)],
)
def test_up_to_which_length_a_step_writes_the_drafters_kv(
    model: Path, head: Path, monkeypatch: pytest.MonkeyPatch,
    method: str, is_v2: bool, max_len: int | None,
) -> None:  # fmt: skip
    """Near ``max_model_len`` V1 skips the drafter; V2 gives a head all positions of its model."""
    config = configured(model, head, method, max_model_len=100)
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", is_v2)
    assert described(config).drafted_len == (max_len or config.model_config.max_model_len - 2)


@pytest.mark.parametrize(
    ("args", "is_same"),
    [
        ({"num_speculative_tokens": 3}, True),
        ({"draft_sample_method": "probabilistic"}, True),
        ({"enforce_eager": True}, True),
        ({"quantization": "fp8"}, False),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_which_drafter_settings_are_in_the_key(
    model: Path, head: Path, args: dict[str, Any], is_same: bool
) -> None:
    plain = described(configured(model, head)).configuration
    assert (described(configured(model, head, **args)).configuration == plain) is is_same
    assert plain != described(configured(model, None)).configuration


def test_the_weights_of_a_drafter_are_in_the_key(model: Path, head: Path, tmp_path: Path) -> None:
    def identity(drafter: Path | None) -> str:
        return weights_identity(configured(model, drafter), "full", tmp_path / "kept").name

    copied = shutil.copytree(head, tmp_path / "copied")
    assert identity(None) != identity(head) == identity(copied)
    data = bytearray((copied / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (copied / "model.safetensors").write_bytes(data)
    assert identity(copied) != identity(head)


def _pipeline(config: VllmConfig) -> None:
    config.parallel_config.pipeline_parallel_size = 2


def _modules(config: VllmConfig) -> None:
    assert config.speculative_config is not None
    config.speculative_config.method = "mtp"
    config.speculative_config.draft_model_config.hf_config.num_nextn_predict_layers = 3


def _set(name: str, value: Any) -> Callable[[VllmConfig], None]:
    return lambda config: setattr(config.speculative_config, name, value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("method", "medusa"), "speculative decoding with 'medusa' yet: use draft_model, eag"),
        (_set("method", "dflash"), "speculative decoding with 'dflash' yet"),
        (_set("disable_eagle_block_drop", True), "disable_eagle_block_drop"),
        (_set("kv_cache_dtype", "fp8"), "a drafter's own kv_cache_dtype yet"),
        (_modules, "MTP with several modules yet"),
        (_pipeline, "a drafter on the last of several pipeline stages yet: use one stage."),
    ],
)
def test_what_is_refused(
    model: Path, head: Path, change: Callable[[VllmConfig], None], message: str
) -> None:
    config = configured(model, head)
    change(config)
    with pytest.raises(UnsupportedError) as raised:
        described(config)
    assert message in str(raised.value)
    assert str(raised.value).count("\n") == 0


@pytest.mark.parametrize("is_v2", [False, True])
def test_drafts_without_kv_need_one_stage_where_vllm_ends_steps_on_the_last_stage_alone(
    model: Path, head: Path, monkeypatch: pytest.MonkeyPatch, is_v2: bool
) -> None:
    config = configured(model, head)
    assert config.speculative_config is not None
    config.speculative_config.method = "ngram"
    _pipeline(config)
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", is_v2)
    assert bool(list(drafter_problems(config))) != is_v2
