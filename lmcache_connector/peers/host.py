"""Engines of one user on one host find each other by Unix sockets in a folder of that user.

Each rank listens on its own socket, ``NAMESPACE-ENGINE-RANK-RANKS.sock``: digests of namespace and
engine id, the rank, and the number of ranks. A socket is linked to its name after it listens, so a
socket that refuses connections is dead; any rank that finds it removes it. If a living rank's
name or folder disappears (cleaners of ``/tmp``), the rank creates it again within seconds. The
folder has mode 0700.
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
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from blake3 import blake3

logger = logging.getLogger(__name__)

_NAME = re.compile(r"([0-9a-f]{16})-([0-9a-f]{16})-([0-9]{1,6})-([0-9]{1,6})\.sock")
_MAX_ENTRIES = 4096
_MAX_ENGINES = 64
"""Engines of one host that a lookup asks. Further ones share through Redis."""
# File system timestamps are coarse: two changes within a tick may have equal times.
_TICK_NS = 100_000_000


class HostFolderError(OSError):
    """The folder cannot be used. The message says why."""


@dataclass(frozen=True, slots=True)
class SocketName:
    """``namespace`` and ``engine`` are made by `digest`."""

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
    """The form of a namespace or engine id in socket names."""
    return blake3(name.encode("utf-8", "surrogateescape")).hexdigest(8)


def default_folder(user: int) -> Path:
    """``/run/user/ID/lmcache-connector`` if usable, else ``/tmp/lmcache-connector-ID``."""
    run = Path(f"/run/user/{user}")
    try:
        if run.stat().st_uid == user and os.access(run, os.W_OK | os.X_OK):
            return run / "lmcache-connector"
    except OSError:
        pass
    return Path(f"/tmp/lmcache-connector-{user}")


class HostFolder:
    """Creates the folder if missing. Raises :class:`HostFolderError` if it cannot be opened, or
    another user owns it or has access to it. Thread-safe."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or default_folder(os.geteuid())
        self._fd = self._open()
        # Closed with the last reference, not at exit: threads that outlive a shutdown may use it.
        weakref.finalize(self, os.close, self._fd).atexit = False
        self._seen: tuple[int, int] | None = None

    def _open(self) -> int:
        try:
            with contextlib.suppress(FileExistsError):
                self.path.mkdir(mode=0o700)
            opened = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError as error:
            reason = error.strerror or error
            raise HostFolderError(f"the folder {self.path} cannot be used: {reason}") from error
        found = os.fstat(opened)
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            os.close(opened)
            raise HostFolderError(
                f"the folder {self.path} must belong to the user of this process, with mode 0700"
            )
        return opened

    def _open_again(self) -> None:
        """Reopen a folder that was removed or replaced. Raises :class:`HostFolderError`."""
        with contextlib.suppress(FileNotFoundError):
            if self.path.stat().st_ino == os.fstat(self._fd).st_ino:
                return
        opened = self._open()
        os.dup2(opened, self._fd, inheritable=False)  # keeps earlier `address` paths valid
        os.close(opened)

    def address(self, name: SocketName) -> str:
        """A path to connect to. Socket paths are limited to 108 bytes, folder paths are not."""
        return f"/proc/self/fd/{self._fd}/{name}"

    def listen(self, name: SocketName) -> socket.socket:
        """Listen under that name, and remove sockets of dead engines. Raises
        :class:`HostFolderError`, also if a living engine has the name."""
        self._open_again()
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
        raise HostFolderError(f"another engine in {self.path} uses the same engine_id")

    def engines(self, namespace: str, rank: int, num_ranks: int) -> list[SocketName]:
        """Sockets of ``rank`` of the engines with ``num_ranks`` ranks. Raises ``OSError``."""
        self._seen = self._state()
        self._open_again()
        seen = self._state()
        wanted = namespace, rank, num_ranks
        found = [n for n in self.sockets() if (n.namespace, n.rank, n.num_ranks) == wanted]
        is_settled = time.time_ns() - seen[1] > _TICK_NS
        self._seen = seen if is_settled else None
        return sorted(found, key=str)[:_MAX_ENGINES]

    def sockets(self) -> Iterator[SocketName]:
        """All sockets in the folder. Raises ``OSError``."""
        with os.scandir(self._fd) as entries:
            for entry in islice(entries, _MAX_ENTRIES):
                name = SocketName.parse(entry.name)
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    is_socket = stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode)
                    if name is not None and is_socket:
                        yield name

    @property
    def is_as_seen(self) -> bool:
        """Whether the folder is certainly unchanged since the last `engines`. One system call."""
        return self._state() == self._seen

    def _state(self) -> tuple[int, int]:
        """Inode and modification time of the folder."""
        try:
            found = self.path.stat()
        except OSError:
            return 0, 0
        return found.st_ino, found.st_mtime_ns

    def inode(self, name: SocketName) -> int | None:
        """Inode of the entry with that name, if any."""
        try:
            self._open_again()
            return os.stat(str(name), dir_fd=self._fd, follow_symlinks=False).st_ino
        except OSError:
            return None

    def remove_if_dead(self, name: SocketName) -> bool:
        """True if nobody listens there any more; the dead socket is removed."""
        with socket.socket(socket.AF_UNIX) as sock:
            sock.setblocking(False)
            code = sock.connect_ex(self.address(name))
        if code == errno.ECONNREFUSED:
            self.remove(name)
        return code in (errno.ECONNREFUSED, errno.ENOENT)

    def remove(self, name: SocketName) -> None:
        with contextlib.suppress(OSError):
            os.unlink(str(name), dir_fd=self._fd)


class HostSocket:
    """A rank's listening socket in the folder. Raises :class:`HostFolderError` as `listen` does."""

    def __init__(self, folder: HostFolder, name: SocketName) -> None:
        self._folder = folder
        self._name = name
        self.sock = folder.listen(name)
        self._inode = folder.inode(name)
        self._is_told = False

    def renew(self) -> socket.socket | None:
        """Listen again if the socket's name is gone; returns the previous socket, else ``None``."""
        if (found := self._folder.inode(self._name)) is not None and found == self._inode:
            return None
        try:
            old, self.sock = self.sock, self._folder.listen(self._name)
        except HostFolderError as error:
            if not self._is_told:
                logger.warning("Other engines of this host cannot load from this one: %s", error)
            self._is_told = True
            return None
        self._inode, self._is_told = self._folder.inode(self._name), False
        return old

    def close(self) -> None:
        self.sock.close()
        if self._folder.inode(self._name) == self._inode:  # else another engine's
            self._folder.remove(self._name)


def open_folder(path: str | None) -> HostFolder | None:
    """The folder at ``path``, or the default one. Raises :class:`HostFolderError` for ``path``; an
    unusable default is logged, and nothing is shared on this host."""
    try:
        return HostFolder(Path(path) if path is not None else None)
    except HostFolderError as error:
        if path is not None:
            raise
        logger.warning("Nothing is shared with other engines of this host: %s", error)
        return None
