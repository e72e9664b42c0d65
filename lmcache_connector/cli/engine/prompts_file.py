"""Prompts in a file: a line of text each, or a line of JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmcache_connector.cli.report import CliError

MAX_LINE_BYTES = 64 << 20
"""A prompt of ten million tokens."""
_HINT = 'text, or with .jsonl {"prompt": "..."}, {"prompt": [1, 2]} or {"messages": [...]} per line'


@dataclass(frozen=True, slots=True)
class PromptLine:
    """``number``: of the line, from 1. ``endpoint`` and ``body``: of the request to the API."""

    number: int
    endpoint: str
    body: Mapping[str, Any]


def read_prompts(path: str, *, is_json: bool) -> Iterator[PromptLine]:
    """Empty lines are passed over. ``-`` is stdin. Raises :class:`CliError`, which names the line,
    and never what it says."""
    try:
        with nullcontext(sys.stdin.buffer) if path == "-" else Path(path).open("rb") as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise CliError(f"line {number} is longer than {MAX_LINE_BYTES >> 20} MiB")
                if line.strip():
                    yield _parse(number, line, is_json)
    except OSError as error:
        raise CliError(f"{path}: {error.strerror}") from None


def _parse(number: int, line: bytes, is_json: bool) -> PromptLine:
    try:
        if not is_json:
            return _completion(number, {"prompt": line.decode().rstrip("\r\n")})
        fields = json.loads(line)
    except (ValueError, RecursionError):
        what = "JSON" if is_json else "UTF-8"
        raise CliError(f"line {number} is not {what}", _HINT) from None
    if isinstance(fields, str | list):
        fields = {"prompt": fields}
    if not isinstance(fields, dict) or ("prompt" in fields) == ("messages" in fields):
        raise CliError(f"line {number} has neither a prompt nor messages, or both", _HINT)
    if "messages" not in fields:
        return _completion(number, fields)
    if not isinstance(fields["messages"], list) or not fields["messages"]:
        raise CliError(f"line {number}: messages is not a list of messages", _HINT)
    return PromptLine(number, "/v1/chat/completions", fields)


def _completion(number: int, fields: dict[str, Any]) -> PromptLine:
    prompt = fields["prompt"]
    is_ids = isinstance(prompt, list) and all(type(one) is int and one >= 0 for one in prompt)
    if not prompt or not (isinstance(prompt, str) or is_ids):
        raise CliError(f"line {number}: a prompt is a text or a list of token ids", _HINT)
    return PromptLine(number, "/v1/completions", fields)
