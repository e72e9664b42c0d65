"""KV cache events: chunks that entered or left the tiers, in vLLM's format."""
