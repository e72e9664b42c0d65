"""A long prompt served cold, from CPU memory, and by another process.

    make demo                        three questions about a document, to a small trained model
    make demo ARGS=--tiny            random prompts, to a tiny random model
    make demo ARGS="--document FILE"

Starts a real Valkey server and two vLLM instances, one after the other. Ends with a table and, as
its last line, one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from examples.demo.document import ask_about
from examples.demo.outcome import Outcome
from examples.demo.random_prompts import serve_random_prompts
from tests.support import ROOT
from tests.support.engines.instance import InstanceError

DOCUMENT = ROOT / "docs/security.md"
TRAINED_MODEL = ROOT / ".cache/models/smollm2-135m-instruct"


def main() -> int:
    args = _arguments()
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="lmcache-connector-demo-") as folder:
        try:
            outcome = _run(args, Path(folder), console)
        except (InstanceError, OSError, ValueError) as error:
            console.print(str(error), markup=False, style="red")
            return 1
    Console().print(outcome.table())
    for tier, way in (("the CPU tier", outcome.cpu), ("Valkey", outcome.redis)):
        if not way.hit_tokens:
            console.print(
                f"No KV came from {tier}, so there are no bytes to compare: a very busy "
                "machine computes KV that it cannot load in time. Run the demo again.",
                style="yellow",
            )
    print(json.dumps(outcome.as_json()), flush=True)
    return 0


def _run(args: argparse.Namespace, folder: Path, console: Console) -> Outcome:
    if not args.tiny and not args.model.is_dir():
        console.print(f"There is no trained model in {args.model}: this is the quick demo")
        args.tiny = True
    if args.tiny:
        return serve_random_prompts(folder, args.prompt_tokens, args.rounds, console)
    return ask_about(args.document, args.model, folder, console)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make demo ARGS=...",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--document", type=Path, default=DOCUMENT, help="text to ask about")
    parser.add_argument("--model", type=Path, default=TRAINED_MODEL, help="folder of a model")
    parser.add_argument("--tiny", action="store_true", help="a tiny random model: quick")
    parser.add_argument(
        "--prompt-tokens", type=int, default=6200, help="length of each random prompt"
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="number of random prompts to take medians over"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
