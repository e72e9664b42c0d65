"""What makes the KV of a vLLM request unique, read off the request.

Mirrors vLLM's ``generate_block_hash_extra_keys`` (vllm/v1/core/kv_cache_utils.py): salt, LoRA,
multimodal inputs, prompt embeddings.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from lmcache_connector.keys.request_keys import MultimodalSpan, RequestIdentity
from lmcache_connector.keys.weights_digest import directory_digest

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Adapter:
    """``files``: the adapter's path and last modification in ns. ``digest``: of its content;
    ``None``: its requests bypass the cache."""

    files: tuple[str, int]
    digest: str | None


class RequestIdentifier:
    """Turns requests into identities. Remembers the digests of LoRA adapters it has read."""

    def __init__(self, require_cache_salt: bool) -> None:
        self._require_cache_salt = require_cache_salt
        self._adapters: dict[int, _Adapter] = {}  # by the number vLLM knows them by

    def identify(self, request: Request, weight_epoch: str) -> RequestIdentity | None:
        """``None`` for a request that must bypass the cache.

        Bypassed are unsalted requests where salts are required, pooling requests (their model may
        attend both ways), sessions whose prompt still changes, and adapters that cannot be read.
        """
        if self._require_cache_salt and not request.cache_salt:
            return None
        if request.pooling_params is not None or request.resumable:
            return None
        lora = None
        if request.lora_request is not None:
            lora = self._adapter_digest(request.lora_request)
            if lora is None:
                return None
        return RequestIdentity(
            cache_salt=request.cache_salt,
            lora=lora,
            weight_epoch=weight_epoch,
            multimodal=tuple(_spans(request)),
            embeds_digest=_embeds_digest(request.prompt_embeds),
        )

    def _adapter_digest(self, lora_request: Any) -> str | None:
        """vLLM reads an adapter's files when it first meets its number, and keeps the weights.

        Once they change, nobody can tell from here which of the two it computes with, unless the
        request says that they are read again.
        """
        path, number = Path(lora_request.lora_path), lora_request.lora_int_id
        files = (str(path), _last_written(path))
        known = self._adapters.get(number)
        if known is None or (known.files != files and lora_request.load_inplace):
            known = _Adapter(files, _read_adapter(path, lora_request.lora_name))
            self._adapters[number] = known
        if known.files != files and known.digest is not None:
            logger.warning(
                "The files of LoRA adapter %s are not those it was first served with: its requests "
                "bypass the KV cache tiers from now on. Load changed weights under a new number, "
                "or with load_inplace.",
                lora_request.lora_name,
            )
            known = self._adapters[number] = _Adapter(known.files, None)
        return known.digest


def _last_written(path: Path) -> int:
    """Nanoseconds; 0 for a folder that cannot be read."""
    try:
        return max((file.stat().st_mtime_ns for file in path.iterdir()), default=0)
    except OSError:
        return 0


def _read_adapter(path: Path, name: str) -> str | None:
    try:
        weights = directory_digest(path)
        config = blake3((path / "adapter_config.json").read_bytes()).hexdigest()
    except OSError:
        weights = None
    if weights is None:
        logger.warning(
            "LoRA adapter %s cannot be read at %s: its requests bypass the KV cache tiers. "
            "Give vLLM a local directory.",
            name,
            path,
        )
        return None
    return f"{weights}:{config}"


def _spans(request: Request) -> list[MultimodalSpan]:
    return [
        MultimodalSpan(
            content_hash=feature.identifier,
            start=feature.mm_position.offset,
            end=feature.mm_position.offset + feature.mm_position.length,
        )
        for feature in request.mm_features
    ]


def _embeds_digest(prompt_embeds: Any) -> Callable[[int, int], str] | None:
    if prompt_embeds is None:
        return None

    def digest(start: int, end: int) -> str:
        rows = prompt_embeds[start:end].contiguous()
        import torch

        return blake3(rows.view(torch.uint8).numpy().tobytes()).hexdigest()

    return digest
