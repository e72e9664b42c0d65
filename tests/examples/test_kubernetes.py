"""The Kubernetes manifest: valid for the API server, and for the connector it configures."""

from __future__ import annotations

import copy
import json
import shlex
from typing import Any

import kubernetes_validate
import pytest
import yaml
from typer.testing import CliRunner

from lmcache_connector.cli.app import app
from lmcache_connector.cli.target import connector_config
from tests.support import ROOT

API_VERSION = "1.34"
FILE = ROOT / "examples" / "kubernetes" / "vllm-shared-cache.yaml"


def resources() -> list[dict[str, Any]]:
    return [dict(document) for document in yaml.safe_load_all(FILE.read_text())]


def named(kind: str, name: str) -> dict[str, Any]:
    (found,) = [r for r in resources() if (r["kind"], r["metadata"]["name"]) == (kind, name)]
    return found


def containers() -> list[dict[str, Any]]:
    pods = [r["spec"]["template"]["spec"] for r in resources() if "template" in r.get("spec", {})]
    return [c for pod in pods for c in pod.get("initContainers", []) + pod["containers"]]


@pytest.mark.parametrize(
    "resource", resources(), ids=lambda r: f"{r['kind']}/{r['metadata']['name']}"
)
def test_each_resource_fits_its_schema(resource: dict[str, Any]) -> None:
    kubernetes_validate.validate(resource, API_VERSION, strict=True)


def test_a_wrong_field_would_be_found() -> None:
    wrong = copy.deepcopy(named("Deployment", "vllm"))
    wrong["spec"]["template"]["spec"]["container"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, API_VERSION, strict=True)


def test_the_configuration_is_one_the_connector_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KV_CACHE_URL", "redis://:secret@valkey:6379")
    monkeypatch.setenv("KV_CACHE_HASH_KEY", "0123456789abcdef0123456789abcdef")
    document = json.loads(named("ConfigMap", "kv-transfer")["data"]["transfer.json"])
    config = connector_config(document)
    assert config.hash_key_bytes == b"0123456789abcdef0123456789abcdef"
    tier = config.redis_tier_config()
    assert tier is not None
    assert str(tier.address) == "redis://valkey:6379"


def test_what_refers_to_something_finds_it() -> None:
    service = named("Service", "valkey")
    for resource in ("StatefulSet", "Deployment"):
        for found in (r for r in resources() if r["kind"] == resource):
            labels = found["spec"]["template"]["metadata"]["labels"]
            assert found["spec"]["selector"]["matchLabels"].items() <= labels.items()
    pods = named("StatefulSet", "valkey")["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == pods
    (check, vllm) = (c for c in containers() if c["name"] != "valkey")
    assert check["env"] == [e for e in vllm["env"] if e["name"].startswith("KV_CACHE")]
    assert check["command"][0] == "lmcache-connector"
    assert CliRunner().invoke(app, [check["command"][1], "--help"]).exit_code == 0
    assert "/config/transfer.json" in shlex.split(vllm["args"][0])[-1]


def test_secrets_come_from_secrets() -> None:
    for container in containers():
        for variable in container["env"]:
            if variable["name"].endswith(("PASSWORD", "HASH_KEY")):
                assert "secretKeyRef" in variable["valueFrom"]
        assert container["name"] == "check" or "limits" in container["resources"]
