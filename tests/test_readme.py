"""What the front page says of settings and formats is what the code does."""

from __future__ import annotations

import json
import re
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import SecretStr

from lmcache_connector.config.tiered import ConnectorConfig, parse_config
from lmcache_connector.storage import chunk_codec
from tests.storage.redis.test_topology import TestAcl as _AclTest
from tests.support import ROOT

README = (ROOT / "README.md").read_text()
TYPE_WORDS = {int: "integer", float: "number", bool: "boolean", str: "string", SecretStr: "secret"}
UNITS = {
    "chunk_size": "tokens",
    "_gib": "GiB",
    "_mib": "MiB",
    "_seconds": "seconds",
}  # by the end of a key's name


def table_after(heading: str) -> list[list[str]]:
    """Rows of the first table below ``heading``, cells stripped, without its head."""
    below = README.split(f"\n{heading}", maxsplit=1)[1].splitlines()
    rows = []
    for line in below:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
        elif rows:
            break
    return rows[2:]


CONFIGURATION = {row[0].strip("`"): row[1:4] for row in table_after("## Configuration")}
OWN_FIELDS = {name: f for name, f in ConnectorConfig.model_fields.items() if name != "lmcache"}


def type_words(annotation: Any) -> str:
    if annotation in TYPE_WORDS:
        return TYPE_WORDS[annotation]
    arguments = [a for a in get_args(annotation) if a is not NoneType]
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    return type_words(arguments[0])  # T | None, or Annotated[T, ...]


def default_words(value: Any) -> str:
    return "none" if value is None else f"`{json.dumps(value)}`"


def test_the_table_has_every_key_in_order() -> None:
    assert list(CONFIGURATION) == [*OWN_FIELDS, "lmcache.NAME"]


@pytest.mark.parametrize("name", OWN_FIELDS)
def test_type_unit_and_default_are_those_of_the_code(name: str) -> None:
    field = OWN_FIELDS[name]
    unit = next((unit for end, unit in UNITS.items() if name.endswith(end)), "")
    assert CONFIGURATION[name] == [type_words(field.annotation), unit, default_words(field.default)]


def test_the_flag_as_printed_is_accepted() -> None:
    (flag,) = re.findall(r"--kv-transfer-config '(.*)'", README)
    transfer = json.loads(flag)
    assert transfer["kv_connector"] == "LMCacheTieredConnector"
    config = parse_config(transfer["kv_connector_extra_config"])
    assert config.redis_url is not None
    assert config.redis_url.get_secret_value() == "redis://host:6379"


def test_the_value_format_is_that_of_the_codec() -> None:
    rows = table_after("**Value**")
    header = [(int(offset), int(size)) for offset, size, _ in rows[:-1]]
    ends = [offset + size for offset, size in header]
    assert [offset for offset, _ in header] == [0, *ends[:-1]]  # no gap, no overlap
    assert ends[-1] == chunk_codec.HEADER_BYTES == int(rows[-1][0])
    assert ends[-2] == chunk_codec.HEADER_BYTES - 32


def test_the_dtype_codes_are_those_of_the_codec() -> None:
    (listed,) = (row[2] for row in table_after("**Value**") if row[2].startswith("dtype: "))
    codes = {name: int(code) for code, name in re.findall(r"(\d+) (\w+)", listed)}
    assert codes == chunk_codec.DTYPE_CODES


def test_the_access_rights_are_those_a_test_runs_with() -> None:
    rights = " ".join(_AclTest.MINIMAL)
    assert f"~lmc:* -@all {rights}\n" in README
