"""``all`` runs every benchmark, and goes on after one that fails."""

from __future__ import annotations

import pytest

from benchmarks.harness import app, suite


def test_every_benchmark_is_in_it() -> None:
    jobs = suite.all_jobs()
    assert {job.name for job in jobs} == set(app.BENCHMARKS) - suite.APART
    assert len({job.label for job in jobs}) == len(jobs)
    assert all("--keep" in job.command for job in jobs)


@pytest.mark.parametrize("argv", [["nonsense"], ["copy", "--nonsense"], ["copy", "--keep", "a/b"]])
def test_a_wrong_command_line_is_refused(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        app.main(argv)
    assert refused.value.code == 2
