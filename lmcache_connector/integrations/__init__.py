"""Other caches of vLLM's, with the Redis tier behind them. No part of our own connectors."""
