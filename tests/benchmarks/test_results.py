"""Results are kept as benchmarks wrote them, and the report shows everything that is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.harness import report, results


def result(name: str, **fields: Any) -> dict[str, Any]:
    machine = {"cpu": "a CPU", "cores": 2, "platform": "Linux", "python": "3.11"}
    return {"benchmark": name, **fields, "machine": machine, "versions": {"vllm": "0.32"}}


def rendered(folder: Path, page: str = "RESULTS", notes: str = "# Title\n") -> str:
    (folder / "notes.md").write_text(notes)
    report.write_report(folder, folder / "notes.md", folder / "RESULTS.md")
    return (folder / f"{page}.md").read_text()


def test_figures_of_the_summary_are_those_of_results(tmp_path: Path) -> None:
    cases = [{"way": "cold", "at": 4.0, "s": {"median": 1.8974}}, {"way": "hit", "at": 4.0}]
    results.keep(result("copy", cases=cases, lost=["p99 1.13"], worst=0.9443), "large", tmp_path)
    notes = "{{copy-large/cases/way=cold&at=4/s/median ms}} {{copy-large/lost}} "
    page = rendered(tmp_path, notes=notes + "{{copy-large/worst .2f}}")
    assert page.startswith("1,897 p99 1.13 0.94\n")


def test_the_pages_in_the_tree_are_what_the_results_say() -> None:
    notes = report.NOTES.read_text(encoding="utf-8")
    pages = report.render(results.all_kept(), notes, results.FOLDER, report.TARGET)
    for path, page in pages.items():
        assert path.read_text(encoding="utf-8") == page, "python -m benchmarks report"
