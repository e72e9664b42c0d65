"""A vLLM without a build for CPUs: its Python files with installed kernels.

It runs vLLM's scheduler, connectors and cache layouts, but no forward pass: kernels of another
version may take other arguments.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path


def lay(version: str, folder: Path) -> None:
    """Make ``folder`` an entry of ``PYTHONPATH`` with ``vllm`` of that version.

    vLLM recognises the build for CPUs by its version's name.
    """
    with tempfile.TemporaryDirectory() as downloads:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary", ":all:", "--dest", downloads, f"vllm=={version}"]
        subprocess.run(command, check=True)
        with zipfile.ZipFile(next(Path(downloads).glob("*.whl"))) as wheel:
            wheel.extractall(folder, [n for n in wheel.namelist() if not n.endswith(".so")])
    (metadata,) = folder.glob("vllm-*.dist-info/METADATA")
    text = re.sub(
        r"^Version: (\S+)$", r"Version: \1+cpu", metadata.read_text(), count=1, flags=re.M
    )
    metadata.write_text(text)
    for library in _installed_vllm().glob("*.so"):
        shutil.copy2(library, folder / "vllm")


def _installed_vllm() -> Path:
    return next(path for each in sys.path if (path := Path(each, "vllm")).is_dir())


if __name__ == "__main__":
    lay(sys.argv[1], Path(sys.argv[2]))
