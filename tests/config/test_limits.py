"""Settings that are gone are refused with what replaces them, as docs/upgrading.md has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lmcache_connector.config import limits
from lmcache_connector.config.limits import user_cache_folder
from lmcache_connector.config.tiered import ConnectorConfig, parse_config
from lmcache_connector.errors import ConfigError
from tests.support import ROOT

UPGRADING = (ROOT / "docs" / "upgrading.md").read_text()


@pytest.mark.parametrize("name", limits.GONE)
def test_a_setting_that_is_gone_is_refused_with_what_replaces_it(name: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_config({name: 1})
    (line,) = str(raised.value).splitlines()[1:]
    assert line == f"  - {name!r} is {limits.GONE[name]}"
    assert name not in ConnectorConfig.model_fields
    assert f"| `{name}`" in UPGRADING


@pytest.mark.parametrize(
    ("setting", "instead"),
    [
        ({"redis_codec": "auto"}, "use 'blosc2' or 'none'"),
        ({"redis_admission": "worth"}, "use 'reused', or 'all'"),
        ({"model_digest": "sampled"}, "leave model_digest out"),
    ],
)
def test_so_is_a_value_that_is_gone(setting: dict[str, Any], instead: str) -> None:
    ((name, value),) = setting.items()
    with pytest.raises(ConfigError) as raised:
        parse_config(setting)
    (line,) = str(raised.value).splitlines()[1:]
    assert line.startswith(f"  - {name!r}: {value!r} is gone")
    assert instead in line
    assert f"| `{name}: {value}` |" in UPGRADING


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"XDG_CACHE_HOME": "/fast", "HOME": "/home/me"}, "/fast/lmcache-connector"),
        ({"XDG_CACHE_HOME": "fast", "HOME": "/home/me"}, "/home/me/.cache/lmcache-connector"),
        ({"HOME": "/home/me"}, "/home/me/.cache/lmcache-connector"),
        ({}, "/.cache/lmcache-connector"),
    ],
)
def test_it_lies_where_the_user_keeps_caches(environ: dict[str, str], folder: str) -> None:
    assert user_cache_folder(environ) == Path(folder)
