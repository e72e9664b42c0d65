"""The weights an engine loads are named by the files that vLLM's loaders read."""

from __future__ import annotations

import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import vllm
from vllm.model_executor.models import ModelRegistry

from lmcache_connector.vllm_compat import weights as weights_module
from lmcache_connector.vllm_compat.weights import weights_identity
from lmcache_connector.weight_names import WeightFiles
from tests.support.vllm_configs import vllm_config


@pytest.fixture
def folder(model: Path, tmp_path: Path) -> Path:
    """A model of its own for a test to change."""
    return Path(shutil.copytree(model, tmp_path / "model"))


def identity(folder: Path, load_format: str = "auto", **model: Any) -> str:
    config = vllm_config(folder)
    config.load_config.load_format = load_format
    for name, value in model.items():
        setattr(config.model_config, name, value)
    return weights_identity(config, "full", folder.parent / "kept").name


def test_each_format_counts_the_files_it_reads(folder: Path) -> None:
    for name in ("model.bin", "model.pt"):
        (folder / name).write_bytes(b"one")
    formats = ("auto", "safetensors", "pt")
    before = {each: identity(folder, each) for each in formats}
    (folder / "model.pt").write_bytes(b"two")
    assert [identity(folder, each) != before[each] for each in formats] == [False, False, True]
    (folder / "model.bin").write_bytes(b"two")
    assert identity(folder) == before["auto"]


@pytest.mark.parametrize("load_format", ["npcache", "tensorizer", "ipc_cache", "of_a_plugin"])
def test_what_is_read_from_elsewhere_is_not_named_by_the_folder(
    folder: Path, caplog: pytest.LogCaptureFixture, load_format: str
) -> None:
    """``npcache`` reads the copy that it made at its first start, whatever the files hold now."""
    with caplog.at_level(logging.WARNING):
        assert identity(folder, load_format) == f"remote:{folder}@None"
    assert "by name and revision alone" in caplog.text


def test_files_beside_the_weights_count(folder: Path) -> None:
    before = identity(folder)
    (folder / "hf_quant_config.json").write_text("{}")
    assert identity(folder) != before


def test_code_of_the_model_counts_once_it_is_trusted(folder: Path) -> None:
    (folder / "layers").mkdir()
    code = folder / "layers" / "norm.py"
    code.write_text("EPSILON = 1")
    plain, trusted = identity(folder), identity(folder, trust_remote_code=True)
    code.write_text("EPSILON = 2")
    assert identity(folder) == plain
    assert identity(folder, trust_remote_code=True) != trusted


