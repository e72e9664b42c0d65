"""One form of a configuration for all versions of vLLM: that of 0.32.

A field that a version adds, and that changes nothing at the value it has, would keep its instances
apart from those of other versions. The tables say which fields those are. A field in neither table
keeps versions apart until somebody has looked at it.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

ANY = object()
"""Whatever the value: it has no part in what is computed."""

# By class, or all that fit: fields that 0.32 does not have, and the values with which a version
# that has them computes what one without them computes.
OTHERS_HAVE: Mapping[str, Mapping[str, object]] = {
    "AttentionConfig": {
        "indexer_tp_shard_min_rows": 65536,
        "minimax_m3_indexer_cp": False,
        "trtllm_ragged_backend": "trtllm-gen",
    },
    "CacheConfig": {
        "simple_cpu_offload_num_blocks": ANY,  # of another connector
        "user_specified_mamba_block_size": False,
    },
    "KernelConfig": {"monokernel": False},
    "MLAAttentionSpec": {"storage_block_size": None, "topk_buffer_width": None},
    "VllmConfig": {"watchdog_config": ANY},  # when to dump stacks
    "_ModelInfo": {"supports_kv_cache_grouping": False, "supports_lora": ANY},
    "*Spec": {"is_draft": False},
}
# Fields of 0.32 that another version lacks, and what it computes as.
OTHERS_LACK: Mapping[str, Mapping[str, object]] = {
    "_ModelInfo": {"supports_hc_sp": False, "supports_mamba_prefix_caching": False},
}


def same_form(form: Any) -> Any:
    """A canonical form as 0.32 would have it. Returns a new one."""
    if isinstance(form, list):
        return [same_form(each) for each in form]
    if not isinstance(form, dict):
        return form
    inner = {name: same_form(each) for name, each in form.items()}
    kind = form.get("is")
    if not isinstance(kind, str) or not kind.startswith("vllm."):
        return inner
    name = kind.rpartition(".")[2]
    kept = {field: each for field, each in inner.items() if not is_new(name, field, each)}
    return {**OTHERS_LACK.get(name, {}), **kept}


def is_new(class_name: str, field: str, value: object) -> bool:
    """Whether 0.32 does not have the field, and at that value does the same without it."""
    for pattern, fields in OTHERS_HAVE.items():
        if field in fields and fnmatchcase(class_name, pattern):
            neutral = fields[field]
            return neutral is ANY or (type(neutral) is type(value) and neutral == value)
    return False
