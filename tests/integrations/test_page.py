"""The settings on ``docs/integrations.md`` are those that vLLM reads."""

from __future__ import annotations

import json
import re
from types import NoneType
from typing import Any, get_args

import pytest
from pydantic import SecretStr
from vllm.config import KVTransferConfig
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from lmcache_connector.config.strict import parse
from lmcache_connector.integrations.vllm_tier import KEYS, TierSettings
from tests.support import ROOT
from tests.test_readme import table_after

PAGE = (ROOT / "docs" / "integrations.md").read_text()
SNIPPETS = [json.loads(text) for text in re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)]
PLACE = {"type", "module_path"}


@pytest.fixture(autouse=True)
def _secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KV_CACHE_URL", "redis://127.0.0.1:1")
    monkeypatch.setenv("KV_CACHE_HASH_KEY", "0123456789abcdef")


def snippet(key: str) -> dict[str, Any]:
    (found,) = [s for s in SNIPPETS if key in s]
    return dict(found)


def test_vllm_loads_the_documented_tier() -> None:
    extra = KVTransferConfig(**snippet("kv_connector")).kv_connector_extra_config
    assert extra["spec_name"] == TieringOffloadingSpec.__name__
    TieringOffloadingSpec.build_metric_definitions(extra)  # imports the tier
    (tier,) = extra["secondary_tiers"]
    settings = {k: v for k, v in tier.items() if k not in PLACE}
    parse(TierSettings, settings, "the tier", only=KEYS)


def test_all_settings_are_on_the_page() -> None:
    rows = {row[0].strip("`"): row for row in table_after(PAGE, "### Settings")}
    assert tuple(rows) == KEYS
    for name in KEYS:
        field = TierSettings.model_fields[name]
        _, kind, default, _ = rows[name]
        types = {str: "string", int: "integer", float: "number", bool: "boolean"}
        wanted = "secret" if _is_secret(field.annotation) else types.get(_plain(field.annotation))
        assert kind == (wanted or "string"), name
        shown = default.strip("`")
        if name in ("redis_url", "namespace"):  # required
            assert shown == ""
        elif field.default is None:
            assert shown == "none"
        else:
            assert json.dumps(field.default).strip('"').removesuffix(".0") == shown, name


def _plain(annotation: Any) -> Any:
    arguments = [a for a in get_args(annotation) if a is not NoneType]
    return _plain(arguments[0]) if arguments else annotation


def _is_secret(annotation: Any) -> bool:
    return _plain(annotation) is SecretStr
