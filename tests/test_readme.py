"""The README agrees with the code, and stays one page."""

from __future__ import annotations

import json
import re

import pytest

from benchmarks.harness.results import all_kept
from lmcache_connector.config.tiered import parse_config
from lmcache_connector.vllm_compat.api.versions import (
    LMCACHE_PACKAGE,
    VLLM_PACKAGE,
    Package,
    text_of,
)
from tests.support import ROOT, settings_page
from tests.support.engines.tiny_families import FAMILIES

README = (ROOT / "README.md").read_text()
SUPPORT_PAGE = (ROOT / "docs" / "support.md").read_text()
MAX_WORDS = 700
CUDA_CLAIM = re.compile(r"CUDA[^.\n]*\d[\d.]* ?(times|GB/s|%|ms|s\b)")
SUPPORTED = "# What is supported"


def table_after(page: str, heading: str) -> list[list[str]]:
    """Cells of the first table below ``heading``, without its head."""
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


def test_the_printed_flag_is_accepted() -> None:
    (flag,) = re.findall(r"--kv-transfer-config '(.*?)'", README, re.DOTALL)
    transfer = json.loads(flag)
    assert transfer["kv_connector"] == "LMCacheTieredConnector"
    config = parse_config(transfer["kv_connector_extra_config"])
    assert config.redis_url is not None
    assert config.redis_url.get_secret_value() == "redis://host:6379"


def support_row(package: Package) -> str:
    """A package's row in the README's table of versions."""
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


def test_the_listed_model_families_are_the_tested_ones() -> None:
    rows = table_after(SUPPORT_PAGE, "## Models with several kinds of KV")
    assert rows == [[family.title, family.kv] for family in FAMILIES.values()]


def test_the_ten_settings_of_the_front_page_are_those_of_the_code() -> None:
    rows = table_after(README, "## Settings")
    assert len(rows) == 10
    for key, default, _ in rows:
        field = settings_page.FIELDS[key.strip("`")]
        assert default == settings_page.default_words(field.default), key


def test_pages_quote_the_measurements() -> None:
    """RESULTS.md is generated; figures on other pages are typed, and compared here."""
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
    """Words have a letter or a digit, unlike bars of tables."""
    words = [token for token in README.split() if re.search(r"[^\W_]", token)]
    assert len(words) <= MAX_WORDS


def test_cuda_is_called_unmeasured_without_kept_results() -> None:
    """Once there is one, the pages must change."""
    is_measured = any(kept.result["machine"].get("gpus") for kept in all_kept())
    for page, heading in ((README, f"#{SUPPORTED}"), (SUPPORT_PAGE, SUPPORTED)):
        (row,) = [row for row in table_after(page, heading) if row[0] == "CUDA"]
        assert ("not yet measured" in row[1]) != is_measured
    assert ("not yet measured" in README.partition("## Try it")[0]) != is_measured
    pages = [ROOT / "README.md", ROOT / "benchmarks" / "RESULTS.md", *(ROOT / "docs").glob("*.md")]
    claims = {page.name: CUDA_CLAIM.findall(page.read_text()) for page in pages}
    assert is_measured or not any(claims.values()), claims
