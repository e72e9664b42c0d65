"""``warm``: prompts from a file are brought into a running engine, ahead of those who will ask.

The engine is asked each prompt for one token, over its own API: it loads what the tiers have,
computes and stores the rest. Its metrics say how much was which; what others ask meanwhile counts
too.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from operator import index
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from lmcache_connector.cli.metrics import Snapshot, fetch
from lmcache_connector.cli.report import (
    FOUND_WRONG,
    UNREACHABLE,
    CliError,
    Report,
    duration,
    table,
)
from lmcache_connector.cli.target import BROKEN, engine_url
from lmcache_connector.metrics.table import PREFIX
from lmcache_connector.threads import start_thread

_MAX_LINE_BYTES = 64 << 20  # a prompt of ten million tokens
_MAX_ANSWER_BYTES = 16 << 20
_MAX_ERRORS_SHOWN = 10
_COUNTED_SECONDS = 5.0
_LOOK_SECONDS = 0.1
_FIXED = {"max_tokens": 1, "stream": False, "n": 1}
# Settings of the answer are left out: it would be long, or refused. For log-probabilities of a
# prompt vLLM would compute all of it.
_OF_THE_ANSWER = frozenset(
    ("best_of", "echo", "logprobs", "max_completion_tokens", "min_tokens", "prompt_logprobs")
) | {"stream_options", "top_logprobs", "use_beam_search"}
_HINT = 'text, or with .jsonl {"prompt": "..."}, {"prompt": [1, 2]} or {"messages": [...]} per line'


@dataclass(frozen=True, slots=True)
class Options:
    """As typed. ``model``: ``None`` takes the first that the engine serves."""

    file: str
    engine: str
    is_json: bool
    concurrency: int
    timeout_seconds: float
    model: str | None
    api_key: str | None


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Prompt tokens, by where their KV came from: vLLM's own cache, a tier, or computed."""

    prompt: int
    vllm: int
    cpu: int
    redis: int
    computed: int
    fetched_ahead_bytes: int

    @classmethod
    def between(cls, before: Snapshot, after: Snapshot) -> _Tokens:
        def of(name: str, **labels: str) -> int:
            return round(after.total(name, **labels) - before.total(name, **labels))

        prompt, vllm = of("vllm:prompt_tokens_total"), of("vllm:prefix_cache_hits_total")
        cpu, redis = (of(f"{PREFIX}hit_tokens_total", tier=tier) for tier in ("cpu", "redis"))
        failed = of(f"{PREFIX}recomputed_tokens_total")
        ahead = of(f"{PREFIX}prefetched_bytes_total")
        return cls(prompt, vllm, cpu, redis, prompt - vllm - cpu - redis + failed, ahead)


@dataclass(frozen=True, slots=True)
class _Answer:
    """``line``: its number in the file. ``error``: why there is none; empty if there is one."""

    line: int
    num_tokens: int = 0
    error: str = ""


def run(report: Report, options: Options) -> int:
    base = engine_url(options.engine)._replace(path="", query="", fragment="").geturl()
    before = fetch(options.engine)
    model = options.model or _first_model(base, options)
    started, answers = time.monotonic(), list[_Answer]()
    prompts = _prompts(options.file, is_json=options.is_json)
    with report.progress() as progress:
        task = progress.add_task("prompts", total=None)
        for answer in _ask_all(base, model, options, prompts):
            answers.append(answer)
            progress.update(task, completed=len(answers))
    seconds = time.monotonic() - started
    if not answers:
        raise CliError(f"{options.file} holds no prompts")
    tokens = _count(options.engine, before, sum(answer.num_tokens for answer in answers))
    failed = [answer for answer in answers if answer.error]
    columns = ("prompt tokens ", "from vLLM ", "from memory ", "from Redis ", "computed ")
    counts = (tokens.prompt, tokens.vllm, tokens.cpu, tokens.redis, tokens.computed)
    errors = [{"line": one.line, "error": one.error} for one in failed[:_MAX_ERRORS_SHOWN]]
    report.emit(
        {
            "ok": not failed,
            "prompts": len(answers),
            "failed": len(failed),
            "seconds": seconds,
            "tokens": asdict(tokens),
            "errors": errors,
        },
        f"{len(answers) - len(failed)} of {len(answers)} prompts in {duration(seconds)}",
        table(columns, [[f"{count:,}" for count in counts]]),
    )
    for one in failed[:_MAX_ERRORS_SHOWN] if not report.as_json else ():
        report.complain(CliError(f"line {one.line}: {one.error}"))
    return FOUND_WRONG if failed else 0


# -- the file --------------------------------------------------------------------------------------


