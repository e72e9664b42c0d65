"""Tiers and what they store. Installed as ``lmcache_connector.storage``; knows nothing of vLLM."""
