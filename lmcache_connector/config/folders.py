"""Where this user's machine keeps what can be made again."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def user_cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """``$XDG_CACHE_HOME/lmcache-connector``, or the same below ``~/.cache``. It may not exist."""
    base = environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if base.startswith("/") else Path(environ.get("HOME", "/")) / ".cache"
    return root / "lmcache-connector"
