"""KV tiers for Hugging Face transformers: see :mod:`lmcache_connector.transformers.tiers`."""

from lmcache_connector.transformers.cache import TieredCache
from lmcache_connector.transformers.tiers import KVTiers

__all__ = ["KVTiers", "TieredCache"]
