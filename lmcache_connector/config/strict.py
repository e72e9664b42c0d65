"""Secrets by value or by reference: ``env:NAME`` and ``file:PATH`` (pure but for the file)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def resolve_secret(reference: str, environ: Mapping[str, str]) -> str:
    """The secret itself. Raises ``ValueError`` naming the reference, never a secret."""
    kind, separator, name = reference.partition(":")
    if kind == "env" and separator:
        if not environ.get(name):
            raise ValueError(f"environment variable {name} is not set or empty")
        return environ[name]
    if kind == "file" and separator:
        try:
            text = Path(name).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"cannot read the secret from file {name}") from error
        if not text:
            raise ValueError(f"file {name} holds no secret")
        return text
    return reference
