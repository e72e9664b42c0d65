"""What the tiers took in and let go, as vLLM publishes it."""
