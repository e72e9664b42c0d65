"""The Kubernetes manifest: valid for the API server, and for the connector it configures."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from lmcache_connector.cli.target import connector_config
from tests.support import ROOT
from tests.support.redis.chunks import get_all, open_tier, put_all
from tests.support.redis.server_groups import certificates, wait_until
from tests.support.redis.servers import free_port

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


def test_the_configuration_is_one_the_connector_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    url = variable("vllm", "KV_CACHE_URL")["value"]
    monkeypatch.setenv("KV_CACHE_URL", url.partition("?")[0].replace("$(KV_CACHE_PASSWORD)", "s"))
    monkeypatch.setenv("KV_CACHE_HASH_KEY", "0123456789abcdef0123456789abcdef")
    document = json.loads(named("ConfigMap", "kv-transfer")["data"]["transfer.json"])
    config = connector_config(document)
    assert config.hash_key_bytes == b"0123456789abcdef0123456789abcdef"
    tier = config.redis_tier_config()
    assert tier is not None
    assert str(tier.address) == "rediss://valkey:6379"
    assert (tier.address.username, tier.address.password) == ("engine", "s")


def variable(container: str, name: str) -> dict[str, Any]:
    (found,) = [c for c in containers() if c["name"] == container]
    return next(e for e in found["env"] if e["name"] == name)


def run_check(folder: Path, password: str, authority: Path, port: int) -> int:
    """The init container's own command, as the kubelet would run it; its exit code."""
    document = json.loads(named("ConfigMap", "kv-transfer")["data"]["transfer.json"])
    document["kv_connector_extra_config"]["cpu_gib"] = 0.1
    (folder / "transfer.json").write_text(json.dumps(document))
    url = str(variable("check", "KV_CACHE_URL")["value"])
    url = url.replace("$(KV_CACHE_PASSWORD)", password).replace("valkey:6379", f"127.0.0.1:{port}")
    (check,) = [c for c in containers() if c["name"] == "check"]
    command = [word.replace("/config/", f"{folder}/") for word in check["command"]]
    environment = os.environ | {
        "KV_CACHE_URL": url.replace("/tls/ca.crt", str(authority)),
        "KV_CACHE_HASH_KEY": "0123456789abcdef0123456789abcdef",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    return subprocess.run(command, env=environment, timeout=120, check=False).returncode


@pytest.mark.redis_server
def test_its_server_takes_engines_over_tls_and_pods_start_without_it(
    tmp_path: Path, redis_path: str
) -> None:
    for folder in ("config", "tls", "run"):
        (tmp_path / folder).mkdir()
    port = free_port()
    with certificates() as pem:
        for name, path in {
            "tls.crt": pem.certificate,
            "tls.key": pem.key,
            "ca.crt": pem.ca,
        }.items():
            shutil.copy(path, tmp_path / "tls" / name)
        acl = named("ConfigMap", "kv-transfer")["data"]["users.acl"]
        (tmp_path / "config" / "users.acl").write_text(acl)
        (valkey,) = [c for c in containers() if c["name"] == "valkey"]
        script = valkey["args"][0].replace("valkey-server", redis_path).replace("6379", str(port))
        for mount in ("config", "tls"):
            script = script.replace(f"/{mount}/", f"{tmp_path}/{mount}/")
        script = script.replace("/run/valkey/", f"{tmp_path}/run/").replace("56gb", "64mb")
        assert run_check(tmp_path, "pass", pem.ca, port) == 0, "nothing listens, and the pod starts"
        environment = os.environ | {"PASSWORD": "pass"}
        server = subprocess.Popen([*valkey["command"], script], env=environment)
        try:
            url = f"rediss://engine:pass@127.0.0.1:{port}?ssl_ca_certs={pem.ca}"
            with open_tier(url) as tier:
                wait_until(lambda: all(put_all(tier, range(3))), "the engine's user cannot write")
                assert get_all(tier, range(3))[0] == [True] * 3
            with open_tier(url.replace("engine:pass", "engine:wrong")) as tier:
                assert put_all(tier, [9]) == [False]
            assert run_check(tmp_path, "pass", pem.ca, port) == 0
        finally:
            server.terminate()
            server.wait(10)


def test_its_acl_is_the_documented_one() -> None:
    documented = (ROOT / "docs" / "security.md").read_text()
    users = named("ConfigMap", "kv-transfer")["data"]["users.acl"].splitlines()
    (engine,) = [line.removeprefix("user ") for line in users if line.startswith("user engine")]
    assert f"ACL SETUSER {engine.replace('$PASSWORD', 'PASSWORD')}\n" in documented
    assert "user default off" in users
