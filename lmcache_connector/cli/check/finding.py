"""What ``check`` found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lmcache_connector.cli.report import FOUND_WRONG, Report, duration

_MARKS = {"ok": "[green]ok[/]", "warning": "[yellow]warning[/]", "error": "[red]error[/]"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of ``check``.

    ``verdict`` is ``ok``, ``warning`` or ``error``; ``hint`` says how to mend it; ``seconds`` is
    how long it took, where that matters. An error makes ``code`` the exit code.
    """

    name: str
    verdict: str
    detail: str
    hint: str = ""
    seconds: float | None = None
    code: int = FOUND_WRONG

    @property
    def exit_code(self) -> int:
        return self.code if self.verdict == "error" else 0

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "verdict": self.verdict,
            "detail": self.detail,
            "hint": self.hint,
            "seconds": self.seconds,
        }

    def show(self, report: Report) -> None:
        took = f" ({duration(self.seconds)})" if self.seconds is not None else ""
        report.out.print(_MARKS[self.verdict] + " " * (9 - len(self.verdict)), end="")
        report.say(f"{self.name}: {self.detail}{took}")
        if self.hint:
            report.say(f"         -> {self.hint}")
