"""Strict settings for every connector: no unknown keys, no conversions, all problems at once.

A model derives from :class:`StrictSettings`; :func:`parse` builds it from a user's settings. No
message repeats a value that may be a secret.
"""

from __future__ import annotations

import difflib
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, ValidationError

from lmcache_connector.errors import ConfigError

NAME_PATTERN = r"^[A-Za-z0-9_.\-]{1,64}$"
NO_HINTS: Mapping[str, str] = MappingProxyType({})


class StrictSettings(BaseModel):
    """Frozen, without conversions; unknown keys and infinite numbers are errors."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, hide_input_in_errors=True, allow_inf_nan=False
    )

    def problems(self) -> Iterator[str]:
        """One line per combination of settings that is invalid although each setting is valid."""
        yield from ()


SettingsT = TypeVar("SettingsT", bound=StrictSettings)


def parse(
    model: type[SettingsT],
    raw: Mapping[str, Any],
    what: str,
    hints: Mapping[str, str] = NO_HINTS,
    only: Sequence[str] = (),
) -> SettingsT:
    """Build ``model`` from ``raw``, called ``what`` in messages. A field's alias is its key.

    ``hints`` explains refused keys, also of fields. ``only``: the keys that may be given, if not
    all. Raises :class:`ConfigError` with one line per problem.
    """
    fields = only or [field.alias or name for name, field in model.model_fields.items()]
    valid = [key for key in fields if key not in hints]
    unknown = [key for key in raw if key not in valid]
    problems = [f"{key!r} is {hints[key]}" for key in unknown if key in hints]
    problems += unknown_keys([key for key in unknown if key not in hints], valid)
    known = {key: value for key, value in raw.items() if key in valid}
    try:
        settings = model(**known)
        problems += settings.problems()
    except ValidationError as error:
        problems += [_explain(detail) for detail in error.errors(include_url=False)]
    if problems:
        raise ConfigError(f"{what} cannot be used:\n" + "\n".join(f"  - {p}" for p in problems))
    return settings


def gone_value(value: str, instead: str) -> BeforeValidator:
    """Refuses a removed value, and names the replacement."""

    def check(given: object) -> object:
        if given == value:
            raise ValueError(f"{value!r} was removed: {instead}")
        return given

    return BeforeValidator(check)


def unknown_keys(
    keys: Sequence[str], valid: Sequence[str], valid_are: str = "valid keys are"
) -> Iterator[str]:
    """A line for each key that is close to a valid key, and one line for the others, which lists
    all valid keys after the words ``valid_are``."""
    far = []
    for key in keys:
        if near := difflib.get_close_matches(key, valid, n=1, cutoff=0.6):
            yield f"{key!r} is not a key: did you mean {near[0]!r}?"
        else:
            far.append(repr(key))
    if far:
        verb = "is not a key" if len(far) == 1 else "are not keys"
        yield f"{', '.join(far)} {verb}: {valid_are} {', '.join(valid)}"


def _explain(detail: Any) -> str:
    name = ".".join(str(part) for part in detail["loc"])
    message = str(detail["msg"]).removeprefix("Value error, ")
    if detail.get("ctx", {}).get("pattern") == NAME_PATTERN:
        message = "must be 1 to 64 letters, digits, dots, hyphens or underscores"
    message = message.removeprefix(f"{name}: ").removeprefix(f"{name} ")  # the name comes first
    return f"{name!r}: {message[0].lower()}{message[1:]}"


def resolve_secret(reference: str, environ: Mapping[str, str]) -> str:
    """The secret that ``env:NAME`` or ``file:PATH`` refers to; other texts are the secret itself.

    Raises ``ValueError`` with the reference, never with a secret.
    """
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


def _resolved(value: object) -> object:
    if not isinstance(value, str):
        return value
    if not value:
        raise ValueError("must not be empty")
    secret = resolve_secret(value, os.environ)
    if any("\ud800" <= character <= "\udfff" for character in secret):
        raise ValueError("must be UTF-8 text")
    return SecretStr(secret)


Secret = Annotated[SecretStr, BeforeValidator(_resolved)]
"""A setting that may be given as ``env:NAME`` or ``file:PATH``, and is never logged."""


ModelDigest = Annotated[
    str,
    Field(min_length=1, max_length=256),
    gone_value(
        "sampled", "leave model_digest out: the default reads every byte once and keeps the digest"
    ),
]
"""``full``, or the user's name for the weights."""


_MAX_BYTES = 4096


def read_weights_label(setting: str | None) -> str:
    """The current label: ``setting``, or the content of the file of ``file:PATH``; "" without one.

    Surrounding white space is stripped. Raises :class:`ConfigError` if the file is not regular,
    unreadable, empty or longer than 4,096 bytes.
    """
    kind, separator, name = (setting or "").partition(":")
    if kind != "file" or not separator:
        return (setting or "").strip()
    try:
        content = _read(name)
        text = content.decode().strip()
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or not a valid path
        reason = getattr(error, "strerror", None) or error  # without the name again
        raise ConfigError(
            f"the label of the weights cannot be read from {name!r}: {reason}"
        ) from error
    if len(content) > _MAX_BYTES:
        raise ConfigError(f"{name} holds more than {_MAX_BYTES} bytes, too many for a label")
    if not text:
        raise ConfigError(f"{name} holds no label")
    return text


def _read(name: str) -> bytes:
    """Read without waiting, because this runs in the engine's step: a FIFO would block until some
    process writes to it."""
    with open(name, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError("it is not a regular file")
        return file.read(_MAX_BYTES + 1)
