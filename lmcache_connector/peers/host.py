"""Instances of one user on one host find each other by their sockets in a folder of that user.

Each rank listens on a socket of its own, named ``NAMESPACE-ENGINE-RANK-RANKS.sock``: digests of
both names, and which of how many ranks it is. A socket gets its name once it listens, so one that
refuses connections is dead, and whoever meets it removes it. Nobody but the user may enter the
folder.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import socket
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from blake3 import blake3

logger = logging.getLogger(__name__)

_NAME = re.compile(r"([0-9a-f]{16})-([0-9a-f]{16})-([0-9]{1,6})-([0-9]{1,6})\.sock")
_MAX_ENTRIES = 4096
_MAX_ENGINES = 64
"""Asked at once. Whoever runs more on one host shares through Redis."""
# A file system's clock ticks every few milliseconds: two changes may have one time.
_TICK_NS = 100_000_000


class HostFolderError(OSError):
    """The folder cannot be used. The message says why."""


@dataclass(frozen=True, slots=True)
class SocketName:
    """``namespace`` and ``engine`` are digests: see `digest`."""

    namespace: str
    engine: str
    rank: int
    num_ranks: int

    @classmethod
    def parse(cls, text: str) -> SocketName | None:
        found = _NAME.fullmatch(text)
        return cls(found[1], found[2], int(found[3]), int(found[4])) if found else None

    def __str__(self) -> str:
        return f"{self.namespace}-{self.engine}-{self.rank}-{self.num_ranks}.sock"


def digest(name: str) -> str:
    """How a namespace, or an engine, is called in names of sockets."""
    return blake3(name.encode("utf-8", "surrogateescape")).hexdigest(8)


def default_folder(user: int) -> Path:
    """``/run/user/ID/lmcache-connector``, or ``/tmp/lmcache-connector-ID`` without the former."""
    run = Path(f"/run/user/{user}")
    try:
        if run.stat().st_uid == user and os.access(run, os.W_OK | os.X_OK):
            return run / "lmcache-connector"
    except OSError:
        pass
    return Path(f"/tmp/lmcache-connector-{user}")


class HostFolder:
    """Made if it is not there. Raises :class:`HostFolderError` for one that is another's, or that
    others may enter. Thread-safe."""

    def __init__(self, path: Path | None = None) -> None:
        user = os.geteuid()
        self.path = path or default_folder(user)
        try:
            with contextlib.suppress(FileExistsError):
                self.path.mkdir(mode=0o700)
            self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError as error:
            reason = error.strerror or error
            raise HostFolderError(f"the folder {self.path} cannot be used: {reason}") from error
        found = os.fstat(self._fd)
        if found.st_uid != user or stat.S_IMODE(found.st_mode) & 0o077:
            os.close(self._fd)
            raise HostFolderError(
                f"the folder {self.path} must belong to the user who runs this, with mode 0700"
            )
        self._seen = -1

    def address(self, name: SocketName) -> str:
        """A path to connect to. Paths of sockets are short, those of folders may be long."""
        return f"/proc/self/fd/{self._fd}/{name}"

    def listen(self, name: SocketName) -> socket.socket:
        """A listening socket under that name; those of dead engines go. Raises
        :class:`HostFolderError`, also if there is another one that lives."""
        sock = socket.socket(socket.AF_UNIX)
        new = f".{secrets.token_hex(8)}"
        try:
            sock.bind(f"/proc/self/fd/{self._fd}/{new}")
            sock.listen(128)
            try:
                if self.remove_if_dead(name):
                    os.link(new, str(name), src_dir_fd=self._fd, dst_dir_fd=self._fd)
                    for other in set(self.sockets()) - {name}:
                        self.remove_if_dead(other)
                    return sock
            finally:
                os.unlink(new, dir_fd=self._fd)
        except OSError as error:
            sock.close()
            reason = error.strerror or error
            raise HostFolderError(f"cannot listen in the folder {self.path}: {reason}") from error
        sock.close()
        raise HostFolderError(f"another engine in {self.path} has this one's engine_id")

    def engines(self, namespace: str, rank: int, num_ranks: int) -> list[SocketName]:
        """The sockets there of that rank, of engines with as many ranks. Raises ``OSError``."""
        changed = os.fstat(self._fd).st_mtime_ns
        wanted = namespace, rank, num_ranks
        found = [n for n in self.sockets() if (n.namespace, n.rank, n.num_ranks) == wanted]
        self._seen = changed if time.time_ns() - changed > _TICK_NS else -1
        return sorted(found, key=str)[:_MAX_ENGINES]

    def sockets(self) -> Iterator[SocketName]:
        """All there are, whoever they are of. Raises ``OSError``."""
        with os.scandir(self._fd) as entries:
            for entry in islice(entries, _MAX_ENTRIES):
                name = SocketName.parse(entry.name)
                with contextlib.suppress(FileNotFoundError):  # it has gone meanwhile
                    is_socket = stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode)
                    if name is not None and is_socket:
                        yield name

    @property
    def is_as_seen(self) -> bool:
        """Whether nothing has come or gone since `engines` was called. Costs one system call."""
        return os.fstat(self._fd).st_mtime_ns == self._seen

    def remove_if_dead(self, name: SocketName) -> bool:
        """Whether nobody listens there, or nothing is there, now."""
        with socket.socket(socket.AF_UNIX) as sock:
            sock.setblocking(False)
            code = sock.connect_ex(self.address(name))
        if code == errno.ECONNREFUSED:
            self.remove(name)
        return code in (errno.ECONNREFUSED, errno.ENOENT)

    def remove(self, name: SocketName) -> None:
        with contextlib.suppress(OSError):
            os.unlink(str(name), dir_fd=self._fd)


def open_folder(path: str | None) -> HostFolder | None:
    """That one, or the default one. Raises :class:`HostFolderError` for one that was asked for;
    without the default one, nothing is shared on this host, and the log says so."""
    try:
        return HostFolder(Path(path) if path is not None else None)
    except HostFolderError as error:
        if path is not None:
            raise
        logger.warning("Nothing is shared with other engines of this host: %s", error)
        return None
