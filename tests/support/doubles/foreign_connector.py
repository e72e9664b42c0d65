"""Another connector under vLLM's ``MultiConnector``, as far as the scheduler sees it.

It loads what a test tells it to, and promises nothing about the KV: see :class:`Arrival`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

FOREIGN = {
    "kv_connector": "ForeignConnector",
    "kv_connector_module_path": "tests.support.doubles.foreign_connector",
    "kv_role": "kv_both",
}


class Arrival(Enum):
    """What becomes of a load."""

    RIGHT = "right"
    WRONG = "other KV than the request's, and nobody says so"
    FAILED = "a part, and the rest is reported as missing"


@dataclass(frozen=True, slots=True)
class Offer:
    """Of so many leading tokens of a request. ``is_async``: loaded between steps."""

    num_tokens: int
    is_async: bool
    arrival: Arrival


@dataclass(frozen=True, slots=True)
class ForeignLoad:
    """Into ``block_ids``, the first of which begins at token ``start``."""

    request_id: str
    block_ids: tuple[int, ...]
    start: int
    offer: Offer


@dataclass
class ForeignMetadata(KVConnectorMetadata):
    loads: tuple[ForeignLoad, ...]
    sends: tuple[str, ...]


class ForeignConnector(KVConnectorBase_V1, SupportsHMA):
    """``offers`` by request id: each is made until it is taken. ``sends``: requests whose blocks it
    keeps when they finish, for a while."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.offers: dict[str, Offer] = {}
        self.sends: set[str] = set()
        self._loads: list[ForeignLoad] = []
        self._sending: list[str] = []

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        offer = self.offers.get(request.request_id)
        if offer is None or offer.num_tokens <= num_computed_tokens:
            return 0, False
        return offer.num_tokens - num_computed_tokens, offer.is_async

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if num_external_tokens > 0:
            offer = self.offers.pop(request.request_id)
            start = offer.num_tokens - num_external_tokens
            size = self._vllm_config.cache_config.block_size
            ids = blocks.get_block_ids()[0][start // size : -(-offer.num_tokens // size)]
            self._loads.append(ForeignLoad(request.request_id, tuple(ids), start, offer))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ForeignMetadata:
        meta = ForeignMetadata(tuple(self._loads), tuple(self._sending))
        self._loads, self._sending = [], []
        return meta

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        keeps = request.request_id in self.sends
        self.sends.discard(request.request_id)
        if keeps:
            self._sending.append(request.request_id)
        return keeps, None

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        raise NotImplementedError("shadow workers play that side")

    def wait_for_layer_load(self, layer_name: str) -> None:
        raise NotImplementedError

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        raise NotImplementedError

    def wait_for_save(self) -> None:
        raise NotImplementedError
