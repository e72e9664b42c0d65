"""``warm``: prompts from a file are brought into a running engine, ahead of those who will ask.

The engine is asked each prompt for one token, over its own API: it loads what the tiers have,
computes and stores the rest. Its metrics say how much was which; what others ask meanwhile counts
too.
"""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from http.client import HTTPException
from operator import index
from queue import SimpleQueue
from typing import Any
from urllib.parse import urlsplit

from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from lmcache_connector.cli.engine.prompts_file import PromptLine, read_prompts
from lmcache_connector.cli.engine.scrape import Snapshot, fetch
from lmcache_connector.cli.report import FOUND_WRONG, UNREACHABLE, CliError, Report, duration
from lmcache_connector.config.strict import resolve_secret
from lmcache_connector.metrics.table import PREFIX
from lmcache_connector.threads import start_thread

_MAX_ANSWER_BYTES = 16 << 20
_MAX_ERRORS_SHOWN = 10
_COUNTED_SECONDS = 5.0
_LOOK_SECONDS = 0.1
_FIXED = {"max_tokens": 1, "stream": False, "n": 1}
# What is said of the answer is left out: it would be long, or refused. For log-probabilities of a
# prompt vLLM would compute all of it.
_OF_THE_ANSWER = frozenset(
    ("best_of", "echo", "logprobs", "max_completion_tokens", "min_tokens", "prompt_logprobs")
) | {"stream_options", "top_logprobs", "use_beam_search"}
_BROKEN = (
    OSError,
    HTTPException,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RecursionError,
)
"""No answer, or none that an engine would give."""


@dataclass(frozen=True, slots=True)
class Options:
    """As typed. ``model``: ``None`` takes the first that the engine serves."""

    file: str
    url: str
    is_json: bool
    concurrency: int
    timeout_seconds: float
    model: str | None
    api_key: str | None


@dataclass(frozen=True, slots=True)
class Tokens:
    """Prompt tokens, by where their KV came from: vLLM's own cache, a tier, or computed."""

    prompt: int
    vllm: int
    cpu: int
    redis: int
    computed: int
    fetched_ahead_bytes: int

    @classmethod
    def between(cls, before: Snapshot, after: Snapshot) -> Tokens:
        def of(name: str, **labels: str) -> int:
            return round(after.total(name, **labels) - before.total(name, **labels))

        prompt, vllm = of("vllm:prompt_tokens_total"), of("vllm:prefix_cache_hits_total")
        cpu, redis = (of(f"{PREFIX}hit_tokens_total", tier=tier) for tier in ("cpu", "redis"))
        failed = of(f"{PREFIX}recomputed_tokens_total")
        ahead = of(f"{PREFIX}prefetched_bytes_total")
        return cls(prompt, vllm, cpu, redis, prompt - vllm - cpu - redis + failed, ahead)


@dataclass(frozen=True, slots=True)
class _Answer:
    """``error``: why there is none; empty if there is one."""

    line: int
    num_tokens: int = 0
    error: str = ""


def read_key(reference: str | None) -> str | None:
    """Raises :class:`CliError`."""
    try:
        return resolve_secret(reference, os.environ) if reference else None
    except ValueError as error:
        raise CliError(f"--api-key: {error}") from None


def run(report: Report, options: Options) -> int:
    base = _base_url(options.url)
    before = fetch(options.url)
    model = options.model or _first_model(base, options)
    started, answers = time.monotonic(), list[_Answer]()
    prompts = read_prompts(options.file, is_json=options.is_json)
    with _progress(report) as progress:
        task = progress.add_task("prompts", total=None)
        for answer in _ask_all(base, model, options, prompts):
            answers.append(answer)
            progress.update(task, completed=len(answers))
    seconds = time.monotonic() - started
    if not answers:
        raise CliError(f"{options.file} holds no prompts")
    tokens = _count(options.url, before, sum(answer.num_tokens for answer in answers))
    _tell(report, answers, tokens, seconds)
    return FOUND_WRONG if any(answer.error for answer in answers) else 0


