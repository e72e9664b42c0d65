"""Tables of names with reasons."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType


def by_field(table: Mapping[str, str]) -> dict[str, str]:
    """``{reason: "field field"}`` as ``{field: reason}``."""
    return {field: reason for reason, fields in table.items() for field in fields.split()}


def by_class(tables: Mapping[str, Mapping[str, str]]) -> MappingProxyType[str, dict[str, str]]:
    """:func:`by_field` for each class."""
    return MappingProxyType({name: by_field(table) for name, table in tables.items()})


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())
