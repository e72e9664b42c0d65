"""The user's name for weights that were updated in a running engine."""

from __future__ import annotations

import os
import stat

from lmcache_connector.errors import ConfigError

_MAX_BYTES = 4096


def read_weights_label(setting: str | None) -> str:
    """The label now: ``setting`` itself, or what the file of ``file:PATH`` holds; "" without one.

    White space around it does not count. Raises :class:`ConfigError` for what is no regular file,
    cannot be read, is empty or holds more than 4,096 bytes.
    """
    kind, separator, name = (setting or "").partition(":")
    if kind != "file" or not separator:
        return (setting or "").strip()
    try:
        content = _read(name)
        text = content.decode().strip()
    except (OSError, ValueError) as error:  # ValueError: no text, or a path that no file can have
        raise ConfigError(
            f"the label of the weights cannot be read from {name!r}: {error}"
        ) from error
    if len(content) > _MAX_BYTES:
        raise ConfigError(f"{name} holds more than {_MAX_BYTES} bytes, too many for a label")
    if not text:
        raise ConfigError(f"{name} holds no label")
    return text


def _read(name: str) -> bytes:
    """Without waiting: this runs in the engine's step, and a FIFO has no content until somebody
    writes to it."""
    with open(name, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError("it is no regular file")
        return file.read(_MAX_BYTES + 1)
