"""The user's name for updated weights: a text, or a file that is read at each reset."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lmcache_connector.config.strict import read_weights_label
from lmcache_connector.config.tiered import parse_config
from lmcache_connector.errors import ConfigError


def test_text_is_the_label() -> None:
    assert read_weights_label(None) == ""
    assert read_weights_label("step 7") == "step 7"
    assert read_weights_label("files: many") == "files: many"


def test_a_file_is_read_each_time(tmp_path: Path) -> None:
    path = tmp_path / "label"
    for label in ("step 1", "step 2"):
        path.write_text(f"{label}\n")
        assert read_weights_label(f"file:{path}") == label


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
        (b" \n", "holds no label"),
        (b"x" * 4097, "more than 4096 bytes"),
    ],
)
def test_a_file_without_a_label_is_an_error(
    tmp_path: Path, content: bytes | None, why: str
) -> None:
    path = tmp_path / "label"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=why):
        read_weights_label(f"file:{path}")
    with pytest.raises(ConfigError, match=f"'weights_label': .*{why}"):
        parse_config({"weights_label": f"file:{path}"})


def test_a_fifo_is_an_error_at_once(tmp_path: Path) -> None:
    """Opening a FIFO waits for a writer, and the engine's step would wait, too."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    for name, why in (("fifo", "not a regular file"), ("folder", "Is a directory")):
        with pytest.raises(ConfigError, match=f"cannot be read .*{why}"):
            read_weights_label(f"file:{tmp_path / name}")