def _ask_all(
    base: str, model: str, options: Options, prompts: Iterable[PromptLine]
) -> Iterator[_Answer]:
    """As they come; no more than ``concurrency`` are asked or held at once. Who leaves early, by an
    interrupt or for a line that is no prompt, waits for no answer."""
    answers, num_open = SimpleQueue[_Answer](), 0

    def ask(prompt: PromptLine) -> None:
        answers.put(_ask(base, model, options, prompt))

    for prompt in prompts:
        start_thread("warm", ask, prompt)
        num_open += 1
        if num_open == options.concurrency:
            yield answers.get()
            num_open -= 1
    for _ in range(num_open):
        yield answers.get()


def _ask(base: str, model: str, options: Options, prompt: PromptLine) -> _Answer:
    asked = {name: value for name, value in prompt.body.items() if name not in _OF_THE_ANSWER}
    body = {"model": model, "temperature": 0, **asked, **_FIXED}
    try:
        answer = _call(f"{base}{prompt.endpoint}", options, json.dumps(body).encode())
        return _Answer(prompt.number, index(answer["usage"]["prompt_tokens"]))
    except urllib.error.HTTPError as error:
        return _Answer(prompt.number, error=f"{error.code} {_message(error)}")
    except Exception as error:  # noqa: BLE001 - no answer, or none that an engine would give
        return _Answer(prompt.number, error=str(getattr(error, "reason", error)) or repr(error))


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
    except _BROKEN:
        return str(error.reason)


def _first_model(base: str, options: Options) -> str:
    try:
        return str(_call(f"{base}/v1/models", options)["data"][0]["id"])
    except urllib.error.HTTPError as error:
        hint = "give --api-key" if error.code == 401 else "give --model"
        raise CliError(f"{base}/v1/models: {error.code}", hint, UNREACHABLE) from None
    except _BROKEN:
        raise CliError(f"{base} does not say which models it serves", "give --model") from None


def _base_url(text: str) -> str:
    """``localhost:8000`` and the like, completed, without a path."""
    parts = urlsplit(text if "://" in text else f"http://{text}")
    return f"{parts.scheme}://{parts.netloc}"


def _count(url: str, before: Snapshot, num_tokens: int) -> Tokens:
    """The metrics, once they count what was asked: an engine tells of a step after it."""
    until = time.monotonic() + _COUNTED_SECONDS
    while True:
        tokens = Tokens.between(before, fetch(url))
        if tokens.prompt >= num_tokens or time.monotonic() >= until:
            return tokens
        time.sleep(_LOOK_SECONDS)


def _tell(report: Report, answers: list[_Answer], tokens: Tokens, seconds: float) -> None:
    failed = [answer for answer in answers if answer.error]
    if report.as_json:
        errors = [{"line": one.line, "error": one.error} for one in failed]
        found = {"prompts": len(answers), "failed": len(failed), "seconds": seconds}
        document = {"ok": not failed, **found, "tokens": asdict(tokens)}
        report.emit({**document, "errors": errors[:_MAX_ERRORS_SHOWN]})
        return
    report.say(f"{len(answers) - len(failed)} of {len(answers)} prompts in {duration(seconds)}")
    columns = ("prompt tokens ", "from vLLM ", "from memory ", "from Redis ", "computed ")
    counts = (tokens.prompt, tokens.vllm, tokens.cpu, tokens.redis, tokens.computed)
    report.table(columns, [[f"{count:,}" for count in counts]])
    for one in failed[:_MAX_ERRORS_SHOWN]:
        report.complain(CliError(f"line {one.line}: {one.error}"))


def _progress(report: Report) -> Progress:
    columns = (SpinnerColumn(), TextColumn("prompts"), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=report.err, transient=True, disable=report.as_json)
