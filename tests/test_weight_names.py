"""The name of an engine's weights, for any history of its ranks' memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_connector.plans import WeightsInMemory
from lmcache_connector.weight_names import WeightFiles, WeightNames


@dataclass(frozen=True)
class Files(WeightFiles):
    name: str = "sha256:files"
    changed: Path | None = None

    def changed_since(self, seconds: float) -> Path | None:
        return self.changed


@dataclass
class Engine:
    """An engine whose ranks answer in turn."""

    files: Files = field(default_factory=Files)
    kept: dict[str, str] = field(default_factory=dict)
    label: str = ""
    world_size: int = 2
    is_visible: bool = True
    form: str = "plain"
    now: float = 0.0

    def __post_init__(self) -> None:
        self.names = WeightNames(
            self.world_size,
            self.files,
            self.kept,
            self.kept.update,
            lambda: self.label,
            lambda: self.now,
        )
        self.version = 0

    def answer(self, weights: str, first: str | None = "one") -> str:
        """All ranks report ``weights``. Returns their name."""
        question = self.names.take_question()
        assert not self.names.name
        for rank in range(self.world_size):
            told = WeightsInMemory(
                self.version,
                question or self.names._num_questions,
                f"{weights} of rank {rank}",
                None if first is None else f"{first} of rank {rank}",
                self.is_visible,
                self.form,
            )
            self.names.learn(rank, told)
            self.names.settle("configuration")
        return self.names.name

    def reset(self, weights: str, *, is_external: bool = False) -> str:
        self.names.reset(is_external=is_external)
        assert not self.names.name
        return self.answer(weights)


def test_files_name_the_weights_at_start() -> None:
    assert Engine().answer("one") == "sha256:files"


def test_ranks_that_do_not_answer_are_asked_again() -> None:
    engine = Engine()
    engine.answer("one")
    engine.names.reset(is_external=False)
    question = engine.names.take_question()
    for seconds, asks_again in ((9.0, False), (1.0, True), (9.0, False), (1.0, True)):
        engine.now += seconds
        engine.names.ask_again()
        assert engine.names.take_asks_again() == asks_again
        assert engine.names.take_question() == question * asks_again
    assert engine.answer("one") == "sha256:files"


def test_equal_bytes_keep_their_name_and_other_bytes_get_their_own() -> None:
    engine, twin = Engine(), Engine()
    for each in (engine, twin):
        each.answer("one")
        assert each.reset("one") == "sha256:files"
        assert each.reset("two").startswith("memory:")
    assert engine.names.name == twin.names.name
    assert engine.reset("three") != twin.names.name
    assert engine.reset("one") == "sha256:files"


def test_weights_changed_before_their_first_read_are_not_named_by_files() -> None:
    assert Engine().answer("two", first=None).startswith("memory:")
    engine = Engine()
    assert engine.answer("two", first="one").startswith("memory:")
    assert engine.reset("one") == "sha256:files"


def test_changed_files_name_nothing(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(files=Files(changed=Path("/model")))
    assert engine.answer("one").startswith("memory:")
    assert not engine.kept
    assert "KV is shared only with instances of the same memory:... name" in caplog.text


def test_changed_files_name_bytes_of_an_earlier_start() -> None:
    """In a busy folder, a second start need not wait for a quiet moment."""
    kept: dict[str, str] = {}
    Engine(kept=kept).answer("one")
    changed = Files(changed=Path("/model"))
    assert Engine(files=changed, kept=kept).answer("one") == "sha256:files"
    assert Engine(files=changed, kept=kept).answer("two", first="two").startswith("memory:")


def test_changed_code_names_nothing_whatever_the_bytes() -> None:
    """The weights in memory are the same, and other code computes with them."""
    kept: dict[str, str] = {}
    code = (Path("/model/model.safetensors"), Path("/model/modeling.py"))
    assert Engine(files=Files(files=code), kept=kept).answer("one") == "sha256:files"
    changed = Files(files=code, changed=code[1])
    assert Engine(files=changed, kept=kept).answer("one").startswith("memory:")
    assert Engine(files=Files(files=code), kept=kept).answer("one") == "sha256:files"


def test_updated_weights_are_named_with_the_code_that_computes_with_them() -> None:
    names = set()
    for name, file in [("one", "model.py"), ("two", "model.py"), ("one", "a"), ("two", "a")]:
        engine = Engine(files=Files(name=f"sha256:{name}", files=(Path(file),)))
        engine.answer("one")
        names.add(engine.reset("two"))
    assert len(names) == 3, "without code, equal bytes are equal weights"


def test_memory_that_differs_from_its_files_has_its_own_name() -> None:
    kept: dict[str, str] = {}
    assert Engine(kept=kept).answer("one") == "sha256:files"
    other = Engine(kept=kept)
    assert other.answer("two", first="two").startswith("memory:")
    assert Engine(kept=kept).answer("one") == "sha256:files"


def test_forms_of_memory_are_kept_apart() -> None:
    """With LoRA, weights of the same files have other names in memory."""
    kept: dict[str, str] = {}
    for form in ("plain", "with adapters"):
        for _ in range(2):
            assert Engine(kept=kept, form=form).answer(form, first=form) == "sha256:files"
    assert Engine(kept=kept).answer("two", first="two").startswith("memory:")


def test_unreadable_weights_get_a_new_name_after_each_reset(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = Engine(is_visible=False)
    assert engine.answer("unseen 1", first="unseen 1") == "sha256:files"
    assert not engine.kept
    names = {engine.reset(f"unseen {n}") for n in range(2, 4)}
    assert len(names) == 2
    assert "sha256:files" not in names
    assert "cannot be read: KV is shared with no other instance" in caplog.text


def test_a_new_label_names_weights_changed_since_the_last_external_reset() -> None:
    engine = Engine(label="of an earlier run")
    assert engine.answer("one") == "sha256:files"
    engine.label = "step 1"
    assert engine.reset("one", is_external=True) == "sha256:files", "a pause before the update"
    labelled = engine.reset("two", is_external=True)
    assert labelled.startswith("label:")
    engine.label = "step 2"
    assert engine.reset("two", is_external=True) == labelled, "equal bytes keep their name"
    assert engine.reset("three", is_external=True) not in (labelled, "sha256:files")
    assert engine.names.name.startswith("label:")
    assert engine.reset("four", is_external=True).startswith("memory:"), "an old label"


def test_a_label_is_read_at_external_resets_only() -> None:
    engine = Engine()
    engine.answer("one")
    engine.label = "step 1"
    assert engine.reset("two").startswith("memory:")
    assert engine.reset("two", is_external=True).startswith("label:")


def test_engines_of_other_sizes_share_by_label_alone() -> None:
    names = set()
    for world_size in (1, 2, 4):
        engine = Engine(world_size=world_size)
        engine.answer("one")
        engine.label = "step 1"
        names.add(engine.reset("two", is_external=True))
    assert len(names) == 1


def test_a_call_that_may_change_weights_ends_their_name_until_read() -> None:
    engine = Engine()
    engine.answer("one")
    assert engine.names.learn(0, WeightsInMemory(2, 0, None, None))
    assert not engine.names.settle("configuration")
    engine.version = 2
    assert engine.answer("one") == "sha256:files"
    engine.names.learn(1, WeightsInMemory(4, 0, "two of rank 1"))
    assert not engine.names.name, "the call ends the name, although a digest comes with it"


def test_a_request_waits_one_second_however_often_weights_change() -> None:
    engine = Engine()
    engine.answer("one")
    waited = 0
    engine.names.reset(is_external=False)
    while engine.names.is_awaited():
        engine.names.reset(is_external=False)
        engine.now += 0.25
        waited += 1
    assert waited == 4
    engine.answer("two")
    engine.names.reset(is_external=False)
    assert engine.names.is_awaited()


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.integers(0, 2))))
def test_one_name_never_has_two_contents(history: list[tuple[int, bool, int]]) -> None:
    """Each label belongs to one content here."""
    engine, contents = Engine(), {"sha256:files": "0"}
    engine.answer("0", first="0")
    for weights, is_external, label in history:
        engine.label = f"{weights} {label}"
        name = engine.reset(str(weights), is_external=is_external)
        assert contents.setdefault(name, str(weights)) == str(weights)
