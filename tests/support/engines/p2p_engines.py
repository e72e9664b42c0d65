"""Prefill and decode engines, each in a process of its own, and requests of every kind for them.

An :class:`Ask` is plain data; embeddings and pictures are built where it is asked, from seeds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from tests.support.engines.instance import VllmInstance, set_environment
from tests.support.engines.probe import EngineProbe, Finished, Served
from tests.support.redis.servers import free_ports

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


DEADLINE_SECONDS = 240.0
"""Of a transfer."""
NOTICED_SECONDS = DEADLINE_SECONDS / 2
"""A request that waits for a transfer that never comes is served within it. Most of the time is
for computing, perhaps on a busy machine."""


def kv_transfer(role: str, port: int, **extra: Any) -> dict[str, Any]:
    """The JSON of ``--kv-transfer-config``."""
    extra.setdefault("host_sharing", False)
    return {
        "kv_connector": "LMCacheP2PConnector",
        "kv_role": role,
        "kv_port": port,
        "kv_connector_extra_config": extra,
    }


@dataclass
class Engines:
    """Some prefill and decode engines with their control ports, and names for requests."""

    prefill: list[tuple[VllmInstance, int]]
    decode: list[tuple[VllmInstance, int]]
    numbers: count[int]

    def name(self, prefill: int = 0, decode: int = 0) -> str:
        """A request id that names one of each."""
        ports = self.prefill[prefill][1], self.decode[decode][1]
        return (
            f"___prefill_addr_127.0.0.1:{ports[0]}___decode_addr_127.0.0.1:{ports[1]}"
            f"_n{next(self.numbers)}"
        )

    def hand_over(self, prompt: Sequence[int]) -> tuple[Answer, Answer]:
        """By request id, one after the other, as a router does."""
        name = self.name()
        cold = self.prefill[0][0].call(prefill, Ask(name, prompt, 1))
        return cold, self.decode[0][0].call(ask, Ask(name, prompt))

    def hand_over_by_params(self, prompt: Sequence[int]) -> tuple[Answer, Answer]:
        params = {"do_remote_decode": True, "do_remote_prefill": False}
        cold = self.prefill[0][0].call(prefill, Ask(f"p{next(self.numbers)}", prompt, 1, params))
        served = self.decode[0][0].call(
            ask, Ask(f"d{next(self.numbers)}", prompt, params=cold.params)
        )
        return cold, served


def metrics(probe: EngineProbe) -> dict[str, float]:
    """Hand-overs as vLLM's own logger has them for Prometheus, by name and reason, in short."""
    prefix = "p2p_"
    found = probe.metrics().items()
    return {name.removeprefix(prefix): value for name, value in found if name.startswith(prefix)}


def log_stats(probe: EngineProbe) -> None:
    """What vLLM does every ten seconds."""
    probe.engine.do_log_stats()


@contextmanager
def running(
    model: Path, folder: Path, transfers: Sequence[dict[str, Any]], **args: Any
) -> Iterator[list[VllmInstance]]:
    """Engines that start at the same time. ``args`` may hold lists, one entry per engine."""
    instances = []
    for index, transfer in enumerate(transfers):
        settings: dict[str, Any] = {"kv_cache_memory_bytes": 256 << 20, "max_model_len": 8192}
        settings |= {k: v[index] if isinstance(v, list) else v for k, v in args.items()}
        settings = {name: value for name, value in settings.items() if value is not None}
        log = folder / f"{transfer['kv_role']}-{index}.log"
        instances.append(VllmInstance(model, transfer, log, **settings))
    with ExitStack() as stack:
        with ThreadPoolExecutor(len(instances)) as pool:
            list(pool.map(stack.enter_context, instances))
        yield instances


def nixl_transfer(role: str) -> dict[str, Any]:
    """Part of the JSON of ``--kv-transfer-config``."""
    return {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}


@contextmanager
def running_nixl(
    model: Path, folder: Path, transfers: Sequence[dict[str, Any]], **args: Any
) -> Iterator[list[VllmInstance]]:
    """Engines that start at the same time, each on a core of its own."""
    cores, prepares = sorted(os.sched_getaffinity(0)), []
    for index in range(len(transfers)):
        environment = {
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_ports(1)),
            "VLLM_CPU_OMP_THREADS_BIND": str(cores[index % len(cores)]),
        }
        prepares.append(partial(set_environment, environment))
    with running(model, folder, transfers, prepare=prepares, **args) as instances:
        yield instances


def nixl_transferred(probe: EngineProbe) -> tuple[float, float, float]:
    """Bytes that vLLM's connector has fetched here so far, the seconds of its transfers, and how
    many failed."""
    from prometheus_client import REGISTRY

    probe.serve([1] * 10)  # vLLM counts with the next step
    names = (
        "vllm:nixl_bytes_transferred_sum",
        "vllm:nixl_xfer_time_seconds_sum",
        "vllm:nixl_num_failed_transfers_total",
    )
    sums = dict.fromkeys(names, 0.0)
    for family in REGISTRY.collect():
        for sample in family.samples:
            if sample.name in sums:
                sums[sample.name] += float(sample.value)
    return sums[names[0]], sums[names[1]], sums[names[2]]
