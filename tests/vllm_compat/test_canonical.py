"""One form for the same content, in every process; an error for what has none."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import threading
from collections import OrderedDict, deque
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel, ConfigDict
from transformers import LlamaConfig
from vllm.model_executor.layers.quantization import get_quantization_config

from lmcache_connector.errors import UnsupportedError
from lmcache_connector.keys.prefix_hash import canonical_bytes
from lmcache_connector.vllm_compat.canonical import canonical


def form(value: object, *excused: str) -> bytes:
    return canonical_bytes(canonical(value, "value", lambda owner, name: name in excused))


class Color(Enum):
    RED = 1
    BLUE = 2


@dataclass
class Point:
    x: Any
    y: Any = 0


@dataclass(slots=True)
class Slotted:
    x: Any


class Plain:
    def __init__(self, x: Any) -> None:
        self.x = x

    @functools.cached_property
    def derived(self) -> int:
        return 7


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    x: Any = None


DIFFERENT = [
    None, True, False, 0, 1, 2, 0.5, float("nan"), float("inf"), "", "1", "None", b"", b"1",
    [], [1], [[1]], {}, {"a": 1}, {"a": 2}, {1: "a"}, {1: "b"}, set(), {1}, frozenset({1, 2}),
    set("abcdef"),
    Color.RED, Color.BLUE, torch.bfloat16, torch.float16, Path("/a"), re.compile("a"),
    re.compile("a", re.IGNORECASE), int, float, json.dumps, os.getcwd,
    functools.partial(json.dumps, indent=1), functools.partial(json.dumps, indent=2),
    Point(1), Point(2), Point(Point(1)), Slotted(1), Slotted(2), Plain(1), Plain(2),
    Open(x=1), Open(**{"x": 1, "more": 2}),
    LlamaConfig(hidden_size=64), LlamaConfig(hidden_size=128),
]  # fmt: skip


def test_different_values_have_different_forms() -> None:
    forms = [form(value) for value in DIFFERENT]
    assert len(set(forms)) == len(forms)


def test_the_order_of_sets_and_keys_and_the_kind_of_sequence_do_not_count() -> None:
    assert form({"b", "a", "c"}) == form({"c", "b", "a"})
    assert form({"a": 1, "b": 2}) == form(OrderedDict(b=2, a=1))
    assert form({1: 1, "b": 2}) == form({"b": 2, 1: 1})
    assert form((1, 2)) == form([1, 2])


def test_ignored_fields_are_left_out() -> None:
    assert form(Point(1, 2), "y") == form(Point(1, 3), "y")
    assert form({"y": 1}, "y") != form({"y": 2}, "y"), "keys of a mapping are no fields"


def deep(depth: int) -> Any:
    return [deep(depth - 1)] if depth else 0


NAMELESS = [
    object(),
    lambda: 0,
    threading.Lock(),
    (letter for letter in "a"),
    torch.zeros(1),
    torch.nn.Linear(1, 1),
    sys,
    Plain(1).__repr__,
    deque([1]),
    deep(100),
    iter([]),
]


@pytest.mark.parametrize("value", NAMELESS, ids=lambda value: type(value).__name__)
def test_what_has_no_form_is_an_error_that_names_it(value: object) -> None:
    with pytest.raises(UnsupportedError, match=r"cannot tell models apart by value\.a\.x"):
        form({"a": Point(value)})


def test_a_form_is_the_same_in_every_process() -> None:
    program = (
        "from tests.vllm_compat.test_canonical import DIFFERENT, form; import sys;"
        "sys.stdout.buffer.write(b'\\n'.join(map(form, DIFFERENT)))"
    )
    elsewhere = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONHASHSEED": "1"},
        capture_output=True,
        check=True,
    )
    assert elsewhere.stdout.endswith(b"\n".join(map(form, DIFFERENT)))


QUANTIZED: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "awq": {"quant_method": "awq", "w_bit": 4, "q_group_size": 128, "zero_point": True},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True},
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
                "input_activations": {
                    "num_bits": 8, "type": "float", "strategy": "token", "dynamic": True,
                },
            }
        },
    },
    "inc": {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True},
    "modelopt": {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}},
}  # fmt: skip


@pytest.mark.parametrize("method", QUANTIZED)
def test_quantizations_have_a_form(method: str) -> None:
    kind = get_quantization_config(method)
    one, same = (kind.from_config(json.loads(json.dumps(QUANTIZED[method]))) for _ in range(2))
    assert form(one) == form(same)
    assert b"0x" not in form(one)
