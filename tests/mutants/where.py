"""Fails unless the named modules are imported from the current folder."""

import sys
from importlib.util import find_spec
from pathlib import Path

if __name__ == "__main__":
    for name in sys.argv[1:]:
        spec = find_spec(name)
        if spec is None or spec.origin is None or not Path(spec.origin).is_relative_to(Path.cwd()):
            sys.exit(f"{name} is not from {Path.cwd()}: {spec}")
