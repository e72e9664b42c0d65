"""Results are kept as benchmarks wrote them, and the report shows everything that is kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import report, results


def result(name: str, **fields: Any) -> dict[str, Any]:
    machine = {"cpu": "a CPU", "cores": 2, "platform": "Linux", "python": "3.11"}
    return {"benchmark": name, **fields, "machine": machine, "versions": {"vllm": "0.32"}}


def rendered(folder: Path, page: str = "RESULTS", notes: str = "# Title\n") -> str:
    (folder / "notes.md").write_text(notes)
    report.write_report(folder, folder / "notes.md", folder / "RESULTS.md")
    return (folder / f"{page}.md").read_text()


def test_what_is_kept_is_what_json_writes(tmp_path: Path) -> None:
    wanted = result("redis", get_gbps=3.5)
    path = results.keep(wanted, "valkey-tcp", tmp_path)
    assert path == tmp_path / "redis-valkey-tcp.json"
    assert path.read_text() == results.to_line(wanted) + "\n"
    (kept,) = results.all_kept(tmp_path)
    assert (kept.name, kept.variant, kept.result) == ("redis", "valkey-tcp", wanted)


@pytest.mark.parametrize("text", ["not JSON", "[]", "{}", json.dumps({"benchmark": "copy"})])
def test_a_file_that_is_no_result_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "redis.json").write_text(text)
    with pytest.raises(ValueError, match=r"redis\.json"):
        results.all_kept(tmp_path)


def test_a_variant_cannot_leave_the_folder() -> None:
    with pytest.raises(ValueError, match="variant"):
        results.variant_name("../elsewhere")


def test_variants_stand_side_by_side(tmp_path: Path) -> None:
    results.keep(result("redis", server="valkey", get_gbps=3.5), "tcp", tmp_path)
    results.keep(result("redis", server="valkey", get_gbps=5.1, unix=True), "unix", tmp_path)
    page = rendered(tmp_path, "redis")
    assert "|  | tcp | unix |" in page
    assert "| get_gbps | 3.5 | 5.1 |" in page
    assert "| unix |  | yes |" in page
    assert page.count("2 cores of a CPU") == 1, "what is the same for all is said once"


def test_many_variants_stand_below_each_other(tmp_path: Path) -> None:
    for layout in ("LBHNC", "BLNHC", "BHLNC", "LHBNC"):
        results.keep(result("copy", layout=layout, d2h_gbps=8.5), f"{layout}-16", tmp_path)
    page = rendered(tmp_path, "copy")
    assert "|  | layout | d2h_gbps |" in page
    assert "| BHLNC-16 | BHLNC | 8.5 |" in page


def test_lists_of_objects_become_tables(tmp_path: Path) -> None:
    cases = [{"tokens": 1000, "ttft": {"median": 0.1}}, {"tokens": 4000, "note": "a|b"}]
    results.keep(result("sharing", cases=cases, lengths=[1, 2]), folder=tmp_path)
    page = rendered(tmp_path, "sharing")
    assert "| tokens | ttft.median | note |" in page
    assert "| 1000 | 0.1 |  |" in page
    assert r"| 4000 |  | a\|b |" in page
    assert "| lengths | 1, 2 |" in page


def test_notes_stand_with_the_benchmark_they_are_about(tmp_path: Path) -> None:
    results.keep(result("copy", x=1), folder=tmp_path)
    results.keep(result("redis", x=1), folder=tmp_path)
    notes = "# Title\n\nFirst.\n\n<!-- benchmarks -->\n\n## redis\n\nLoopback only.\n"
    page = rendered(tmp_path, notes=notes)
    assert page.startswith("# Title\n\nFirst.\n")
    assert f"({tmp_path.name}/copy.md)" in page
    assert "Loopback only." not in page
    assert "Loopback only." in (tmp_path / "redis.md").read_text()
    assert "Loopback only." not in (tmp_path / "copy.md").read_text()


def test_figures_of_the_summary_are_those_of_results(tmp_path: Path) -> None:
    cases = [{"way": "cold", "at": 4.0, "s": {"median": 1.8974}}, {"way": "hit", "at": 4.0}]
    results.keep(result("copy", cases=cases, lost=["p99 1.13"], worst=0.9443), "large", tmp_path)
    notes = "{{copy-large/cases/way=cold&at=4/s/median ms}} {{copy-large/lost}} "
    page = rendered(tmp_path, notes=notes + "{{copy-large/worst .2f}}")
    assert page.startswith("1,897 p99 1.13 0.94\n")


@pytest.mark.parametrize("path", ["ttft/x", "copy/y", "copy/rows/way=warm/s"])
def test_a_figure_that_is_in_no_result_is_named(tmp_path: Path, path: str) -> None:
    results.keep(result("copy", rows=[{"way": "cold", "s": 1}]), folder=tmp_path)
    with pytest.raises(ValueError, match=path):
        rendered(tmp_path, notes=f"{{{{{path}}}}}")


def test_a_table_that_is_too_long_is_left_to_its_file(tmp_path: Path) -> None:
    results.keep(result("copy", rows=[{"a": n, "b": n} for n in range(41)]), folder=tmp_path)
    page = rendered(tmp_path, "copy")
    assert "41 rows, in [copy.json](copy.json)" in page
    assert "| 40 |" not in page


def test_a_picture_is_shown_with_its_result(tmp_path: Path) -> None:
    results.keep(result("copy", x=1), folder=tmp_path)
    (tmp_path / "copy.png").write_bytes(b"")
    (tmp_path / "other.png").write_bytes(b"")
    page = rendered(tmp_path, "copy")
    assert "![copy](copy.png)" in page
    assert "other.png" not in page


def test_the_pages_in_the_tree_are_what_the_results_say() -> None:
    notes = report.NOTES.read_text(encoding="utf-8")
    pages = report.render(results.all_kept(), notes, results.FOLDER, report.TARGET)
    for path, page in pages.items():
        assert path.read_text(encoding="utf-8") == page, "python -m benchmarks report"
