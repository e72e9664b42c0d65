from __future__ import annotations

from pathlib import Path

import pytest

from lmcache_connector.config.strict import resolve_secret


def test_secrets_by_value_environment_and_file(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("from file\n")
    environ = {"NAME": "from env", "EMPTY": ""}
    assert resolve_secret("plain", environ) == "plain"
    assert resolve_secret("env:NAME", environ) == "from env"
    assert resolve_secret(f"file:{file}", environ) == "from file"
    assert resolve_secret("redis://u:p@h", environ) == "redis://u:p@h"
    for reference in ("env:MISSING", "env:EMPTY", "file:/no/such/file"):
        with pytest.raises(ValueError, match=reference.split(":", 1)[1]):
            resolve_secret(reference, environ)
    file.write_text("\n")
    with pytest.raises(ValueError, match="no secret"):
        resolve_secret(f"file:{file}", environ)
