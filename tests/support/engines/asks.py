"""Requests of every kind, as clients and routers send them; run inside an engine's process.

An :class:`Ask` is plain data; embeddings and pictures are built where it is asked, from seeds.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.support.engines.probe import EngineProbe, Finished, Served

_STEPS_TO_HOLD = 2  # a server goes on making steps while blocks are held


@dataclass(frozen=True)
class Ask:
    """``request_id``: as a client or router gave it. ``params``: its ``kv_transfer_params``.
    ``lora``: name, id and folder. ``embeds``: seed of embeddings that take the place of the tokens.
    ``image``: seed of a picture."""

    request_id: str
    prompt: Sequence[int]
    max_tokens: int = 2
    params: dict[str, Any] | None = None
    salt: str | None = None
    lora: tuple[str, int, str] | None = None
    embeds: int | None = None
    image: int | None = None


@dataclass(frozen=True)
class Answer:
    """``params``: the ``kv_transfer_params`` of the answer, for the router to pass on."""

    served: Served
    params: dict[str, Any] | None
    finish_reason: str


def ask(probe: EngineProbe, request: Ask) -> Answer:
    """Serve one request to its end, and look at its KV while it still holds its blocks."""
    return ask_all(probe, [request])[0]


def ask_all(probe: EngineProbe, requests: Sequence[Ask]) -> list[Answer]:
    """Serve requests that arrive together."""
    started = time.perf_counter()
    names = [add(probe, request) for request in requests]
    return [answer_of(finished) for finished in probe.finish(names, started)]


def prefill(probe: EngineProbe, request: Ask) -> Answer:
    """Serve it, and leave its blocks to whoever fetches them."""
    started = time.perf_counter()
    (finished,) = probe.finish([add(probe, request)], started, drain=False)
    for _ in range(_STEPS_TO_HOLD):
        probe.engine.step()
    return answer_of(finished)


def answer_of(finished: Finished) -> Answer:
    output = finished.output
    reason = str(output.outputs[0].finish_reason)
    return Answer(finished.served, output.kv_transfer_params, reason)


def add(probe: EngineProbe, request: Ask) -> str:
    """Add a request without stepping; returns its id."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    extra = {"kv_transfer_params": request.params} if request.params is not None else None
    params = SamplingParams(
        max_tokens=request.max_tokens, temperature=0.0, ignore_eos=True, extra_args=extra
    )
    lora = LoRARequest(*request.lora) if request.lora else None
    probe.engine.add_request(request.request_id, _prompt(probe, request), params, lora_request=lora)
    return request.request_id


def _prompt(probe: EngineProbe, request: Ask) -> Any:
    prompt: dict[str, Any] = {}
    if request.embeds is None:
        prompt["prompt_token_ids"] = list(request.prompt)
    else:
        prompt["prompt_embeds"] = _embeddings(probe, request.embeds, len(request.prompt))
    if request.image is not None:
        prompt["multi_modal_data"] = {"image": _picture(request.image)}
    if request.salt is not None:
        prompt["cache_salt"] = request.salt
    return prompt


def _embeddings(probe: EngineProbe, seed: int, num_tokens: int) -> Any:
    import torch

    config = probe.engine.vllm_config.model_config
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, config.get_hidden_size(), generator=generator).to(config.dtype)


def _picture(seed: int, side: int = 56) -> Any:
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 255, (side, side, 3), dtype=np.uint8)
    return Image.fromarray(pixels)
