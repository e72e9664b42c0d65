"""The weights of an instance's model, and how its connector is told of them: the one place that
changes when that does.

KV follows from the weights: ``version`` is what cells begin with. Versions above 0 came by an
update. A connector sees a reset, and reads what the weights are called, if they have a name.
"""

from __future__ import annotations

from pathlib import Path


class Weights:
    """``label``: the file that names them, if there is one."""

    def __init__(self, label: Path | None) -> None:
        self.version = 0
        self._label = label
        if label is not None:
            label.write_text("version 0")

    @property
    def settings(self) -> dict[str, str]:
        """Of the connector."""
        return {"weights_label": f"file:{self._label}"} if self._label is not None else {}

    def load(self, version: int) -> None:
        """Other ones, or the same again. A reset of the cache follows."""
        self.version = version
        if self._label is not None:
            self._label.write_text(f"version {version}")
