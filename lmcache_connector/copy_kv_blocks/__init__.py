"""Copies between the paged KV cache and chunks, on CPU and CUDA."""

from lmcache_connector.copy_kv_blocks.copier import copy_kv_blocks

__all__ = ["copy_kv_blocks"]