def _prompts(path: str, *, is_json: bool) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Numbers of lines and what to ask; empty lines are passed over, ``-`` is stdin. Raises
    :class:`CliError`, which names the line, and never what it says."""
    try:
        with nullcontext(sys.stdin.buffer) if path == "-" else Path(path).open("rb") as file:
            number = 0
            while line := file.readline(_MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > _MAX_LINE_BYTES:
                    raise CliError(f"line {number} is longer than {_MAX_LINE_BYTES >> 20} MiB")
                if line.strip():
                    yield number, _prompt(number, line, is_json)
    except OSError as error:
        raise CliError(f"{path}: {error.strerror}") from None


def _prompt(number: int, line: bytes, is_json: bool) -> dict[str, Any]:
    try:
        fields = json.loads(line) if is_json else line.decode().rstrip("\r\n")
    except (ValueError, RecursionError):
        what = "JSON" if is_json else "UTF-8"
        raise CliError(f"line {number} is not {what}", _HINT) from None
    if isinstance(fields, str | list):
        fields = {"prompt": fields}
    if not isinstance(fields, dict) or ("prompt" in fields) == ("messages" in fields):
        raise CliError(f"line {number} has neither a prompt nor messages, or both", _HINT)
    if "messages" in fields:
        if not isinstance(fields["messages"], list) or not fields["messages"]:
            raise CliError(f"line {number}: messages is not a list of messages", _HINT)
        return fields
    prompt = fields["prompt"]
    is_ids = isinstance(prompt, list) and all(type(one) is int and one >= 0 for one in prompt)
    if not prompt or not (isinstance(prompt, str) or is_ids):
        raise CliError(f"line {number}: a prompt is a text or a list of token ids", _HINT)
    return fields


# -- the engine ------------------------------------------------------------------------------------


def _ask_all(
    base: str, model: str, options: Options, prompts: Iterable[tuple[int, Mapping[str, Any]]]
) -> Iterator[_Answer]:
    """As they come; no more than ``concurrency`` are asked or held at once. Who leaves early, by an
    interrupt or for a line that is no prompt, waits for no answer."""
    answers, num_open = SimpleQueue[_Answer](), 0

    def ask(number: int, fields: Mapping[str, Any]) -> None:
        answers.put(_ask(base, model, options, number, fields))

    for number, fields in prompts:
        start_thread("warm", ask, number, fields)
        num_open += 1
        if num_open == options.concurrency:
            yield answers.get()
            num_open -= 1
    for _ in range(num_open):
        yield answers.get()


def _ask(
    base: str, model: str, options: Options, number: int, fields: Mapping[str, Any]
) -> _Answer:
    asked = {name: value for name, value in fields.items() if name not in _OF_THE_ANSWER}
    body = {"model": model, "temperature": 0, **asked, **_FIXED}
    endpoint = "chat/completions" if "messages" in fields else "completions"
    try:
        answer = _call(f"{base}/v1/{endpoint}", options, json.dumps(body).encode())
        return _Answer(number, index(answer["usage"]["prompt_tokens"]))
    except urllib.error.HTTPError as error:
        return _Answer(number, error=f"{error.code} {_message(error)}")
    except Exception as error:  # noqa: BLE001 - no answer, or none that an engine would give
        return _Answer(number, error=str(getattr(error, "reason", error)) or repr(error))


def _call(url: str, options: Options, body: bytes | None = None) -> Any:
    headers = {"Content-Type": "application/json"}
    if options.api_key:
        headers["Authorization"] = f"Bearer {options.api_key}"
    request = urllib.request.Request(url, body, headers)
    with urllib.request.urlopen(request, timeout=options.timeout_seconds) as response:
        return json.loads(response.read(_MAX_ANSWER_BYTES))


def _message(error: urllib.error.HTTPError) -> str:
    """What the engine says is wrong with a request."""
    try:
        found = json.loads(error.read(_MAX_ANSWER_BYTES))
        return str(found.get("error", found).get("message", ""))[:500]
    except BROKEN:
        return str(error.reason)


def _first_model(base: str, options: Options) -> str:
    try:
        return str(_call(f"{base}/v1/models", options)["data"][0]["id"])
    except urllib.error.HTTPError as error:
        hint = "give --api-key" if error.code == 401 else "give --model"
        raise CliError(f"{base}/v1/models: {error.code}", hint, UNREACHABLE) from None
    except BROKEN:
        raise CliError(f"{base} does not say which models it serves", "give --model") from None


def _count(engine: str, before: Snapshot, num_tokens: int) -> _Tokens:
    """The metrics, once they count what was asked: an engine tells of a step after it."""
    until = time.monotonic() + _COUNTED_SECONDS
    while True:
        tokens = _Tokens.between(before, fetch(engine))
        if tokens.prompt >= num_tokens or time.monotonic() >= until:
            return tokens
        time.sleep(_LOOK_SECONDS)
