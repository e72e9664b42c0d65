"""Offline inference with the connector: one long prompt, computed once, then loaded.

    python examples/offline.py MODEL
    python examples/offline.py MODEL --redis-url redis://localhost:6379   # run it twice

Between the two requests vLLM's own prefix cache is reset, so the second one's cached tokens come
from the connector. With a Redis, a second run of this program loads the first run's chunks.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm import LLM


def main() -> None:
    args = parse_args()
    from vllm import LLM, SamplingParams  # takes seconds: not for --help

    extra_config = {"cpu_gib": args.cpu_gib}
    if args.redis_url:
        extra_config["redis_url"] = args.redis_url
    llm = LLM(
        model=args.model,
        max_model_len=args.max_model_len,
        kv_cache_memory_bytes=int(args.kv_cache_gib * 2**30),
        enforce_eager=True,
        kv_transfer_config={
            "kv_connector": "LMCacheTieredConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra_config,
        },
    )
    prompt = " ".join(f"w{number % 997 + 2}" for number in range(args.words))
    for name in ("first", "again"):
        started = time.perf_counter()
        (output,) = llm.generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False)
        seconds = time.perf_counter() - started
        num_prompt, num_cached = len(output.prompt_token_ids), output.num_cached_tokens
        print(f"{name}: {num_cached} of {num_prompt} prompt tokens cached, {seconds:.3f} s")
        forget(llm)


def forget(llm: LLM) -> None:
    """Reset vLLM's own prefix cache, once the connector has copied the last blocks."""
    for _ in range(100):
        if llm.reset_prefix_cache():
            return
        time.sleep(0.1)
    raise SystemExit("vLLM did not empty its prefix cache within 10 s.")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="name or folder of a model")
    parser.add_argument("--cpu-gib", type=float, default=8.0, help="CPU tier, GiB (8)")
    parser.add_argument("--redis-url", help="share through this Redis or Valkey (none)")
    parser.add_argument("--words", type=int, default=3000, help="words of the prompt (3000)")
    parser.add_argument("--max-model-len", type=int, default=16384, help="tokens (16384)")
    parser.add_argument("--kv-cache-gib", type=float, default=2.0, help="vLLM's KV cache, GiB (2)")
    return parser.parse_args()


if __name__ == "__main__":  # vLLM starts processes that import this file
    main()
