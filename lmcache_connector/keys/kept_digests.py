"""Digests of files, cached across starts in the user's cache folder.

One JSON object maps the stat signature of a file (:class:`Signature`) to its SHA-256, and a digest
of how weights are loaded to the digest of the weights in memory. Entries never become invalid:
changed content has another signature. The file is not trusted: it must belong to this user,
nobody else may be able to write it, and malformed entries are ignored. It is replaced as a whole,
never written in place.
"""

from __future__ import annotations

import json
import logging
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

MAX_ENTRIES = 4096
_MAX_BYTES = 1 << 20
_DIGEST = re.compile(r"[0-9a-f]{64}")
_KEY = re.compile(r"[0-9]{1,20}(:[0-9]{1,20}){4}|[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Signature:
    """File metadata that changes with the content. Times in nanoseconds."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> Signature:
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)

    def __str__(self) -> str:
        return f"{self.device}:{self.inode}:{self.size}:{self.mtime_ns}:{self.ctime_ns}"


class KeptDigests:
    """Reads and writes ``digests.json`` in ``folder``. Failures to write are only logged."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = folder / "digests.json"

    def load(self) -> dict[str, str]:
        """Digests by signature, oldest first; empty if the file is missing or not trusted."""
        try:
            with open(self._file, "rb", opener=_open) as handle:
                if _is_ours(os.fstat(handle.fileno())):
                    return _parse(handle.read(_MAX_BYTES + 1))
        except OSError:
            return {}
        logger.warning("Ignoring %s: it is not a file that only we can write", self._file)
        return {}

    def add(self, digests: Mapping[str, str]) -> None:
        """Add entries; keeps the newest ``MAX_ENTRIES``."""
        if not digests:
            return
        entries = {key: value for key, value in self.load().items() if key not in digests}
        entries |= digests
        newest = dict(list(entries.items())[-MAX_ENTRIES:])
        draft = self._folder / f"digests.{os.getpid()}.tmp"
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            draft.unlink(missing_ok=True)
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="ascii") as handle:
                json.dump(newest, handle, indent=0)
            draft.replace(self._file)
        except OSError as error:
            logger.warning("The digests of weights cannot be kept in %s: %s", self._folder, error)


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _is_ours(found: os.stat_result) -> bool:
    writable_by_others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not writable_by_others


def _parse(data: bytes) -> dict[str, str]:
    if len(data) > _MAX_BYTES:
        return {}
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {
        key: value
        for key, value in found.items()
        if _KEY.fullmatch(key) and isinstance(value, str) and _DIGEST.fullmatch(value)
    }
