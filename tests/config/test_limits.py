"""The folder for what is kept between starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmcache_connector.config.limits import user_cache_folder


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
