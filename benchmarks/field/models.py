"""The two models for other people's tools, and the load of each."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

from benchmarks.field.tool import Load
from examples.tiny_model import DEMO_SHAPE, build_tiny_model
from tests.support import ROOT

TRAINED_MODEL = ROOT / ".cache" / "models" / "smollm2-135m-instruct"
LOADS = {
    "trained": Load(
        paged_tokens=4096,
        max_model_len=3072,
        context_tokens=1024,
        num_contexts=10,
        trace_scale=16,
    ),
    "tiny": Load(
        paged_tokens=16384,
        max_model_len=8192,
        context_tokens=4096,
        num_contexts=10,
        trace_scale=4,
    ),
}
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def model_folder(name: str, scratch: Path) -> Path:
    """The trained model, or a random one of the tests' shape in ``scratch``.

    The tests' tokenizer maps all English words to one token, so the random model has the trained
    one's tokenizer. Raises ``SystemExit`` without it.
    """
    if not TRAINED_MODEL.is_dir():
        raise SystemExit(f"there is no trained model in {TRAINED_MODEL}: make field unpacks it")
    if name == "trained":
        return TRAINED_MODEL
    vocab_size = json.loads((TRAINED_MODEL / "config.json").read_text())["vocab_size"]
    folder = build_tiny_model(scratch / name, replace(DEMO_SHAPE, vocab_size=vocab_size))
    for file in _TOKENIZER:
        shutil.copy(TRAINED_MODEL / file, folder)
    return folder
