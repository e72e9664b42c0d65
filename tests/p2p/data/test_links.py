"""Who may read whom by NIXL."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmcache_connector.p2p.data import links as module
from lmcache_connector.p2p.data.links import has_rdma, links


def test_processes_of_one_machine_share_a_link() -> None:
    (here,) = links(is_local=True, anywhere=False)
    assert here.startswith("machine ")
    assert here in links(is_local=False, anywhere=False)


def test_over_tcp_only_if_both_are_told_so() -> None:
    assert "anywhere" in links(is_local=False, anywhere=True)
    assert "anywhere" not in links(is_local=True, anywhere=True)
    assert "anywhere" not in links(is_local=False, anywhere=False)


def test_other_names_of_processes_are_another_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = links(is_local=True, anywhere=False)
    elsewhere = tmp_path / "pid"
    elsewhere.symlink_to("pid:[1]")
    monkeypatch.setattr(module, "_NAMESPACES", (elsewhere,))
    assert links(is_local=True, anywhere=False) != before


def test_rdma_devices_are_a_link(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "_RDMA_DEVICES", tmp_path)
    assert not has_rdma()
    (tmp_path / "mlx5_0").mkdir()
    assert has_rdma()
    assert "rdma" in links(is_local=False, anywhere=False)
    assert "rdma" not in links(is_local=True, anywhere=False)
