"""Hugging Face transformers with the connector's tiers: one long document, two processes.

    python examples/transformers_generate.py MODEL
    python examples/transformers_generate.py MODEL --redis-url redis://localhost:6379

Each prompt is the document and a short question. The second one loads the document's KV from the
CPU tier. With a Redis, another process asks a third question and loads the KV from there. vLLM is
not needed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from typing import Any

QUESTIONS = {
    "first": "What is it about?",
    "second": "Who is it for?",
    "elsewhere": "What is missing?",
}


def main() -> None:
    args = parse_args()
    import torch  # takes seconds: not for --help
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from lmcache_connector.transformers import KVTiers

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    config: dict[str, Any] = {"cpu_gib": args.cpu_gib, "compute_or_load": args.compute_or_load}
    if args.redis_url:
        config["redis_url"] = args.redis_url
    document = " ".join(f"w{number % 997 + 2}" for number in range(args.words))
    with KVTiers(model, config) as tiers:
        for name in ("elsewhere",) if args.elsewhere else ("first", "second"):
            inputs = tokenizer(f"{document} {QUESTIONS[name]}", return_tensors="pt")
            before, started = tiers.counts, time.perf_counter()
            model.generate(
                input_ids=inputs.input_ids,
                attention_mask=inputs.attention_mask,
                past_key_values=tiers.new_cache(),
                max_new_tokens=8,
                do_sample=False,
            )
            seconds = time.perf_counter() - started
            hit_tokens = tiers.counts.hit_tokens - before.hit_tokens
            number = inputs.input_ids.shape[1]
            print(f"{name}: {hit_tokens} of {number} prompt tokens restored, {seconds:.3f} s")
            sys.stdout.flush()
    if args.redis_url and not args.elsewhere:
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--elsewhere"], check=True)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="name or folder of a model")
    parser.add_argument("--cpu-gib", type=float, default=8.0, help="CPU tier, GiB (8)")
    parser.add_argument("--redis-url", help="share through this Redis or Valkey (none)")
    parser.add_argument("--words", type=int, default=3000, help="words of the document (3000)")
    parser.add_argument(
        "--compute-or-load", default="auto", help="auto: load if that is quicker; or always (auto)"
    )
    parser.add_argument("--elsewhere", action="store_true", help="ask the third question only")
    return parser.parse_args()


if __name__ == "__main__":
    main()
