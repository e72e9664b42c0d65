"""``docs/settings.md``, from the settings themselves: what is written below each, its type, bounds
and default. ``python -m tests.support.settings_page`` writes it."""

from __future__ import annotations

import ast
import inspect
import json
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, MaxLen
from pydantic import SecretStr
from pydantic.fields import FieldInfo

from lmcache_connector.config.tiered import ConnectorConfig
from tests.support import ROOT

PAGE = ROOT / "docs" / "settings.md"
FIELDS = ConnectorConfig.model_fields
_HEAD = """\
# Settings

Keys of `kv_connector_extra_config` for `LMCacheTieredConnector`. An unknown key, a wrong type or
an impossible value stops the start with one message that lists them all; combinations that do not
fit are listed once each value is possible. A secret is the value itself, `env:NAME` (an environment
variable) or `file:PATH` (the text of a file). The connector never logs secrets, but vLLM logs its
own command line: prefer `env:` or `file:`.

## All keys

| key | type | unit | default | effect |
|---|---|---|---|---|
"""
_TAIL = """\

Removed settings are refused with a message that says what to do; [upgrading](upgrading.md)
lists them. `LMCacheP2PConnector` takes the same settings, except for
[the address](disaggregated.md#settings).
"""
_TYPE_WORDS = {int: "integer", float: "number", bool: "boolean", str: "string", SecretStr: "secret"}
_UNITS = {
    "chunk_size": "tokens",
    "window_interval": "tokens",
    "_gib": "GiB",
    "_seconds": "seconds",
}  # by the end of a key's name
_LINKS = {
    "tenant_share": ("guaranteed to each tenant", "operations.md#what-the-cpu-tier-keeps"),
    "pin_share": ("pin", "operations.md#hints"),
    "redis_url": ("Redis or Valkey", "operations.md#redis-addresses"),
    "redis_admission": ("a second request", "operations.md#size"),
    "redis_codec": ("Lossless compression", "operations.md#compressed-values"),
    "peer_listen": ("serves", "operations.md#peers"),
    "peers": ("load from", "operations.md#peers"),
    "peer_hosts": ("load from", "disaggregated.md"),
    "audit_share": ("audited", "operations.md#audits"),
    "weights_label": ("read at resets", "operations.md#labels"),
    "model_digest": ("read once", "operations.md#what-tells-models-apart"),
}
"""The words of a setting's description that become a link, and its target."""


def page() -> str:
    docs = _docs()
    return _HEAD + "".join(_row(name, field, docs[name]) for name, field in FIELDS.items()) + _TAIL


def default_words(value: Any) -> str:
    return "none" if value is None else f"`{json.dumps(value)}`"


def _docs() -> dict[str, str]:
    """The string below each field of the class."""
    (body,) = ast.parse(inspect.getsource(ConnectorConfig)).body
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
            assert isinstance(field.target, ast.Name)
            docs[field.target.id] = " ".join(ast.literal_eval(below.value).split())
    return docs


def _row(name: str, field: FieldInfo, doc: str) -> str:
    text = doc.replace("``", "`")
    if name in _LINKS:
        words, place = _LINKS[name]
        assert words in text, name
        text = text.replace(words, f"[{words}]({place})", 1)
    unit = next((unit for end, unit in _UNITS.items() if name.endswith(end)), "")
    kind = ", ".join(filter(None, (_type_words(field.annotation), _bounds(field))))
    cells = (f"`{field.alias or name}`", kind, unit, default_words(field.default), text)
    return "|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|\n"


def _type_words(annotation: Any) -> str:
    if annotation in _TYPE_WORDS:
        return _TYPE_WORDS[annotation]
    arguments = [a for a in get_args(annotation) if a is not NoneType]
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if get_origin(annotation) is tuple:
        return f"list of {_type_words(arguments[0])}s"
    return _type_words(arguments[0])  # T | None, or Annotated[T, ...]


def _bounds(field: FieldInfo) -> str:
    """The bounds of a number, or of the length of a list."""
    low, high, kind = "", "", _type_words(field.annotation)
    for bound in _constraints(field):
        if isinstance(bound, Gt):
            low = f"above {bound.gt}"
            if kind == "integer" and isinstance(bound.gt, int):
                low = f"from {bound.gt + 1}"
        elif isinstance(bound, Ge):
            low = f"from {bound.ge}"
        elif isinstance(bound, Le):
            high = f"to {bound.le}"
        elif isinstance(bound, MaxLen) and get_origin(field.annotation) is tuple:
            high = f"at most {bound.max_length}"
    return f"{low} {high}".strip()


def _constraints(field: FieldInfo) -> list[Any]:
    """Of ``Annotated[T, ...] | None`` they stand inside the annotation."""
    inner = [
        constraint
        for argument in get_args(field.annotation)
        for each in getattr(argument, "__metadata__", ())
        for constraint in getattr(each, "metadata", ())
    ]
    return [*field.metadata, *inner]


if __name__ == "__main__":
    PAGE.write_text(page())
