"""Who shares KV with whom, and who stays out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from vllm.lora.request import LoRARequest
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from lmcache_connector.keys.request_identity import RequestIdentifier


def request(pooling: bool = False, **more: Any) -> Request:
    return Request(
        request_id="r",
        prompt_token_ids=[1, 2, 3],
        sampling_params=None if pooling else SamplingParams(max_tokens=1),
        pooling_params=PoolingParams() if pooling else None,
        **more,
    )


def adapter(folder: Path, seed: int = 0, rank: int = 4) -> Path:
    folder.mkdir()
    values = np.random.default_rng(seed).random((8, rank), dtype=np.float32)
    save_file({"lora_A": values}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank}))
    return folder


def lora_identity(
    path: Path, name: str = "a", number: int = 1, identifier: RequestIdentifier | None = None
) -> str | None:
    identifier = identifier or RequestIdentifier(False)
    found = identifier.identify(request(lora_request=LoRARequest(name, number, str(path))), "")
    return found.lora if found is not None else None


def test_a_plain_request_has_a_plain_identity() -> None:
    found = RequestIdentifier(False).identify(request(cache_salt="s"), "epoch")
    assert found is not None
    assert found.root() == {"salt": "s", "lora": None, "epoch": "epoch"}
    assert not found.has_extras


@pytest.mark.parametrize("salt", [None, ""])
def test_where_salts_are_required_unsalted_requests_stay_out(salt: str | None) -> None:
    identifier = RequestIdentifier(require_cache_salt=True)
    assert identifier.identify(request(cache_salt=salt), "") is None
    assert identifier.identify(request(cache_salt="s"), "") is not None


def test_pooling_requests_and_open_sessions_stay_out() -> None:
    identifier = RequestIdentifier(False)
    assert identifier.identify(request(pooling=True), "") is None
    assert identifier.identify(request(resumable=True), "") is None


def test_an_adapter_is_its_content_not_its_name(tmp_path: Path) -> None:
    path = adapter(tmp_path / "a")
    copy = tmp_path / "b"
    shutil.copytree(path, copy)
    assert lora_identity(path) == lora_identity(copy, name="other", number=7)
    assert lora_identity(path) is not None


def test_another_adapter_or_another_scaling_is_another_identity(tmp_path: Path) -> None:
    path = adapter(tmp_path / "a")
    scaled = tmp_path / "b"
    shutil.copytree(path, scaled)
    (scaled / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 64}))
    other = adapter(tmp_path / "c", seed=1)
    assert len({lora_identity(path), lora_identity(scaled), lora_identity(other)}) == 3


def test_an_adapter_retrained_in_place_stays_out_until_it_is_loaded_again(tmp_path: Path) -> None:
    """vLLM may compute with the weights it has, or with those it read again after an eviction."""
    identifier = RequestIdentifier(False)
    path = adapter(tmp_path / "a")
    before = lora_identity(path, identifier=identifier)
    shutil.rmtree(path)
    adapter(path, seed=5)
    assert lora_identity(path, identifier=identifier) is None
    path_again = adapter(tmp_path / "b", seed=5)
    assert lora_identity(path_again, identifier=identifier) is None
    reloaded = LoRARequest("a", 1, str(path), load_inplace=True)
    found = identifier.identify(request(lora_request=reloaded), "")
    assert found is not None
    assert found.lora == lora_identity(path_again, number=2, identifier=identifier) != before
    assert lora_identity(path, identifier=identifier) == found.lora


@pytest.mark.parametrize("lacks", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_that_cannot_be_read_stays_out(
    tmp_path: Path, lacks: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = adapter(tmp_path / "a")
    (path / lacks).unlink()
    assert lora_identity(path, name="mine") is None
    assert "mine" in caplog.text
    assert lora_identity(tmp_path / "nowhere") is None
