"""How the elements of a layer's KV are stored, in the names of :mod:`..audit.compare`."""

from __future__ import annotations

from lmcache_connector.audit.compare import DECODERS, OPAQUE

# vLLM keeps these in bytes and says what they mean beside them. Every other name either is one of
# a plain dtype, or packs elements together with their scales.
_BYTES = {
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "int8": "int8",
}


def element_format(dtype: object, cache_dtype: str) -> str:
    """``dtype``: torch's, or ``None`` for bytes of several. ``cache_dtype`` as vLLM resolved it."""
    name = str(dtype).removeprefix("torch.")
    if name in ("uint8", "int8"):
        return _BYTES.get(cache_dtype, OPAQUE)
    return name if name in DECODERS else OPAQUE
