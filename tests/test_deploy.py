"""The files in deploy/ pass their own tools, and the settings and limits in them are consistent."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tokenteller.server.planning import make_plan
from tokenteller.server.settings import ServeSettings

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"


def tool(*command: str) -> None:
    if shutil.which(command[0]) is None and not (Path(sys.executable).parent / command[0]).exists():
        pytest.skip(f"{command[0]} is not installed here")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(command, cwd=DEPLOY, capture_output=True, text=True, env={"PATH": path, "HOME": "/tmp"})
    assert done.returncode == 0, done.stdout + done.stderr


def test_compose_follows_its_schema() -> None:
    tool("check-jsonschema", "--builtin-schema", "vendor.compose-spec", "compose.yaml")


def test_the_kubernetes_manifests_follow_theirs() -> None:
    tool("kubernetes-validate", "--strict", "kubernetes.yaml")


def test_prometheus_takes_its_configuration_and_rules() -> None:
    tool("promtool", "check", "config", "--syntax-only", "monitoring/prometheus.yml")
    tool("promtool", "check", "rules", "monitoring/alerts.yml")


def test_the_dockerfile_passes_hadolint() -> None:
    tool("hadolint", str(ROOT / "Dockerfile"))


def manifests() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))


def test_every_setting_that_a_file_names_exists() -> None:
    known = {f"TOKENTELLER_{name.upper()}" for name in ServeSettings.model_fields}
    own = {"TOKENTELLER_IMAGE", "TOKENTELLER_MEMORY"}  # of compose.yaml itself
    for file in ("compose.yaml", "kubernetes.yaml", "ray_serve.py", "README.md"):
        named = set(re.findall(r"TOKENTELLER_[A-Z_]*[A-Z]", (DEPLOY / file).read_text()))
        assert named <= known | own, (file, named - known - own)


def test_kubernetes_sets_no_variable_of_ours_for_a_service_of_our_name() -> None:
    assert manifests()[0]["spec"]["template"]["spec"]["enableServiceLinks"] is False


def test_streams_have_time_to_end_before_the_kill() -> None:
    pod = manifests()[0]["spec"]["template"]["spec"]
    container = pod["containers"][0]
    environment = {entry["name"]: entry.get("value") for entry in container["env"]}
    shutdown = int(environment["TOKENTELLER_SHUTDOWN_TIMEOUT"])
    before = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] >= before + shutdown + 5
    server = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["server-1"]
    grace = int(server["stop_grace_period"].removesuffix("s"))
    assert grace >= int(server["environment"]["TOKENTELLER_SHUTDOWN_TIMEOUT"]) + 5


def test_the_memory_limits_hold_weights_pool_and_process() -> None:
    container = manifests()[0]["spec"]["template"]["spec"]["containers"][0]
    environment = {entry["name"]: entry.get("value") for entry in container["env"]}
    settings = ServeSettings(
        model=environment["TOKENTELLER_MODEL"],
        slots=environment["TOKENTELLER_SLOTS"],
        kv_memory=environment["TOKENTELLER_KV_MEMORY"],
    )
    plan = make_plan(settings).kv
    needed = plan.weight_bytes + plan.pool_bytes + 512 * 2**20
    for bound in ("requests", "limits"):
        assert int(container["resources"][bound]["memory"].removesuffix("Mi")) * 2**20 >= needed
