"""Which requests share KV, and which bypass the tiers."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from lmcache_connector.keys.request_keys import RequestIdentity
from lmcache_connector.plans import LoadedAdapterList
from lmcache_connector.requests.adapters import Adapters
from lmcache_connector.requests.identifier import Bypass, RequestIdentifier
from lmcache_connector.threads import PENDING, StepWait
from tests.support.clock import Clock


def request(pooling: bool = False, request_id: str = "r", **more: Any) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=None if "prompt_embeds" in more else [1, 2, 3],
        sampling_params=None if pooling else SamplingParams(max_tokens=1),
        pooling_params=PoolingParams() if pooling else None,
        **more,
    )


class Identified:
    """An identifier that gets one request after the other."""

    def __init__(self, require_cache_salt: bool = False, ranks: int = 1) -> None:
        self.counts: Counter[str] = Counter()
        self.clock = Clock(0.0)
        self.identifier = RequestIdentifier(
            require_cache_salt,
            Adapters(ranks, Path, self.clock),
            8,
            lambda reason: self.counts.update([reason.value]),
        )
        self.on_ranks: list[dict[int, str | None]] = [{} for _ in range(ranks)]

    def of(self, wanted: Request) -> RequestIdentity | Bypass:
        found = self.identifier.identify(wanted)
        for _ in range(2):
            if found is PENDING:
                self.answer()
                found = self.identifier.identify(wanted, StepWait(5.0))
        assert found is not PENDING
        assert self.identifier.identify(wanted) == found
        self.identifier.forget(wanted)
        return found

    def next_step(self, now: float) -> None:
        self.clock.now = now
        self.identifier.adapters.next_step()

    def answer(self) -> None:
        """All ranks list their adapters."""
        adapters_of = self.identifier.adapters
        question = adapters_of.take_question()
        for rank, adapters in enumerate(self.on_ranks):
            adapters_of.update(rank, LoadedAdapterList(question, tuple(adapters.items())))

    def lora(self, path: Path, name: str = "a", number: int = 1, **more: Any) -> str | None:
        found = self.of(request(lora_request=LoRARequest(name, number, str(path), **more)))
        return found.lora if isinstance(found, RequestIdentity) else None


def adapter(folder: Path, seed: int = 0, rank: int = 4) -> Path:
    folder.mkdir(exist_ok=True)
    values = np.random.default_rng(seed).random((8, rank), dtype=np.float32)
    save_file({"lora_A": values}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank}))
    return folder


def picture(item: Any, name: str = "one", **position: Any) -> MultiModalFeatureSpec:
    place = {"offset": 0, "length": 3} | position
    return MultiModalFeatureSpec(item, "image", name, PlaceholderRange(**place), mm_hash=name)


@pytest.mark.parametrize("salt", [None, ""])
def test_unsalted_requests_bypass_where_salts_are_required(salt: str | None) -> None:
    identified = Identified(require_cache_salt=True)
    assert identified.of(request(cache_salt=salt)) is Bypass.NO_SALT
    assert isinstance(identified.of(request(cache_salt="s")), RequestIdentity)


def test_pooling_requests_and_open_sessions_bypass() -> None:
    identified = Identified()
    assert identified.of(request(pooling=True)) is Bypass.POOLING
    assert identified.of(request(resumable=True)) is Bypass.SESSION
    assert identified.counts == {"pooling": 1, "session": 1}, "each once, however often asked"


def test_requests_with_an_unknown_field_bypass() -> None:
    unheard_of: Any = request()
    unheard_of.attention_sinks = 4
    assert Identified().of(unheard_of) is Bypass.UNKNOWN_FIELD


# -- images and embeddings -------------------------------------------------------------------------


def test_an_image_is_its_content_not_its_name() -> None:
    identified = Identified()
    one, two = MultiModalKwargsItem.dummy(8), MultiModalKwargsItem.dummy(8)
    one["dummy"].data.fill_(1)
    two["dummy"].data.fill_(2)

    def extras(feature: MultiModalFeatureSpec) -> bytes:
        found = identified.of(request(mm_features=[feature]))
        assert isinstance(found, RequestIdentity)
        return found.extras(0, 3)

    same = MultiModalKwargsItem.dummy(8)
    same["dummy"].data.fill_(1)
    assert extras(picture(one)) == extras(picture(same, "another name"))
    different = [
        picture(one),
        picture(two),
        picture(one, length=2),
        picture(one, offset=1),
        picture(one, is_embed=torch.tensor([True, False, True])),
        picture(one, is_embed=torch.tensor([True, True, False])),
    ]
    assert len(set(map(extras, different))) == len(different)


def test_an_image_without_data_bypasses() -> None:
    identified = Identified()
    assert identified.of(request(mm_features=[picture(None)])) is Bypass.MULTIMODAL
    assert identified.counts == {"multimodal": 1}


def test_a_request_that_runs_unidentified_bypasses(tmp_path: Path) -> None:
    identified = Identified()
    wanted = request(lora_request=LoRARequest("a", 1, str(adapter(tmp_path / "a"))))
    assert identified.identifier.identify(wanted) is PENDING
    assert identified.identifier.identify(wanted, StepWait(5.0)) is PENDING, "no rank has answered"
    identified.identifier.give_up("r")
    assert identified.identifier.identify(wanted) is Bypass.ADAPTER
    identified.identifier.forget(wanted)
    wanted = request(mm_features=[picture(MultiModalKwargsItem.dummy(8))])
    identified.identifier.identify(wanted)
    identified.identifier.give_up("r")
    assert identified.identifier.identify(wanted, StepWait(5.0)) is Bypass.MULTIMODAL
    identified.identifier.give_up("unheard of")


def test_embeddings_and_their_places_count_by_chunk() -> None:
    embeds = torch.arange(64, dtype=torch.bfloat16).reshape(16, 4)
    changed = embeds.clone()
    changed[9] += 64
    mask = [True] * 8 + [False] * 8

    def extras(rows: torch.Tensor, is_token: list[bool] | None = None) -> list[bytes]:
        found = Identified().of(request(prompt_embeds=rows, prompt_is_token_ids=is_token))
        assert isinstance(found, RequestIdentity)
        return [found.extras(0, 8), found.extras(8, 16)]

    plain, other, masked = extras(embeds), extras(changed), extras(embeds, mask)
    assert plain[0] == other[0]
    assert plain[1] != other[1]
    assert len({plain[0], masked[0], plain[1], masked[1]}) == 4


# -- adapters --------------------------------------------------------------------------------------


def test_an_adapter_is_its_content_not_its_name(tmp_path: Path) -> None:
    identified = Identified()
    path = adapter(tmp_path / "a")
    copy = tmp_path / "b"
    shutil.copytree(path, copy)
    assert identified.lora(path) == identified.lora(copy, name="other", number=7) is not None
    assert identified.lora(path) != identified.lora(path, is_3d_lora_weight=True)


@pytest.mark.parametrize("lacks", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_unreadable_adapter_bypasses(
    tmp_path: Path, lacks: str, caplog: pytest.LogCaptureFixture
) -> None:
    identified = Identified()
    path = adapter(tmp_path / "a")
    (path / lacks).unlink()
    assert identified.lora(path, name="mine") is None
    assert "mine" in caplog.text
    assert identified.lora(tmp_path / "nowhere") is None
    assert identified.counts == {"adapter": 2}


def test_an_adapter_bypasses_while_a_rank_has_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    identified = Identified(ranks=2)
    path = adapter(tmp_path / "a")
    name = identified.lora(path)
    assert name is not None, "no rank has loaded it yet: it will read these files"
    identified.on_ranks[0] = {1: name}
    assert identified.lora(path) == name
    for loaded in ("what was there before", None):
        identified.on_ranks[1] = {1: loaded}
        assert identified.lora(path) is None
        assert identified.lora(path, number=2) == name
        assert identified.lora(path, load_inplace=True) == name, "it is read again"
    assert caplog.text.count("are not those vLLM has loaded") == 1
    identified.on_ranks[1] = {1: name}
    assert identified.lora(path) == name


def test_an_adapter_is_checked_again_after_its_request_queued(tmp_path: Path) -> None:
    identified = Identified()
    path = adapter(tmp_path / "a")
    waiting = request(lora_request=LoRARequest("a", 1, str(path)))
    identifier = identified.identifier
    assert identifier.identify(waiting) is PENDING
    identified.answer()
    found = identifier.identify(waiting, StepWait(5.0))
    assert isinstance(found, RequestIdentity)
    shutil.rmtree(path)
    adapter(path, seed=5)
    assert identifier.is_current(waiting), "not yet"
    identified.next_step(1.0)
    assert identifier.is_current(waiting, StepWait(5.0)) is False
    identified.next_step(2.0)
    assert identifier.is_current(waiting, StepWait(5.0)) is False, "and so it stays"
    shutil.rmtree(path)
    adapter(path)
    identified.next_step(3.0)
    assert identifier.is_current(waiting, StepWait(5.0)) is True
    shutil.rmtree(path)
    adapter(path, seed=5)
    identified.clock.now = 60.0  # the engine was paused
    assert identifier.is_current(waiting, StepWait(5.0)) is False
    shutil.rmtree(path)
    adapter(path)
    identified.next_step(61.0)
    assert identifier.is_current(waiting, StepWait(5.0)) is True
    identified.on_ranks[0] = {1: "another"}
    identified.answer()
    assert identifier.is_current(waiting, StepWait(5.0)) is False
