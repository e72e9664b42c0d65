"""The Helm chart, rendered by Helm itself: valid for the API server, and for the connector."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml

from lmcache_connector.cli.target import connector_config
from lmcache_connector.storage.redis.client.url import TopologyKind
from lmcache_connector.vllm_compat.api.versions import VLLM_PACKAGE, text_of
from tests.support import ROOT
from tests.test_packaging import PACKAGED

API_VERSION = "1.34"
CHART = ROOT / "examples" / "helm"
HOSTS = ["a.example:7000", "b.example:7001"]
BY_KIND: dict[str, dict[str, Any]] = {
    "none": {},
    "bundled": {},
    "single": {"hosts": HOSTS[:1]},
    "sentinel": {"hosts": HOSTS, "master": "cache", "sentinelPassword": True},
    "cluster": {"hosts": HOSTS, "tls": {"enabled": False}},
}


@pytest.fixture(scope="module")
def chart() -> Iterator[Any]:
    with helm_python.Chart.load(str(CHART)) as chart:
        yield chart


def render(chart: Any, **values: Any) -> list[dict[str, Any]]:
    """All resources of a release named ``demo``."""
    rendered = chart.render(values, name="demo", namespace="test")
    files = [text for path, text in rendered.items() if path.endswith(".yaml")]
    return [doc for text in files for doc in yaml.safe_load_all(text) if doc]


def of_kind(chart: Any, kind: str, **values: Any) -> list[dict[str, Any]]:
    return render(chart, redis={"kind": kind, **BY_KIND[kind]}, **values)


def named(resources: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (found,) = [r for r in resources if (r["kind"], r["metadata"]["name"]) == (kind, name)]
    return found


def containers(resources: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    pod = named(resources, "Deployment", "demo-vllm")["spec"]["template"]["spec"]
    return {c["name"]: c for c in pod["initContainers"] + pod["containers"]}


def variables(container: dict[str, Any]) -> dict[str, str]:
    """As the kubelet sets them; a secret has its key as its value."""
    found: dict[str, str] = {}
    for entry in container.get("env", []):
        source = entry.get("valueFrom", {})
        value = source.get("secretKeyRef", {}).get("key") or entry.get("value", "10.0.0.7")
        for name, known in found.items():
            value = value.replace(f"$({name})", known)
        found[entry["name"]] = value
    return found


def test_helm_finds_nothing_wrong() -> None:
    report = helm_python.lint(str(CHART), strict=True)
    assert report["errors"] == []


@pytest.mark.parametrize("kind", BY_KIND)
def test_each_resource_fits_its_schema(chart: Any, kind: str) -> None:
    resources = of_kind(chart, kind, kvEvents={"enabled": True}, otlpEndpoint="http://c:4317")
    for resource in resources:
        kubernetes_validate.validate(resource, API_VERSION, strict=True)
    kinds = {r["kind"] for r in resources}
    assert ("StatefulSet" in kinds) is ("NetworkPolicy" in kinds) is (kind == "bundled")


@pytest.mark.parametrize("kind", BY_KIND)
def test_the_connector_takes_what_is_rendered(
    chart: Any, kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    authority = tmp_path / "ca.crt"
    authority.touch()
    resources = of_kind(chart, kind, cache={"settings": {"redis_codec": "blosc2"}})
    for name, value in variables(containers(resources)["vllm"]).items():
        secret = value + "-0123456789" if name.endswith("KEY") else value
        monkeypatch.setenv(name, secret.replace("/tls/ca.crt", str(authority)))
    text = named(resources, "ConfigMap", "demo-kv-transfer")["data"]["transfer.json"]
    config = connector_config(json.loads(text))
    tier = config.redis_tier_config()
    assert (config.cpu_gib, config.redis_codec) == (4, "blosc2")
    if kind == "none":
        assert (tier, config.hash_key, config.redis_ttl_seconds) == (None, None, None)
        return
    assert config.redis_ttl_seconds == 86400
    assert tier is not None
    address = tier.address
    expected = {"sentinel": TopologyKind.SENTINEL, "cluster": TopologyKind.CLUSTER}
    assert address.kind is expected.get(kind, TopologyKind.SINGLE)
    assert address.tls is (kind != "cluster")
    assert (address.username, address.password) == ("engine", "password")
    if kind == "bundled":
        assert address.hosts == (("demo-valkey", 6379),)
        named(resources, "Service", "demo-valkey")
    else:
        wanted = HOSTS[:1] if kind == "single" else HOSTS
        assert [f"{host}:{port}" for host, port in address.hosts] == wanted
    if kind == "sentinel":
        assert address.master == "cache"
        assert address.sentinel_login() == (None, "sentinel-password")


def test_the_image_is_built_from_a_vllm_that_is_tested() -> None:
    text = (ROOT / "examples" / "kubernetes" / "Dockerfile").read_text()
    (release,) = re.findall(r"^ARG VLLM=v(\d+\.\d+)\.\d+$", text, re.MULTILINE)
    assert {text_of(r): state for r, state in VLLM_PACKAGE.releases.items()}[release] == "tested"
    for sources in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE):
        assert all((ROOT / source).exists() for source in sources.split())
    copied = {
        source
        for line in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE)
        for source in line.split()
    }
    assert copied == set(PACKAGED)


@pytest.mark.parametrize(
    "values",
    [
        {"redis": {"kind": "single"}},
        {"redis": {"kind": "single", "hosts": HOSTS}},
        {"redis": {"kind": "bundled", "hosts": HOSTS}},
        {"redis": {"kind": "none", "hosts": HOSTS}},
        {"podSpec": {"containers": []}},
        {"env": [{"value": "x"}]},
        {"redis": {"kind": "memcached"}},
        {"redis": {"kind": "single", "hosts": ["user:secret@host:1"]}},
        {"redis": {"kind": "single", "hosts": ["a host:6379"]}},
        {"redis": {"kind": "sentinel", "hosts": HOSTS, "master": "a/b"}},
        {"cache": {"cpu_gib": 1}},
        {"cache": {"cpuGib": 1e6}},
        {"cache": {"settings": {"redis_url": "redis://elsewhere"}}},
        {"model": "$(reboot)"},
    ],
)
def test_wrong_values_are_refused(chart: Any, values: dict[str, Any]) -> None:
    with pytest.raises(helm_python.HelmError):
        chart.validate_schema(values)
