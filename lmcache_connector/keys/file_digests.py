"""SHA-256 of files, cached across starts.

A Hugging Face cache names files by SHA-256: ``snapshots/.../model.safetensors`` links to
``blobs/<64 hexadecimal digits>``. This name is used as the digest unless the blob changed after the
link was made (by mtime or ctime: mtime can be set back). Other files are read once and their
digests cached (:class:`KeptDigests`). A download and a copy of the same files thus have the same
digests.

Threads read files in parallel: ``hashlib`` releases the GIL.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lmcache_connector.keys.kept_digests import KeptDigests, Signature

logger = logging.getLogger(__name__)

_SHA256 = 64  # hexadecimal digits
_BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_MAX_THREADS = 8
_LARGE_BYTES = 4 << 30
# File system timestamps are coarse: two changes within this time may have the same signature.
_SETTLED_NS = 2_000_000_000


def file_digests(files: Sequence[Path], kept: KeptDigests | None = None) -> list[bytes]:
    """SHA-256 of each file, 32 bytes. Raises ``OSError`` for an unreadable file. ``kept``: cached
    digests; ``None``: read all files, even blobs.
    """
    if kept is None:
        return _read(files, {})
    names = {file: content_name(file) or "" for file in files}
    digests = {file: bytes.fromhex(name) for file, name in names.items() if len(name) == _SHA256}
    rest = [file for file in files if file not in digests]
    entries = kept.load() if rest else {}
    signed = {file: str(Signature.of(file.stat())) for file in rest}
    digests |= {f: bytes.fromhex(entries[key]) for f, key in signed.items() if key in entries}
    rest = [file for file in rest if file not in digests]
    if rest:
        found: dict[str, str] = {}
        digests |= dict(zip(rest, _read(rest, found), strict=True))
        kept.add(found)
    return [digests[file] for file in files]


def content_name(file: Path) -> str | None:
    """The digest in a Hugging Face cache's file name: SHA-256, or git's for small files."""
    if not file.is_symlink():
        return None
    blob = file.resolve()
    if blob.parent.name != "blobs" or not _BLOB.fullmatch(blob.name):
        return None
    found, link = blob.stat(), file.lstat()
    if found.st_mtime_ns > link.st_mtime_ns or found.st_ctime_ns > link.st_ctime_ns:
        return None  # changed since: the name may be outdated
    return blob.name


def _read(files: Sequence[Path], found: dict[str, str]) -> list[bytes]:
    """Read all files. Adds cacheable digests to ``found``, by signature."""
    num_bytes = sum(file.stat().st_size for file in files)
    if num_bytes > _LARGE_BYTES:
        folder = files[0].parent
        logger.info("Hashing %.1f GB of weights in %s, once", num_bytes / 1e9, folder)
    threads = min(len(files), os.cpu_count() or 1, _MAX_THREADS)
    with ThreadPoolExecutor(max(1, threads), thread_name_prefix="lmc-digest") as pool:
        results = list(pool.map(_sha256, files))
    found |= {str(signature): digest.hex() for digest, signature in results if signature}
    return [digest for digest, _ in results]


def _sha256(file: Path) -> tuple[bytes, Signature | None]:
    """The digest, and the file's signature; ``None`` if the file may be changing."""
    started = time.time_ns()
    with file.open("rb", buffering=0) as handle:
        before = Signature.of(os.fstat(handle.fileno()))
        digest = hashlib.file_digest(handle, "sha256").digest()
        after = Signature.of(os.fstat(handle.fileno()))
    settled = max(before.ctime_ns, before.mtime_ns) < started - _SETTLED_NS
    return digest, before if before == after and settled else None
