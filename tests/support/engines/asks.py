"""Requests of every kind for a real engine: salts, adapters, embeddings, images, priorities.

An :class:`Ask` is plain data that crosses to the engine's process; embeddings and pictures are
built there, from seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from blake3 import blake3

from tests.support.engines.probe import EngineProbe

_MAX_STEPS = 100_000


@dataclass(frozen=True)
class Ask:
    """One request. ``lora``: name, id and folder. ``embeds``: seed of embeddings that take the
    place of the tokens. ``image``: seed of a picture, which ``uuid`` names. ``sampling``: of
    ``SamplingParams``."""

    tokens: Sequence[int]
    max_tokens: int = 2
    salt: str | None = None
    lora: tuple[str, int, str] | None = None
    embeds: int | None = None
    image: int | None = None
    uuid: str | None = None
    sampling: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """``token_ids[i]``: of sample i. ``blocks``: digests of the prompt's KV blocks, taken when the
    first token came."""

    token_ids: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...]
    cached_tokens: int
    blocks: tuple[str, ...]


@dataclass(frozen=True)
class Round:
    """Outcome of requests that arrived together. ``loaded_tokens``: by the connector, for all."""

    answers: list[Answer]
    loaded_tokens: int


def ask_all(probe: EngineProbe, asks: Sequence[Ask]) -> Round:
    """Serve requests that arrive together, and let the connector come to rest."""
    before = probe.external_hit_tokens()
    started = [add(probe, ask) for ask in asks]
    blocks: dict[str, tuple[str, ...]] = {}
    outputs: dict[str, Any] = {}
    samples: dict[str, dict[int, Any]] = {request_id: {} for request_id in started}
    for _ in range(_MAX_STEPS):
        for output in probe.engine.step():
            samples[output.request_id] |= {sample.index: sample for sample in output.outputs}
            if output.outputs[0].token_ids and output.request_id not in blocks:
                blocks[output.request_id] = _block_digests(probe, output)
            if output.finished:
                outputs[output.request_id] = output
        if outputs.keys() == set(started):
            break
    else:
        raise RuntimeError("requests did not finish")
    probe.drain()
    answers = [_answer(outputs[r], samples[r], blocks[r]) for r in started]
    return Round(answers, probe.external_hit_tokens() - before)


def ask_again(probe: EngineProbe, ask: Ask) -> tuple[Round, Round]:
    """Serve it, forget vLLM's own prefix cache, and serve it again."""
    first = ask_all(probe, [ask])
    probe.reset_prefix_cache()
    return first, ask_all(probe, [ask])


def add(probe: EngineProbe, ask: Ask) -> str:
    """Add a request without stepping; returns the beginning of its id."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    settings: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True} | ask.sampling
    request_id = f"ask-{next(probe._ids)}-"
    probe.engine.add_request(
        request_id,
        _prompt(probe, ask),
        SamplingParams(max_tokens=ask.max_tokens, **settings),
        lora_request=LoRARequest(*ask.lora) if ask.lora else None,
    )
    return request_id


def _prompt(probe: EngineProbe, ask: Ask) -> Any:
    prompt: dict[str, Any] = {}
    if ask.embeds is None:
        prompt["prompt_token_ids"] = list(ask.tokens)
    else:
        prompt["prompt_embeds"] = _embeddings(probe, ask.embeds, len(ask.tokens))
    if ask.image is not None:
        prompt["multi_modal_data"] = {"image": picture(ask.image)}
        if ask.uuid is not None:
            prompt["multi_modal_uuids"] = {"image": ask.uuid}
    if ask.salt is not None:
        prompt["cache_salt"] = ask.salt
    return prompt


def _embeddings(probe: EngineProbe, seed: int, num_tokens: int) -> Any:
    import torch

    config = probe.engine.vllm_config.model_config
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, config.get_hidden_size(), generator=generator).to(config.dtype)


def picture(seed: int, side: int = 56) -> Any:
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 255, (side, side, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def _block_digests(probe: EngineProbe, output: Any) -> tuple[str, ...]:
    """Digests of the prompt's full blocks, as they lie in memory while the request is running."""
    import torch

    num_blocks = len(output.prompt_token_ids or ()) // probe.scheduler.block_size
    return tuple(
        blake3(block.view(torch.uint8).numpy().tobytes()).hexdigest()
        for block in kv_blocks(probe, output.request_id)[:num_blocks]
    )


def kv_blocks(probe: EngineProbe, request_id: str) -> list[Any]:
    """The KV of a running request, one tensor [layers, ...] per block."""
    import torch

    running = [name for name in probe.scheduler.requests if request_id in name]
    if not running:
        return []
    (block_ids,) = probe.scheduler.kv_cache_manager.get_block_ids(running[0])
    layers = probe.core.model_executor.driver_worker.worker.model_runner.kv_caches
    return [torch.stack([layer[i] for layer in layers]).contiguous() for i in block_ids]


def _answer(output: Any, samples: dict[int, Any], blocks: tuple[str, ...]) -> Answer:
    ordered = [samples[index] for index in sorted(samples)]
    return Answer(
        token_ids=tuple(tuple(sample.token_ids) for sample in ordered),
        texts=tuple(sample.text for sample in ordered),
        cached_tokens=output.num_cached_tokens or 0,
        blocks=blocks,
    )
