"""The documentation builds, and what it names exists: links, paths, commands, settings, formats."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.harness.results import all_kept
from lmcache_connector.config.tiered import parse_config
from lmcache_connector.cost_model.decision import Reason
from lmcache_connector.storage import chunk_codec
from lmcache_connector.vllm_compat.api.versions import (
    LMCACHE_PACKAGE,
    VLLM_PACKAGE,
    Package,
    text_of,
)
from tests.support import ROOT, settings_page
from tests.support.engines.tiny_families import FAMILIES
from tests.test_imports import LAYERS

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
    """Links inside the repository whose file or heading is not there."""
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
def test_every_link_leads_somewhere(page: Path) -> None:
    assert broken_links(page, page.read_text()) == []


def missing_paths(text: str, folder: Path = ROOT) -> list[str]:
    """Paths and modules of the repository that the text of a page in ``folder`` names in vain."""
    tops = (ROOT, PACKAGE, folder)  # the architecture names rooms as they lie in the package
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
def test_every_path_that_is_named_exists(page: Path) -> None:
    assert missing_paths(page.read_text(), page.parent) == []


# -- commands and settings -------------------------------------------------------------------------


def test_every_command_and_setting_that_is_named_exists() -> None:
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


def test_every_make_target_is_listed_and_every_listed_one_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    rows = table_after((ROOT / "CONTRIBUTING.md").read_text(), "## Commands")
    assert {row[0].strip("`").split()[1] for row in rows} == targets - {"help"}
    text = "\n".join(page.read_text() for page in PAGES)
    assert set(re.findall(r"(?:^ {4}|`)make (\w+)", text, re.MULTILINE)) <= targets


def test_every_benchmark_that_is_named_exists() -> None:
    command = [sys.executable, "-m", "benchmarks", "--help"]
    usage = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    known = set(re.findall(r"^([\w-]+): ", usage, re.MULTILINE))
    text = "\n".join(page.read_text() for page in LINKED_PAGES)
    named = set(re.findall(r"python -m benchmarks ([a-z][\w-]+)", text))
    assert "overhead" in named
    assert named <= known


def test_the_reasons_of_decisions_are_those_of_the_cost_model() -> None:
    rows = table_after((DOCS / "metrics.md").read_text(), "### Decisions")
    named = {row[0].strip("`") for row in rows}
    assert named <= {reason.value for reason in Reason}


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
    """Paths of a tree drawn with two spaces per level, one path and its meaning per line."""
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


def test_the_arrows_of_the_architecture_are_those_that_hold() -> None:
    page = (DOCS / "architecture.md").read_text()
    (drawn,) = re.findall(r"^```text\n(cli\n.*?)^```", page, re.MULTILINE | re.DOTALL)
    lines = [re.findall(r"[\w/]+", line) for line in drawn.splitlines()]
    named = {name for names in lines for name in names}
    layers = [
        {
            number
            for number, layer in enumerate(LAYERS)
            for package in layer
            if drawn_as(package, named) in names
        }
        for names in lines
    ]
    for above, below in itertools.pairwise(layers):
        assert max(above) <= min(below)
    everything = {package for layer in LAYERS for package in layer} - {"errors"}
    assert {each for each in everything if drawn_as(each, named) is None} == set()


def drawn_as(package: str, names: set[str]) -> str | None:
    """The smallest part of the picture that a package is in."""
    fitting = (name for name in names if f"{package}/".startswith(f"{name}/"))
    return max(fitting, key=len, default=None)


# -- promises --------------------------------------------------------------------------------------


def test_every_promise_names_a_test_that_exists() -> None:
    page = (ROOT / "tests" / "PROMISES.md").read_text()
    named = set(re.findall(r"`(test_\w+)`", page))
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    assert all("`" in row or row.startswith("| promise") for row in rows)
    sources = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    defined = {name for text in sources for name in re.findall(r"def (test_\w+)\(", text)}
    assert len(named) > 10
    assert named <= defined
    assert all((ROOT / path).is_file() for path in re.findall(r"`(tests/[\w/]+\.py)`", page))


# -- the README and what pages quote ---------------------------------------------------------------


README = (ROOT / "README.md").read_text()
SUPPORT_PAGE = (ROOT / "docs" / "support.md").read_text()
MAX_WORDS = 700
CUDA_CLAIM = re.compile(r"CUDA[^.\n]*\d[\d.]* ?(times|GB/s|%|ms|s\b)")
SUPPORTED = "# What is supported"


def table_after(page: str, heading: str) -> list[list[str]]:
    """Rows of the first table below ``heading`` of a page, cells stripped, without its head."""
    below = f"\n{page}".split(f"\n{heading}\n", maxsplit=1)[1].splitlines()
    rows = []
    for line in below:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
        elif rows:
            break
    return rows[2:]


def test_the_page_of_settings_is_that_of_the_code() -> None:
    """``python -m tests.support.settings_page`` writes it."""
    assert settings_page.PAGE.read_text() == settings_page.page()


def test_the_flag_as_printed_is_accepted() -> None:
    (flag,) = re.findall(r"--kv-transfer-config '(.*?)'", README, re.DOTALL)
    transfer = json.loads(flag)
    assert transfer["kv_connector"] == "LMCacheTieredConnector"
    config = parse_config(transfer["kv_connector_extra_config"])
    assert config.redis_url is not None
    assert config.redis_url.get_secret_value() == "redis://host:6379"


def support_row(package: Package) -> str:
    """What the table of versions says of a package, as the README puts it."""
    states: dict[str, list[str]] = {}
    for release, state in package.releases.items():
        states.setdefault(state, []).append(text_of(release))
    known = [f"{', '.join(names)}: {state}" for state, names in states.items()]
    limit = f", from {text_of(package.below)} on refused" if package.below else ""
    newer = f"newer: [isolated](operations.md#versions){limit}"
    return "; ".join([*known, "older: refused", newer])


@pytest.mark.parametrize("package", [VLLM_PACKAGE, LMCACHE_PACKAGE], ids=lambda each: each.name)
def test_the_versions_are_those_of_the_code(package: Package) -> None:
    said = {row[0]: row[1] for row in table_after(SUPPORT_PAGE, SUPPORTED)}
    assert said[package.name] == support_row(package)
    short = {row[0]: row[1] for row in table_after(README, f"#{SUPPORTED}")}
    named = set(re.findall(r"\d\.[\d.]+\d", short[package.name]))
    assert named == {text_of(release) for release in package.releases}


def test_the_families_of_models_are_those_that_tests_run() -> None:
    rows = table_after(SUPPORT_PAGE, "## Models with several kinds of KV")
    assert rows == [[family.title, family.kv] for family in FAMILIES.values()]


def test_the_ten_settings_of_the_front_page_are_those_of_the_code() -> None:
    rows = table_after(README, "## Settings")
    assert len(rows) == 10
    for key, default, _ in rows:
        field = settings_page.FIELDS[key.strip("`")]
        assert default == settings_page.default_words(field.default), key


def test_pages_quote_what_was_measured() -> None:
    """Figures outside of RESULTS.md, which is generated, are typed: here they are compared."""
    kept = {one.label: one.result for one in all_kept()}
    ms = {
        case["way"]: 1000 * case["ttft_s"]["median"]
        for case in kept["ttft-large"]["cases"]
        if case["tokens"] == 4000
    }
    comparison = (ROOT / "docs" / "comparison.md").read_text()
    for way, name in (
        ("vllm_cold", "computed by vLLM"),
        ("ours_redis_hit", "hit in Redis"),
        ("ours_cpu_hit", "hit in the CPU tier"),
    ):
        assert f"| {name} | {ms[way]:,.0f} ms |" in README
    for way, name in (
        ("ours_cpu_hit", "this connector, CPU tier"),
        ("ours_redis_hit", "this connector, Redis"),
        ("lmcache_mp_hit", "LMCacheMPConnector"),
    ):
        cold = ms["lmcache_mp_cold" if way.startswith("lmcache") else "ours_cold"]
        assert f"| {name} | {cold / 1000:.2f} s | {ms[way] / 1000:.3f} s |" in comparison
    for name in ("overhead", "overhead-large"):
        ratio = f"{kept[name]['decode_throughput_vs_other_process']:.2f}"
        assert ratio in README.partition("## Try it")[0]
        assert ratio in comparison


def test_it_is_one_page() -> None:
    """Words hold a letter or a digit: bars of tables and of the picture are none."""
    words = [token for token in README.split() if re.search(r"[^\W_]", token)]
    assert len(words) <= MAX_WORDS


def test_cuda_is_called_unmeasured_until_it_is_measured() -> None:
    """The day its results are kept, this page has more to say."""
    is_measured = any(kept.result["machine"].get("gpus") for kept in all_kept())
    for page, heading in ((README, f"#{SUPPORTED}"), (SUPPORT_PAGE, SUPPORTED)):
        (row,) = [row for row in table_after(page, heading) if row[0] == "CUDA"]
        assert ("not yet measured" in row[1]) != is_measured
    assert ("not yet measured" in README.partition("## Try it")[0]) != is_measured
    pages = [ROOT / "README.md", ROOT / "benchmarks" / "RESULTS.md", *(ROOT / "docs").glob("*.md")]
    claims = {page.name: CUDA_CLAIM.findall(page.read_text()) for page in pages}
    assert is_measured or not any(claims.values()), claims
