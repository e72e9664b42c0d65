"""The Helm chart, rendered by Helm: valid for the API server and the connector."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
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
from tests.support.clock import wait_until
from tests.support.redis.chunks import get_all, open_tier, put_all
from tests.support.redis.server_groups import certificates
from tests.support.redis.servers import free_port
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
    """The variables that the kubelet sets; a secret's value is its key."""
    found: dict[str, str] = {}
    for entry in container.get("env", []):
        source = entry.get("valueFrom", {})
        value = source.get("secretKeyRef", {}).get("key") or entry.get("value", "10.0.0.7")
        for name, known in found.items():
            value = value.replace(f"$({name})", known)
        found[entry["name"]] = value
    return found


def test_helm_lint_is_clean() -> None:
    report = helm_python.lint(str(CHART), strict=True)
    assert report["errors"] == []


@pytest.mark.parametrize("kind", BY_KIND)
def test_each_resource_fits_its_schema(chart: Any, kind: str) -> None:
    resources = of_kind(chart, kind, kvEvents={"enabled": True}, otlpEndpoint="http://c:4317")
    for resource in resources:
        kubernetes_validate.validate(resource, API_VERSION, strict=True)
    pods = containers(resources)
    assert pods["check"]["resources"] == pods["vllm"]["resources"], "check reads the limit"
    kinds = {r["kind"] for r in resources}
    assert ("StatefulSet" in kinds) is ("NetworkPolicy" in kinds) is (kind == "bundled")


@pytest.mark.parametrize("kind", BY_KIND)
def test_the_connector_accepts_its_settings(
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


def run_check(resources: list[dict[str, Any]], folder: Path, authority: Path, port: int) -> int:
    """Run the init container's command as the kubelet does; its exit code."""
    check = containers(resources)["check"]
    text = named(resources, "ConfigMap", "demo-kv-transfer")["data"]["transfer.json"]
    (folder / "transfer.json").write_text(text)
    values = variables(check)
    url = values["KV_CACHE_URL"].replace("demo-valkey:6379", f"127.0.0.1:{port}")
    environment = os.environ | {
        "KV_CACHE_URL": url.replace("/tls/ca.crt", str(authority)),
        "KV_CACHE_HASH_KEY": values["KV_CACHE_HASH_KEY"] + "-0123456789",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    command = [word.replace("/config/", f"{folder}/") for word in check["command"]]
    return subprocess.run(command, env=environment, timeout=120, check=False).returncode


@pytest.mark.redis_server
def test_its_server_serves_over_tls_and_pods_start_without_it(
    chart: Any, tmp_path: Path, redis_path: str
) -> None:
    resources, port = of_kind(chart, "bundled", cache={"cpuGib": 0.1}), free_port()
    (valkey,) = named(resources, "StatefulSet", "demo-valkey")["spec"]["template"]["spec"][
        "containers"
    ]
    script = valkey["args"][0].replace("valkey-server", redis_path).replace("6379", str(port))
    for mount in ("config", "tls", "run/valkey"):
        (tmp_path / mount).mkdir(parents=True)
        script = script.replace(f"/{mount}/", f"{tmp_path}/{mount}/")
    acl = named(resources, "ConfigMap", "demo-valkey")["data"]["users.acl"]
    (tmp_path / "config" / "users.acl").write_text(acl)
    with certificates() as pem:
        files = {"tls.crt": pem.certificate, "tls.key": pem.key, "ca.crt": pem.ca}
        for name, path in files.items():
            shutil.copy(path, tmp_path / "tls" / name)
        assert run_check(resources, tmp_path, pem.ca, port) == 0, "nothing listens"
        environment = os.environ | {"PASSWORD": "password"}
        server = subprocess.Popen(
            [*valkey["command"], script.replace("12gb", "64mb")], env=environment
        )
        try:
            url = f"rediss://engine:password@127.0.0.1:{port}?ssl_ca_certs={pem.ca}"
            with open_tier(url) as tier:
                wait_until(lambda: all(put_all(tier, range(3))), "the engine's user cannot write")
                assert get_all(tier, range(3))[0] == [True] * 3
            with open_tier(url.replace("engine:password", "engine:wrong")) as tier:
                assert put_all(tier, [9]) == [False]
            assert run_check(resources, tmp_path, pem.ca, port) == 0
        finally:
            server.terminate()
            server.wait(10)


def test_its_acl_is_the_documented_one(chart: Any) -> None:
    acl = named(of_kind(chart, "bundled"), "ConfigMap", "demo-valkey")["data"]["users.acl"]
    users = acl.splitlines()
    (engine,) = [line.removeprefix("user ") for line in users if line.startswith("user engine")]
    documented = (ROOT / "docs" / "security.md").read_text()
    assert f"ACL SETUSER {engine.replace('$PASSWORD', 'PASSWORD')}\n" in documented
    assert "user default off" in users


def test_the_image_is_built_from_a_tested_vllm() -> None:
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
        {"redis": {"kind": "bundled", "hosts": HOSTS}},
        {"podSpec": {"containers": []}},
        {"redis": {"kind": "single", "hosts": ["user:secret@host:1"]}},
        {"redis": {"kind": "sentinel", "hosts": HOSTS, "master": "a/b"}},
        {"cache": {"cpuGib": 1e6}},
        {"cache": {"settings": {"redis_url": "redis://elsewhere"}}},
        {"model": "$(reboot)"},
    ],
)
def test_wrong_values_are_refused(chart: Any, values: dict[str, Any]) -> None:
    with pytest.raises(helm_python.HelmError):
        chart.validate_schema(values)
