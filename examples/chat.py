"""Conversations about long documents, turn by turn, with a running ``vllm serve``.

    python examples/chat.py http://localhost:8000
    python examples/chat.py http://localhost:8000 --users 4 --documents 1 --turns 5

Every turn sends the whole conversation again, as chat programs do. The document and the earlier
turns, answers included, need not be computed as far as vLLM's own prefix cache or the connector has
their KV. vLLM's cache has the latest users' turns; if it is too small for all, the others come from
the connector. For each turn this prints the time to the first token and the sources of the prompt.
One user speaks at a time, so that metrics in between belong to that turn.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any

_SECONDS = 600.0
_ANSWER_TOKENS = 48
_SOURCES = {"device": "vLLM's cache", "cpu": "CPU tier", "peer": "peers", "redis": "Redis"}
_SAVED = "saved"


@dataclass(frozen=True)
class Turn:
    """One answer. ``first_seconds``: until its first token."""

    text: str
    first_seconds: float
    num_prompt_tokens: int


class Chat:
    """One user's conversation."""

    def __init__(self, url: str, model: str, document: str) -> None:
        self._url = url
        self._model = model
        self._messages = [{"role": "system", "content": document}]

    def say(self, text: str) -> Turn:
        self._messages.append({"role": "user", "content": text})
        turn = self._ask()
        self._messages.append({"role": "assistant", "content": turn.text})
        return turn

    def _ask(self) -> Turn:
        body = {
            "model": self._model,
            "messages": self._messages,
            "max_tokens": _ANSWER_TOKENS,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        started = time.perf_counter()
        first_seconds, pieces, num_prompt_tokens = 0.0, list[str](), 0
        for event in stream(f"{self._url}/v1/chat/completions", body):
            if event.get("choices"):
                first_seconds = first_seconds or time.perf_counter() - started
                pieces.append(event["choices"][0]["delta"].get("content") or "")
            if event.get("usage"):
                num_prompt_tokens = event["usage"]["prompt_tokens"]
        return Turn("".join(pieces), first_seconds, num_prompt_tokens)


def main() -> None:
    args = parse_args()
    try:
        converse(args)
    except urllib.error.HTTPError as error:
        sys.exit(f"{error.url}: {error}\n{error.read().decode(errors='replace')}")
    except (OSError, HTTPException) as error:
        sys.exit(f"{args.url}: {error}\nIs the server up, and is this its address?")


def converse(args: argparse.Namespace) -> None:
    url = ("" if "://" in args.url else "http://") + args.url.rstrip("/")
    model = json.loads(get(f"{url}/v1/models"))["data"][0]["id"]
    words = random.Random(args.seed)
    documents = [some_words(words, args.words) for _ in range(args.documents or args.users)]
    chats = [Chat(url, model, documents[user % len(documents)]) for user in range(args.users)]
    for number in range(args.turns):
        for user, chat in enumerate(chats):
            if args.forget:
                forget(url)
            before = tokens_by_source(url)
            turn = chat.say(some_words(words, args.question_words))
            after = tokens_by_source(url)
            found = {source: after[source] - before[source] for source in _SOURCES}
            sources = ", ".join(f"{found[source]} {name}" for source, name in _SOURCES.items())
            saved = found["device"] + after[_SAVED] - before[_SAVED]
            computed, lost = turn.num_prompt_tokens - saved, sum(found.values()) - saved
            print(
                f"turn {number + 1} user {user + 1}: {turn.first_seconds:.3f} s, "
                f"{turn.num_prompt_tokens} prompt tokens: {sources}, {computed} computed"
                + (f" ({lost} were found, but did not arrive in time)" if lost else ""),
                flush=True,
            )


def forget(url: str) -> None:
    """Reset vLLM's own prefix cache, once the connector has copied the last blocks."""
    for _ in range(100):
        if json.loads(post(f"{url}/reset_prefix_cache"))["success"]:
            return
        time.sleep(0.1)
    raise SystemExit("vLLM did not empty its prefix cache within 10 s.")


def some_words(words: random.Random, count: int) -> str:
    """Words of the tests' tiny model; other models can read them, too."""
    return " ".join(f"w{words.randrange(2, 1000)}" for _ in range(count))


def tokens_by_source(url: str) -> dict[str, int]:
    """Cached prompt tokens so far, and those of them that the connector has loaded."""
    text = get(f"{url}/metrics")
    found = re.findall(
        r"^vllm:(?:prompt_tokens_cached_by_source|lmcache_hit_tokens)_total"
        r'\{.*(?:source|tier)="(\w+)"\} (\S+)$',
        text,
        re.MULTILINE,
    )
    loaded = re.findall(r"^vllm:lmcache_prefill_saved_tokens_total\{.*\} (\S+)$", text, re.M)
    sums = dict.fromkeys((*_SOURCES, _SAVED), 0)
    for source, value in (*found, *((_SAVED, value) for value in loaded)):
        if source in sums:
            sums[source] += int(float(value))
    return sums


def stream(url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of a streamed answer."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=_SECONDS) as response:
        for line in response:
            data = line.decode().removeprefix("data: ").strip()
            if data and data != "[DONE]":
                yield json.loads(data)


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as response:
        text: str = response.read().decode()
        return text


def post(url: str) -> str:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, b""), timeout=10) as response:
            return str(response.read().decode())
    except urllib.error.HTTPError as error:
        sys.exit(f"{url}: {error}; --forget needs a server with VLLM_SERVER_DEV_MODE=1")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", help="address of a running vllm serve with the connector")
    parser.add_argument("--users", type=int, default=3, help="conversations (3)")
    parser.add_argument(
        "--documents", type=int, help="number of documents, shared by the users (one for each)"
    )
    parser.add_argument("--turns", type=int, default=3, help="number of questions of each user (3)")
    # The demo's model has a context of 8192 tokens, and each such word has four.
    parser.add_argument("--words", type=int, default=1500, help="words of a document (1500)")
    parser.add_argument("--question-words", type=int, default=40, help="words of a question (40)")
    parser.add_argument("--seed", type=int, default=0, help="seed of documents and questions (0)")
    parser.add_argument(
        "--forget",
        action="store_true",
        help="empty vLLM's own prefix cache before each turn, as other traffic would",
    )
    args = parser.parse_args()
    if "@" in args.url:
        parser.error("leave user and password out of the address")
    return args


if __name__ == "__main__":
    main()