def test_the_branch_counts_in_the_download_folder(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "hub" / "models--some--model"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("abc")
    shutil.copytree(folder, cache / "snapshots" / "abc")
    config = vllm_config(folder)
    config.model_config.model = "some/model"
    config.load_config.download_dir = str(cache.parent)
    files = weights_identity(config, "full", tmp_path / "kept").files
    assert cache / "refs" / "main" in files


def test_code_of_another_model_counts(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "modeling.py").write_text("one")
    config = vllm_config(folder)
    config.model_config.trust_remote_code = True
    config.model_config.hf_config.auto_map = {
        "AutoModel": f"{other}--modeling.Model",
        "AutoTokenizer": ["tokenization.Slow", None],
    }
    found = set()
    for content in ("one", "two"):
        (other / "modeling.py").write_text(content)
        found.add(weights_identity(config, "full", tmp_path / "kept"))
    assert len(found) == 2


def test_models_a_model_is_made_of_count(folder: Path, model: Path, tmp_path: Path) -> None:
    config = vllm_config(folder)
    tower = Path(shutil.copytree(model, tmp_path / "tower"))
    config.model_config.hf_config.text_model_id = str(tower)
    before = weights_identity(config, "full", tmp_path / "kept")
    (weights,) = tower.glob("*.safetensors")
    weights.write_bytes(b"trained on")
    assert weights_identity(config, "full", tmp_path / "kept") != before
    config.model_config.hf_config.text_model_id = "nobody/has-this"
    assert weights_identity(config, "full", tmp_path / "kept").name.startswith("remote:")


def test_weights_in_subfolders_count_where_a_model_has_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (weights,) = folder.glob("*.safetensors")
    architecture = vllm_config(folder).model_config.architecture
    for architectures in (frozenset[str](), frozenset({architecture})):
        monkeypatch.setattr(weights_module, "WEIGHTS_IN_SUBFOLDERS", architectures)
        before = identity(folder)
        (folder / f"part-{len(architectures)}").mkdir()
        shutil.copy(weights, folder / f"part-{len(architectures)}")
        assert (identity(folder) != before) is bool(architectures)


def test_a_file_of_scales_counts(folder: Path, tmp_path: Path) -> None:
    scales = tmp_path / "scales.json"

    class Multimodal:
        mm_encoder_fp8_scale_path = str(scales)

    found = set()
    for content in ("1", "2"):
        scales.write_text(content)
        found.add(identity(folder, multimodal_config=Multimodal()))
    assert len(found) == 2


def test_a_file_that_says_how_to_quantize_counts(folder: Path, tmp_path: Path) -> None:
    """vLLM's configuration holds its path alone."""
    file = tmp_path / "torchao.json"
    found = set()
    for content in ("1", "2"):
        file.write_text(content)
        found.add(identity(folder, hf_overrides={"quantization_config_file": str(file)}))
    assert len(found) == 2


# -- what vLLM's models read beside their folder's weights ----------------------------------------

READS = re.compile(
    r"secondary_weights|allow_patterns_overrides|subfolder|load_file|torch\.load\(|safe_open"
    r"|get_hf_file_|hf_hub_download|snapshot_download"
)
READ = {
    "adapters.py": "a projector of pooling models",
    "clef_omni.py": "a pooling model, from the same folder",
    "cosmos3.py": "WEIGHTS_IN_SUBFOLDERS",
    "cosmos3_edge.py": "WEIGHTS_IN_SUBFOLDERS",
    "dots3_note/common/processor.py": "JSON of a processor, whose output identifies requests",
    "dots3_note/nvidia/multimodal.py": "a placeholder's token, and what config.json says of towers",
    "funaudiochat.py": "a processor, whose output identifies requests",
    "jina.py": "pooling models",
    "kimi_audio.py": "WEIGHTS_IN_SUBFOLDERS",
    "llava_onevision2.py": "a processor, whose output identifies requests",
    "mimo_audio.py": "WEIGHTS_IN_SUBFOLDERS, as a part of mimo_v2_omni",
    "moss_audio.py": "JSON of a processor, whose output identifies requests",
    "nemotron_vl.py": "JSON of a pooling model's processor",
    "qwen3_dflash.py": "a drafter",
    "roberta.py": "pooling models",
    "ultravox.py": "WEIGHTS_OF_OTHERS",
}
"""Checked by hand: what each reads, or the table that covers it."""


def test_models_that_read_more_than_their_folders_weights_are_known() -> None:
    root = Path(vllm.__path__[0])
    files = [*root.glob("model_executor/models/**/*.py"), *root.glob("models/**/*.py")]
    modules = {".".join(file.relative_to(root.parent).with_suffix("").parts) for file in files}
    modules |= {name.removesuffix(".__init__") for name in modules}
    assert {model.module_name for model in ModelRegistry.models.values()} <= modules
    reading = {str(file) for file in files if READS.search(file.read_text())}
    assert set() != {name.rpartition("/models/")[2] for name in reading} <= READ.keys()


# -- files that change while they are loaded -------------------------------------------------------


@dataclass(frozen=True)
class Scene:
    """A checkpoint behind a link to one of two folders: latest -> snapshots/1."""

    latest: Path
    snapshots: Path
    folder: Path

    @property
    def files(self) -> WeightFiles:
        return WeightFiles("sha256:files", (self.latest / "model.safetensors",))


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    models = tmp_path / "disk" / "models"
    snapshots, latest = models / "snapshots", models / "latest"
    for step in ("1", "2"):
        (snapshots / step).mkdir(parents=True)
        (snapshots / step / "model.safetensors").write_bytes(b"weights of " + step.encode())
    latest.symlink_to(snapshots / "1")
    return Scene(latest, snapshots, snapshots / "1")


def tick() -> None:
    """Wait until new files get a later time than files written before."""
    with tempfile.TemporaryFile(buffering=0) as file:
        before = os.fstat(file.fileno()).st_ctime_ns
        while os.fstat(file.fileno()).st_ctime_ns == before:
            file.write(b"x")


def later() -> float:
    """A time after all that was written by now, and before what is written next."""
    tick()
    now = time.time()
    tick()
    return now


def link_to(scene: Scene, step: str) -> None:
    moved = scene.latest.with_name("moved")
    moved.symlink_to(scene.snapshots / step)
    moved.replace(scene.latest)


def replace_file(scene: Scene) -> None:
    arriving = scene.folder / "arriving"
    arriving.write_bytes(b"other weights")
    arriving.replace(scene.folder / "model.safetensors")


def swap_folders(scene: Scene) -> None:
    scene.folder.rename(scene.snapshots / "old")
    (scene.snapshots / "2").rename(scene.folder)


def swap_folders_above(scene: Scene) -> None:
    """As a trainer does that makes its output anew."""
    old = scene.snapshots.with_name("old")
    scene.snapshots.rename(old)
    shutil.copytree(old, scene.snapshots)
    for file in scene.folder.iterdir():  # whatever the times of its files were set to
        file.unlink()
        (old / "1" / file.name).rename(file)


def swap_folders_and_back(scene: Scene) -> None:
    swap_folders(scene)
    scene.folder.rename(scene.snapshots / "2")
    (scene.snapshots / "old").rename(scene.folder)


def make_anew(scene: Scene) -> None:
    """The inode may be the same."""
    shutil.rmtree(scene.folder)
    scene.folder.mkdir()
    (scene.snapshots / "2" / "model.safetensors").rename(scene.folder / "model.safetensors")


def link_there_and_back(scene: Scene) -> None:
    link_to(scene, "2")
    link_to(scene, "1")


def download(scene: Scene, name: str) -> Path:
    """As huggingface_hub does: first a blob named by its content's digest, then a link to it."""
    blobs = scene.snapshots.parent / "blobs"
    blobs.mkdir(exist_ok=True)
    arriving, blob = blobs / "arriving.incomplete", blobs / name
    arriving.write_bytes(b"weights of 3")
    arriving.replace(blob)
    tick()
    link = scene.folder / "model-00001-of-00001.safetensors"
    link.unlink(missing_ok=True)
    link.symlink_to(Path("../../blobs") / name)
    return link


CHANGES: dict[str, Callable[[Scene], object]] = {
    "written": lambda scene: (scene.folder / "model.safetensors").write_bytes(b"other weights"),
    "replaced": replace_file,
    "removed": lambda scene: (scene.folder / "model.safetensors").unlink(),
    "link moved": lambda scene: link_to(scene, "2"),
    "folder renamed": swap_folders,
    "folder above renamed": swap_folders_above,
    "folder moved away and back": swap_folders_and_back,
    "folder made anew": make_anew,
    "link moved there and back": link_there_and_back,
}
NO_CHANGES: dict[str, Callable[[Scene], object]] = {
    "nothing": lambda scene: None,
    "read": lambda scene: (scene.folder / "model.safetensors").read_bytes(),
    "a file beside": lambda scene: (scene.folder / "log.txt").write_text("step 1"),
    "a file beside goes": lambda scene: (scene.snapshots / "2" / "model.safetensors").unlink(),
    "a folder beside": lambda scene: (scene.snapshots / "3").mkdir(),
    "a link beside": lambda scene: (scene.snapshots / "best").symlink_to(scene.folder),
}


@pytest.mark.parametrize("change", CHANGES)
def test_files_links_and_folders_that_change_are_seen(scene: Scene, change: str) -> None:
    files, loaded_at = scene.files, later()
    assert files.changed_since(loaded_at) is None
    CHANGES[change](scene)
    assert files.changed_since(loaded_at) is not None
    if change != "removed":
        assert files.changed_since(later()) is None, "who loads now loads these"


@pytest.mark.parametrize("change", NO_CHANGES)
def test_what_lies_beside_files_may_change(scene: Scene, change: str) -> None:
    files, loaded_at = scene.files, later()
    NO_CHANGES[change](scene)
    assert files.changed_since(loaded_at) is None


@pytest.mark.parametrize("digits", [40, 64], ids=["small", "large"])
def test_a_download_is_no_change_of_what_is_named_by_its_content(scene: Scene, digits: int) -> None:
    loaded_at = later()
    link = download(scene, "a" * digits)
    files = WeightFiles("sha256:files", (link,))
    assert files.changed_since(loaded_at) is None
    tick()
    link.resolve().write_bytes(b"whatever")  # its name is not true any more
    assert files.changed_since(loaded_at) is not None


def test_a_branch_that_moves_is_a_change(scene: Scene) -> None:
    link, branch = download(scene, "a" * 64), scene.snapshots / "main"
    branch.write_text("1")
    files, loaded_at = WeightFiles("sha256:files", (link, branch)), later()
    assert files.changed_since(loaded_at) is None
    branch.write_text("2")
    assert files.changed_since(loaded_at) == branch
