"""The worker side of the tiered connector. Import it only once vLLM's worker is set up."""

import os

# LMCache reads these at import. Usage reports are off unless the user turns them on.
os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "WARNING")
