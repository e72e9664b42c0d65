"""Adapters of the Redis tier to vLLM's own KV caches; our connectors do not use them."""
