"""Load prompts from a file into the cache of a running engine, before users send them.

    python examples/warm.py prompts.txt http://localhost:8000
    python examples/warm.py prompts.jsonl http://localhost:8000 --api-key "$KEY"

Each prompt is sent for one token: the engine loads what its tiers have, and computes and stores the
rest. A file has a text per line; a ``*.jsonl`` file a JSON object with ``prompt`` or ``messages``
per line, as the engine's API takes them, with ``cache_salt`` or ``kv_transfer_params`` if wanted.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from typing import Any

_FIXED = {"max_tokens": 1, "stream": False, "n": 1}
# Dropped from a prompt's settings: they set the length or extras of an answer.
_OF_THE_ANSWER = (
    *("max_completion_tokens", "min_tokens", "stream_options"),
    *("logprobs", "top_logprobs", "prompt_logprobs", "echo"),
)
_FAILURES = (OSError, HTTPException, ValueError, LookupError, TypeError)


def main() -> None:
    args = parse_args()
    lines = list(prompts(args.file))
    if not lines:
        sys.exit(f"{args.file} has no prompts")
    try:
        sys.exit(1 if warm(args, lines) else 0)
    except _FAILURES as error:
        is_told = isinstance(error, OSError | HTTPException)
        reason = error if is_told else "this is no answer of vLLM's API"
        sys.exit(f"{args.url}: {reason}\nIs the server up, and are its address and key right?")


def warm(args: argparse.Namespace, lines: list[dict[str, Any]]) -> int:
    """How many prompts failed."""
    model = json.loads(get(f"{args.url}/v1/models", args.api_key))["data"][0]["id"]
    loaded_before, num_tokens, failed = loaded_tokens(args.url), 0, 0

    def ask(line: dict[str, Any]) -> int | str:
        """Prompt tokens, or the error."""
        asked = {name: value for name, value in line.items() if name not in _OF_THE_ANSWER}
        endpoint = "chat/completions" if "messages" in line else "completions"
        body = json.dumps({"model": model, "temperature": 0, **asked, **_FIXED}).encode()
        try:
            answer = get(f"{args.url}/v1/{endpoint}", args.api_key, body, args.timeout)
            return int(json.loads(answer)["usage"]["prompt_tokens"])
        except urllib.error.HTTPError as error:
            return f"{error.code} {error.read(500).decode(errors='replace')}"
        except _FAILURES as error:
            return repr(error)

    with ThreadPoolExecutor(args.concurrency) as pool:
        for number, outcome in enumerate(pool.map(ask, lines), start=1):
            if isinstance(outcome, int):
                num_tokens += outcome
            else:
                failed += 1
                print(f"prompt {number}: {outcome}", file=sys.stderr)
    loaded = loaded_tokens(args.url) - loaded_before
    print(f"{num_tokens} prompt tokens, of which the connector loaded {loaded}; {failed} failed")
    return failed


def prompts(file: Path) -> Iterator[dict[str, Any]]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        sys.exit(f"cannot read {file}: {reason}")
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                prompt = json.loads(line) if file.suffix == ".jsonl" else {"prompt": line}
            except ValueError:
                prompt = None
            if not isinstance(prompt, dict):
                sys.exit(f"{file}: line {number} is not a JSON object")
            yield prompt


def loaded_tokens(url: str) -> int:
    """Prompt tokens that the connector has loaded so far, also for other clients."""
    text = get(f"{url}/metrics")
    found = re.findall(r"^vllm:lmcache_prefill_saved_tokens_total\{.*\} (\S+)$", text, re.M)
    return int(sum(map(float, found)))


def get(url: str, api_key: str = "", body: bytes | None = None, timeout: float = 10.0) -> str:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {api_key}"}
    request = urllib.request.Request(url, body, headers)
    with urllib.request.urlopen(request, timeout=timeout) as response:
        text: str = response.read().decode()
        return text


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="a prompt per line; JSON in *.jsonl")
    parser.add_argument("url", help="address of the engine's API, http://HOST:PORT")
    parser.add_argument(
        "--concurrency", type=int, default=4, help="number of prompts in flight (4)"
    )
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds per prompt (600)")
    parser.add_argument("--api-key", default="", help="key of the engine's API (none)")
    args = parser.parse_args()
    if args.concurrency < 1:
        parser.error("--concurrency must be at least 1")
    if "@" in args.url:
        parser.error("leave user and password out of the address")
    args.url = ("" if "://" in args.url else "http://") + args.url.rstrip("/")
    return args


if __name__ == "__main__":
    main()
