"""The demo with a trained model: three questions about one document.

Each question is asked once: after a hit vLLM computes the last tokens in other batches, whose
rounding differs, so that two almost equally likely words may change places. The bytes of the
document's KV must be equal, and are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from examples.demo.outcome import Outcome, Way
from examples.demo.stage import Stage, served_by, stage
from tests.support.engines.instance import VllmInstance
from tests.support.engines.probe import EngineProbe, Served

QUESTIONS = (
    "What is this document about?",
    "What should an operator do to keep Redis safe?",
    "What is the purpose of the hash key?",
)
_ASK = "Read this document.\n\n{}\n\nIn one or two sentences: {}"
_MAX_ANSWER_TOKENS = 60
_CPU_GIB = 1


@dataclass(frozen=True)
class Reader:
    """Makes prompts of a document, and text of tokens. ``tokenizer``: transformers'."""

    tokenizer: Any
    document: str

    def prompt(self, question: str) -> list[int]:
        message = {"role": "user", "content": _ASK.format(self.document, question)}
        text = self.tokenizer.apply_chat_template(
            [message], tokenize=False, add_generation_prompt=True
        )
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def text(self, token_ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        return text.rstrip("\N{REPLACEMENT CHARACTER}")  # half a character


def ask_about(document: Path, model: Path, folder: Path, console: Console) -> Outcome:
    """Ask all questions about the text file ``document``.

    Raises ``InstanceError``, and ``ValueError`` for a document that is too long for the model.
    """
    from transformers import AutoConfig, AutoTokenizer

    reader = Reader(AutoTokenizer.from_pretrained(model), document.read_text())
    prompts = [reader.prompt(question) for question in QUESTIONS]
    length = AutoConfig.from_pretrained(model).max_position_embeddings
    needed = max(map(len, prompts)) + _MAX_ANSWER_TOKENS
    if needed > length:
        raise ValueError(
            f"{document} needs {needed} tokens, and the model reads {length}: choose a shorter one"
        )
    console.print(f"The document: {document.name}, {len(prompts[0])} tokens with a question")
    with stage(model, folder, console, cpu_gib=_CPU_GIB, max_model_len=length) as on:
        return _three_ways(on, reader, prompts)


def _three_ways(on: Stage, reader: Reader, prompts: list[list[int]]) -> Outcome:
    about, operator, readers = zip(QUESTIONS, prompts, strict=True)
    with on.instance("A") as a:
        cold = _ask(on.console, reader, a, *about, "computed")
        a.reset_prefix_cache()
        cpu = _ask(on.console, reader, a, *operator, "document from the CPU tier")
    with on.instance("B") as b:
        redis = _ask(on.console, reader, b, *readers, "document from Valkey")
    size = len(about[1]) // len(cold.served[0].block_digests)
    equal = all(way.same_bytes_as(cold.served, size) for way in (cpu, redis))
    return Outcome(min(map(len, prompts)), cold, cpu, redis, kv_bytes_equal=equal)


def _ask(
    console: Console,
    reader: Reader,
    instance: VllmInstance,
    question: str,
    prompt: list[int],
    source: str,
) -> Way:
    """Print the answer as it is generated."""
    console.print(f"\n[bold]{question}[/bold]")
    shown = ""

    def show(token_ids: tuple[int, ...]) -> None:
        nonlocal shown
        text = reader.text(token_ids)
        if text.startswith(shown):
            console.print(text[len(shown) :], end="", markup=False, highlight=False, soft_wrap=True)
            shown = text

    def ask() -> tuple[Served, ...]:
        return (instance.listen(show, EngineProbe.answer, prompt, _MAX_ANSWER_TOKENS),)

    way = served_by(instance, ask)
    console.print(f"\n[dim]{source}: first token after {way.ttft_seconds:.2f} s[/dim]")
    return way
