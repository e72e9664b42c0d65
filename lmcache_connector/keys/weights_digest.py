"""Identity of weights by what they are, not by where they lie.

The same weights under another path, served name or host get the same digest; a single changed byte
makes another.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from blake3 import blake3

from lmcache_connector.keys.file_digests import file_digests
from lmcache_connector.keys.kept_digests import KeptDigests
from lmcache_connector.keys.prefix_hash import canonical_bytes

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def directory_digest(
    path: Path, kept: KeptDigests | None = None, suffixes: Sequence[str] = WEIGHT_SUFFIXES
) -> str | None:
    """Hexadecimal digest of the weight files in a directory, or of one file.

    Returns ``None`` if there are no weights. File names count only through their order, so a
    renamed copy of the same shards is the same. ``kept``: digests of earlier starts; ``None``: read
    every byte. ``suffixes``: the first of which there is a file counts. Raises ``OSError`` if a
    file cannot be read.
    """
    files = _weight_files(path, suffixes)
    if not files:
        return None
    hasher = blake3(canonical_bytes(["sha256", len(files)]))
    for digest in file_digests(files, kept):
        hasher.update(digest)
    return hasher.hexdigest()


def _weight_files(path: Path, suffixes: Sequence[str]) -> list[Path]:
    """All files of the first suffix that is there, as a loader would pick them."""
    if path.is_file():
        return [path]
    for suffix in suffixes:
        files = sorted(file for file in path.glob(f"*{suffix}") if file.is_file())
        if files:
            return files
    return []
