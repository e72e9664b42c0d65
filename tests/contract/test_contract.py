"""`make contract` finds each difference of a changed vLLM."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path

from tests.contract.__main__ import faults, link_others

_BASE = "distributed/kv_transfer/kv_connector/v1/base.py"
_CHANGES = (
    ("v1/request.py", "class RequestStatus", "class RequestState"),
    (_BASE, "def take_events(self)", "def take_events(self, how: int)"),
    ("config/parallel.py", "    pipeline_parallel_size: int", "    pipeline_size: int"),
)


def test_each_difference_is_found(tmp_path: Path) -> None:
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    vllm, other = Path(spec.origin).parent, tmp_path / "other" / "vllm"
    python = [path.relative_to(vllm) for path in vllm.rglob("*.py")]
    for path in python:
        (other / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(vllm / path, other / path)
    for name, old, new in _CHANGES:
        text = (other / name).read_text()
        assert old in text, name
        (other / name).write_text(text.replace(old, new))
    known = faults(link_others(tmp_path / "installed"))
    found = "\n".join(faults(link_others(other.parent)) - known)
    assert 'has no attribute "RequestStatus"' in found
    assert 'Signature of "take_events" incompatible with supertype' in found
    assert 'has no attribute "pipeline_parallel_size"' in found
