"""Other people's tools, run on vLLM with no connector, this one, and LMCache's own."""

from benchmarks.field.benchmark import add_arguments, run

__all__ = ["add_arguments", "run"]
