"""vLLM's real scheduler for a shadow engine, with our connector alone or beside another one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from vllm.config import KVTransferConfig, ModelConfig, ParallelConfig, SpeculativeConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from lmcache_connector.vllm_compat import support
from tests.support.doubles.foreign_connector import FOREIGN
from tests.support.doubles.shadow_memory import BLOCK_SIZE
from tests.support.vllm_configs import engine_config, make_scheduler

MAX_MODEL_LEN = 512


@dataclass(frozen=True, slots=True)
class Shape:
    """Of one shadow engine. ``depth``: steps scheduled ahead of the one being waited for.

    ``beside``: where our connector stands, with another one under a ``MultiConnector``. ``zeroes``:
    reused blocks are zeroed before the step's plan is handed over, as model runner V2 may.
    ``lookahead``: 1 for a drafter's head, whose KV follows from the next token; it runs in steps
    with requests up to ``drafted_len``. ``drafts``: how many n-grams or the head make
    in a step of a decode; some are rejected. If 0, all of a head's are accepted.
    ``groups``: the model's KV cache groups; "full", or a rule's letter and span: "w40", "c64", or
    "s" for states, whose chunks are blocks; "r" and a size for rings. ``in_step``: ranks make loads
    inside steps, and announce what they evict.
    """

    world_size: int = 1
    depth: int = 1
    chunk_size: int = 2 * BLOCK_SIZE
    num_blocks: int = 24
    prefix_caching: bool = True
    max_batched_tokens: int = 64
    tier_chunks: int = 12
    redis: bool = False
    role: str = "kv_both"
    admission: str = "all"
    store_generated: bool = True
    beside: int | None = None
    zeroes: bool = False
    audit_share: float = 0.0
    kv_events: bool = False
    groups: tuple[str, ...] = ("full",)
    lookahead: int = 0
    drafted_len: int = MAX_MODEL_LEN - 1
    drafts: int = 0
    in_step: bool = False


def build_scheduler(model: Path, shape: Shape) -> Scheduler:
    init_none_hash(sha256)
    config = engine_config(
        model,
        depth=shape.depth,
        max_batched_tokens=shape.max_batched_tokens,
        max_model_len=MAX_MODEL_LEN,
        world_size=shape.world_size,
        prefix_caching=shape.prefix_caching,
        kv_events=shape.kv_events,
        speculative_config=_speculation(model, shape),
        kv_transfer_config=_transfer(shape),
    )
    if "s" in shape.groups:
        config.cache_config.mamba_cache_mode = "align"
    if shape.drafts:  # vLLM keeps states of answers, too
        config.cache_config.prefix_cache_retention_interval = None
    kv_cache = KVCacheConfig(
        num_blocks=shape.num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[_group(shape, i, code) for i, code in enumerate(shape.groups)],
    )
    with patch.object(support, "runs_drafted_states", lambda: True):  # no worker runs
        built = make_scheduler(config, kv_cache)
    built.needs_kv_cache_zeroing = shape.zeroes
    for manager in built.kv_cache_manager.coordinator.single_type_managers:
        manager._record_new_block_ids = shape.zeroes
    return built


def _speculation(model: Path, shape: Shape) -> SpeculativeConfig | None:
    """A head of the model's own form, or n-grams. Nothing is read of it but its configuration."""
    if not (shape.lookahead or shape.drafts):
        return None
    target = ModelConfig(
        model=str(model), tokenizer=str(model), max_model_len=MAX_MODEL_LEN, seed=0
    )
    common: dict[str, Any] = {
        "target_model_config": target,
        "target_parallel_config": ParallelConfig(tensor_parallel_size=1),
    }
    if not shape.lookahead:
        return SpeculativeConfig(
            method="ngram", num_speculative_tokens=shape.drafts, prompt_lookup_max=2, **common
        )
    return SpeculativeConfig(
        method="eagle",
        model=target.model,
        num_speculative_tokens=shape.drafts or 1,
        max_model_len=min(shape.drafted_len + (shape.drafts or 1), MAX_MODEL_LEN),
        **common,
    )


def _group(shape: Shape, index: int, code: str) -> KVCacheGroupSpec:
    layers = [f"model.layers.{2 * index + i}.self_attn.attn" for i in range(2)]
    if code == "s":
        state: dict[str, Any] = {"shapes": ((4,),), "dtypes": (torch.float32,)}
        state |= {"mamba_cache_mode": "align", "num_speculative_blocks": shape.drafts}
        return KVCacheGroupSpec(layers, MambaSpec(block_size=BLOCK_SIZE, **state))
    common: dict[str, Any] = {
        "block_size": BLOCK_SIZE,
        "num_kv_heads": 2 // shape.world_size,
        "head_size": 32,
        "dtype": torch.bfloat16,
    }
    if code == "full":
        return KVCacheGroupSpec(layers, FullAttentionSpec(**common))
    rule, span = code[0], int(code[1:])
    if rule == "r":
        return KVCacheGroupSpec(layers, CircularBufferSpec(**common | {"block_size": span}))
    if rule == "w":
        return KVCacheGroupSpec(layers, SlidingWindowSpec(**common, sliding_window=span))
    spec = ChunkedLocalAttentionSpec(**common, attention_chunk_size=span)
    return KVCacheGroupSpec(layers, spec)


def _transfer(shape: Shape) -> KVTransferConfig:
    spans = [int(code[1:]) for code in shape.groups if code[1:].isdigit()]
    ours: dict[str, Any] = {
        "kv_connector": "LMCacheTieredConnector",
        "kv_connector_module_path": "lmcache_connector",
        "kv_role": shape.role,
        "kv_connector_extra_config": {
            "chunk_size": shape.chunk_size,
            "compute_or_load": "always",
            "redis_admission": shape.admission,
            "store_generated": shape.store_generated,
            "audit_share": shape.audit_share,
            "host_sharing": False,
            # So small that the short prompts here have such places, too.
            "window_interval": 4 * max(spans, default=1),
        },
    }
    if shape.beside is None:
        return KVTransferConfig(**ours)
    connectors = [FOREIGN]
    connectors.insert(shape.beside, ours)
    return KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"connectors": connectors},
    )
