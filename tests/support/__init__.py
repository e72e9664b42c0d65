"""What tests, benchmarks and the demo share: servers, engines, prompts, byte digests."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The repository."""
