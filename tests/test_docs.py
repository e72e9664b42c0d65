"""The documentation builds, with every link and anchor in place."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import yaml

from tests.support import ROOT

DOCS = ROOT / "docs"


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(site)],
        capture_output=True,
        text=True,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        check=False,
    )


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    done = build(ROOT / "mkdocs.yml", tmp_path / "site")
    assert done.returncode == 0, done.stderr
    for page in DOCS.glob("*.md"):
        built = tmp_path / "site" / ("" if page.stem == "index" else page.stem) / "index.html"
        assert built.is_file(), page.name


def test_a_broken_link_would_stop_it(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("[there](nowhere.md) and [here](#nothing)\n")
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    del config["nav"]
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(config))
    assert build(tmp_path / "mkdocs.yml", tmp_path / "site").returncode != 0


def test_every_command_and_setting_that_is_named_exists() -> None:
    from lmcache_connector.cli.app import app
    from lmcache_connector.config.tiered import ConnectorConfig

    commands = {
        command.callback.__name__ for command in app.registered_commands if command.callback
    }
    table = re.findall(r"^\| `(\w+)[ `]", (DOCS / "command-line.md").read_text(), re.MULTILINE)
    assert set(table) == commands
    text = " ".join(page.read_text() for page in DOCS.glob("*.md"))
    assert set(re.findall(r"lmcache-connector (\w+) ", text)) <= commands | {"COMMAND"}
    settings = set(re.findall(r"`(redis_\w+|load_\w+_seconds|lookup_\w+_seconds)`", text))
    assert settings <= ConnectorConfig.model_fields.keys() | {"redis_chunks_total", "redis_chunks"}
