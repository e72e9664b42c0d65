"""The worker side of the tiered connector. Importing it must wait until vLLM's worker is set up."""

import os

# LMCache reads these when it is imported. Reports about users' machines go out only if they say so.
os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "WARNING")
