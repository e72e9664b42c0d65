"""The documentation builds, and its links, paths, commands, settings and formats exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_connector.storage import chunk_codec
from tests.support import ROOT
from tests.test_readme import table_after

DOCS = ROOT / "docs"
PACKAGE = ROOT / "lmcache_connector"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(DOCS.glob("*.md")),
    *sorted((ROOT / "examples").rglob("README.md")),
    ROOT / "benchmarks" / "notes.md",
]
LINKED_PAGES = [
    *PAGES,
    ROOT / "CHANGELOG.md",
    ROOT / "benchmarks" / "RESULTS.md",
    *sorted((ROOT / "benchmarks" / "results").glob("*.md")),
]
TOPS = ("lmcache_connector", "storage", "tests", "docs", "examples", "benchmarks", ".ci")
FILE_NAMES = {
    path.name
    for folder in (ROOT, *(ROOT / top for top in TOPS))
    for path in (folder.iterdir() if folder == ROOT else folder.rglob("*"))
}
FILE_SUFFIXES = (".py", ".md", ".toml", ".txt", ".yml", ".yaml")


def by_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(site)],
        capture_output=True,
        text=True,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        check=False,
    )


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """Each page has one title, and loads nothing from other sites."""
    done = build(ROOT / "mkdocs.yml", tmp_path / "site")
    assert done.returncode == 0, done.stderr
    for page in DOCS.glob("*.md"):
        built = tmp_path / "site" / ("" if page.stem == "index" else page.stem) / "index.html"
        html = built.read_text()
        assert html.count("<h1") == 1, page.name
        assert not re.search(r'(src|href)="https?://[^"]+\.(js|css|png|svg|woff2?)"', html)
    for name in ("CHANGELOG", "benchmarks/RESULTS", "benchmarks/results/ttft"):
        assert (tmp_path / "site" / name / "index.html").is_file()


# -- links and paths -------------------------------------------------------------------------------


def broken_links(page: Path, text: str) -> list[str]:
    """Links inside the repository whose file or heading does not exist."""
    targets = re.findall(r"\]\(([^)\s]+)\)", without_code(text))
    return [target for target in targets if "://" not in target and not resolves(page, target)]


def resolves(page: Path, target: str) -> bool:
    path, _, anchor = target.partition("#")
    linked = (page.parent / path).resolve() if path else page
    if not linked.is_relative_to(ROOT) or not linked.exists():
        return False
    return not anchor or anchor in anchors(linked.read_text())


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ +(.*)$", without_code(text), re.MULTILINE)
    words = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings)
    return {re.sub(r"[-\s]+", "-", word) for word in words}  # as MkDocs and GitHub do


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", LINKED_PAGES, ids=by_name)
def test_every_link_has_a_target(page: Path) -> None:
    assert broken_links(page, page.read_text()) == []


def missing_paths(text: str, folder: Path = ROOT) -> list[str]:
    """Paths and modules in the text of a page in ``folder`` that the repository does not have."""
    tops = (ROOT, PACKAGE, folder)  # the architecture names packages by their place in the product
    paths = [name for name in named_paths(text) if not any((top / name).exists() for top in tops)]
    files = [name for name in named_files(text) if name not in FILE_NAMES]
    modules = [name for name in named_modules(text) if not is_module(name)]
    return paths + files + modules


def named_paths(text: str) -> Iterator[str]:
    tops = "|".join(map(re.escape, TOPS))
    for name in re.findall(rf"(?<![\w/.:~-])(?:{tops})/[\w./-]*", text):
        yield name.rstrip(".")
    yield from re.findall(r"`([\w-]+/[\w./-]*)`", text)


def named_files(text: str) -> list[str]:
    return [name for name in re.findall(r"`([\w.-]+)`", text) if name.endswith(FILE_SUFFIXES)]


def named_modules(text: str) -> Iterator[str]:
    yield from re.findall(r"`(lmcache_connector(?:\.\w+)+)`", text)
    yield from re.findall(r"python -m ((?:examples|benchmarks)(?:\.\w+)*)", text)


def is_module(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_every_named_path_exists(page: Path) -> None:
    assert missing_paths(page.read_text(), page.parent) == []


# -- commands and settings -------------------------------------------------------------------------


def test_every_named_command_and_setting_exists() -> None:
    from lmcache_connector.cli.app import app
    from lmcache_connector.config.limits import GONE
    from lmcache_connector.config.tiered import ConnectorConfig

    commands = {
        command.callback.__name__ for command in app.registered_commands if command.callback
    }
    table = re.findall(r"^\| `(\w+)[ `]", (DOCS / "command-line.md").read_text(), re.MULTILINE)
    assert set(table) == commands
    text = " ".join(page.read_text() for page in PAGES)
    assert set(re.findall(r"lmcache-connector (\w+) ", text)) <= commands | {"COMMAND"}
    settings = set(re.findall(r"`(redis_\w+|load_\w+_seconds|lookup_\w+_seconds)`", text))
    known = ConnectorConfig.model_fields.keys() | GONE.keys()
    assert settings <= known | {"redis_chunks_total", "redis_server"}


def test_the_listed_make_targets_are_the_existing_ones() -> None:
    targets = set(re.findall(r"^([a-z]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    rows = table_after((ROOT / "CONTRIBUTING.md").read_text(), "## Commands")
    assert {row[0].strip("`").split()[1] for row in rows} == targets - {"help"}
    text = "\n".join(page.read_text() for page in PAGES)
    assert set(re.findall(r"(?:^ {4}|`)make (\w+)", text, re.MULTILINE)) <= targets


# -- formats --------------------------------------------------------------------------------------


def test_the_value_format_is_that_of_the_codec() -> None:
    rows = table_after((DOCS / "formats.md").read_text(), "## Value, format v1")
    header = [(int(offset), int(size)) for offset, size, _ in rows[:-1]]
    ends = [offset + size for offset, size in header]
    assert [offset for offset, _ in header] == [0, *ends[:-1]]  # no gap, no overlap
    assert ends[-1] == chunk_codec.HEADER_BYTES == int(rows[-1][0])
    assert ends[-2] == chunk_codec.HEADER_BYTES - 32


def test_the_dtype_codes_are_those_of_the_codec() -> None:
    (listed,) = re.findall(r"Dtype codes: ([^.]*)\.", (DOCS / "formats.md").read_text())
    codes = {name: int(code) for code, name in re.findall(r"(\d+) (\w+)", listed)}
    assert codes == chunk_codec.DTYPE_CODES


# -- the tree --------------------------------------------------------------------------------------


def paths_of_tree(text: str) -> Iterator[str]:
    """Paths of a drawn tree: two spaces per level, a path and its meaning per line."""
    above: list[str] = []
    for line in text.splitlines():
        name = line.split()[0]
        del above[(len(line) - len(line.lstrip())) // 2 :]
        yield "".join([*above, name])
        above.append(name)


def test_the_tree_of_the_architecture_is_the_real_one() -> None:
    page = (DOCS / "architecture.md").read_text()
    tree = re.findall(r"^```text\n(lmcache_connector/\n.*?)^```", page, re.MULTILINE | re.DOTALL)
    paths = list(paths_of_tree(tree[0]))
    assert [path for path in paths if not (ROOT / path).exists()] == []
    folders = {
        f"{by_name(file.parent)}/"
        for top in (PACKAGE, ROOT / "storage")
        for file in top.rglob("__init__.py")
    }
    packages = {folder for folder in folders if not folder.startswith("lmcache_connector/storage/")}
    assert {path for path in paths if path.endswith("/")} == packages
