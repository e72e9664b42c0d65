"""How the elements of each layer's KV are stored, in the names of :mod:`..audit.compare`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.model_executor.models.utils import extract_layer_index

from lmcache_connector.audit.compare import DECODERS, OPAQUE
from lmcache_connector.vllm_compat.support import layer_specs

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec

# vLLM keeps these in bytes and says what they mean beside them. Every other name either is one of
# a plain dtype, or packs elements together with their scales.
_BYTES = {
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "int8": "int8",
}


def element_formats(group: KVCacheGroupSpec, cache_dtype: str) -> tuple[str, ...]:
    """One per layer in model order. ``cache_dtype`` as vLLM has resolved it."""
    specs = layer_specs(group)
    names = sorted(specs, key=extract_layer_index)
    return tuple(_format(str(specs[name].dtype), cache_dtype) for name in names)


def _format(dtype: str, cache_dtype: str) -> str:
    name = dtype.removeprefix("torch.")
    if name in ("uint8", "int8"):
        return _BYTES.get(cache_dtype, OPAQUE)
    return name if name in DECODERS else OPAQUE
