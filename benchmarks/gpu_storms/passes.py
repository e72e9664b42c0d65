"""The interface of a storm's engine to its device, simulated or real.

No model is computed. A forward pass lasts as long as one of a large model. In its middle it checks
the KV before its tokens, and at its end it writes its own KV: a block holds the digest of all
tokens up to the end of the block.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from examples.tiny_model import ModelShape

if TYPE_CHECKING:
    import torch

BLOCK_SIZE = 16
MAX_MODEL_LEN = 65536
# 128 KiB of KV per token, as in an 8B model; four wide layers need less Python than 32.
MODEL = ModelShape(
    num_layers=4,
    hidden_size=64,
    intermediate_size=64,
    num_heads=8,
    num_kv_heads=8,
    head_dim=1024,
    vocab_size=64,
    max_position=MAX_MODEL_LEN,
)


@dataclass(frozen=True, slots=True)
class DeviceSpeed:
    """``step_seconds``: a forward pass of hardly any tokens. ``token_seconds``: added for each
    token of a prompt; ``pair_seconds``: for each token before it. A simulated device also has a
    bus. ``late_seconds``: the host's largest delay until it learns of an end."""

    step_seconds: float = 0.010
    token_seconds: float = 30e-6
    pair_seconds: float = 1e-9
    bus_bytes_per_second: float = 25e9
    store_bytes_per_second: float = 25e9
    copy_seconds: float = 100e-6
    late_seconds: float = 200e-6

    def pass_seconds(self, spans: Sequence[tuple[int, int]]) -> float:
        """The time of a pass that computes tokens ``[start, end)`` of each of these requests."""
        seconds = self.step_seconds
        for start, end in spans:
            if end - start > 1:
                pairs = (end - start) * (start + end) / 2
                seconds += (end - start) * self.token_seconds + pairs * self.pair_seconds
        return seconds


@dataclass(frozen=True, slots=True)
class GpuShape:
    """``depth``: batches under way at once, 2 with asynchronous scheduling. ``settings``:
    ``kv_connector_extra_config``. ``prefix_caching``: vLLM's own."""

    speed: DeviceSpeed = field(default_factory=DeviceSpeed)
    model: ModelShape = MODEL
    depth: int = 2
    num_blocks: int = 6000
    max_batched_tokens: int = 8192
    cpu_gib: float = 16
    role: str = "kv_both"
    prefix_caching: bool = False
    settings: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def layer_names(self) -> list[str]:
        return [f"model.layers.{i}.self_attn.attn" for i in range(self.model.num_layers)]

    @property
    def cache_size(self) -> tuple[int, int, int, int]:
        """Blocks, KV heads, tokens and content of a layer's KV cache; two bytes each."""
        model = self.model
        return self.num_blocks, model.num_kv_heads, BLOCK_SIZE, 2 * model.head_dim


@dataclass(frozen=True, slots=True)
class Work:
    """A pass computes tokens ``[start, end)`` of a prompt, whose full blocks shall hold
    ``digests``. ``table`` lists the request's blocks."""

    request_id: str
    table: Sequence[int]
    digests: Sequence[int]
    start: int
    end: int

    def before(self) -> tuple[Sequence[int], Sequence[int]]:
        """The full blocks before its tokens, and their expected digests."""
        end = self.start // BLOCK_SIZE
        return self.table[:end], self.digests[:end]

    def written(self) -> tuple[Sequence[int], Sequence[int]]:
        """The blocks that it fills, and their digests."""
        start, end = self.start // BLOCK_SIZE, min(self.end // BLOCK_SIZE, len(self.digests))
        return self.table[start:end], self.digests[start:end]


class Pass(Protocol):
    """A forward pass under way."""

    def wait(self) -> None:
        """Until the host knows that the pass has ended."""


class Device(Protocol):
    @property
    def kv_caches(self) -> dict[str, torch.Tensor]:
        """The connector's KV caches by layer name."""

    def launch(self, seconds: float, blocks: Collection[int], works: Sequence[Work]) -> Pass:
        """Queue a pass that uses ``blocks`` of the paged cache, behind those launched before."""

    def busy_seconds(self) -> float:
        """Until all launched passes will have ended."""


def digests_of(prompt: Sequence[int]) -> list[int]:
    """The digest of each full block of a prompt."""
    digests, last = [], 0
    for end in range(BLOCK_SIZE, len(prompt) + 1, BLOCK_SIZE):
        last = hash((last, *prompt[end - BLOCK_SIZE : end]))
        digests.append(last)
    return digests
