"""What is deployed without Kubernetes: the Dockerfile's style, the systemd unit, compose, every tier file."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import yaml

from kvtierd.config.load import load_tier_file

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "deploy" / "systemd" / "kvtierd.service"
COMPOSE = ROOT / "deploy" / "compose" / "compose.yaml"
TIER_FILES = sorted([*ROOT.glob("deploy/**/tiers.yaml"), *ROOT.glob("config/*.yaml")])
POD = {"POD_IP": "10.0.0.3", "POD_NAME": "engine-0", "POD_NAMESPACE": "serving"}


def test_hadolint_finds_nothing_in_the_dockerfile(need, run):
    assert run(need("hadolint", "make .venvs/deploy/.stamp"), ROOT / "Dockerfile") == ""


def test_yamllint_finds_nothing_in_what_is_deployed(need, run):
    rules = "{extends: relaxed, rules: {line-length: {max: 130}}}"
    run(
        need("yamllint", "make .venvs/deploy/.stamp"),
        "--strict",
        "-d",
        rules,
        ROOT / "deploy",
        ROOT / "config",
    )


@pytest.mark.parametrize("path", TIER_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_shipped_tier_file_is_accepted_without_a_warning(path):
    assert load_tier_file(path, POD).warnings == ()


def test_the_image_installs_what_the_project_asks_for_and_each_download_has_its_hash():
    lock = (ROOT / "deploy" / "image" / "requirements.txt").read_text()
    locked = dict(re.findall(r"^([a-z0-9-]+)==([^ ]+)", lock, re.MULTILINE))
    pinned = dict(
        line.lower().replace("_", "-").split("==")
        for line in (ROOT / "tests" / "requirements" / "constraints.txt").read_text().split()
    )
    project = (ROOT / "pyproject.toml").read_text()
    asked = re.search(r"^dependencies = \[(.*?)^\]", project, re.DOTALL | re.MULTILINE)
    names = {name.lower() for name in re.findall(r'"([A-Za-z0-9_-]+)', asked.group(1))}
    assert names <= set(locked)
    assert {name: pinned[name] for name in locked if name in pinned} == {
        name: version for name, version in locked.items() if name in pinned
    }
    entries = re.split(r"^(?=[a-z0-9-]+==)", lock, flags=re.MULTILINE)[1:]
    assert all("--hash=sha256:" in entry for entry in entries)
    assert "index-url" not in lock


def test_systemd_takes_the_unit(need, run, tmp_path):
    analyze = need("systemd-analyze", "systemd")
    program = tmp_path / "kvtierd"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit = tmp_path / "kvtierd.service"
    unit.write_text(UNIT.read_text().replace("/opt/kvtierd/bin/kvtierd", str(program)))
    printed = run(analyze, "verify", "--man=no", unit)
    assert "kvtierd.service" not in printed
    score = run(analyze, "security", "--offline=true", unit).split("exposure level")[-1]
    assert float(re.search(r"(\d+\.\d+)", score).group(1)) < 2.5


def test_the_unit_would_be_refused_with_a_misspelt_key(need, run, tmp_path):
    analyze = need("systemd-analyze", "systemd")
    unit = tmp_path / "kvtierd.service"
    text = (
        UNIT.read_text()
        .replace("/opt/kvtierd/bin/kvtierd", "/bin/true")
        .replace("WatchdogSec", "WatchDogSec")
    )
    unit.write_text(text)
    assert "WatchDogSec" in run(analyze, "verify", "--man=no", unit)


def test_compose_fits_its_schema_and_its_services_share_the_socket(need, run):
    check = need("check-jsonschema", "make .venvs/deploy/.stamp")
    run(check, "--builtin-schema", "vendor.compose-spec", COMPOSE)
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    for name in ("kvtierd", "engine"):
        assert "run:/run/kvtierd" in services[name]["volumes"]
    assert services["engine"]["depends_on"]["kvtierd"] == {"condition": "service_healthy"}


def test_compose_and_kubernetes_start_the_engine_with_the_same_words():
    def words(texts):
        return [" ".join(text.split()) for text in texts if text.startswith("{")]

    compose = words(yaml.safe_load(COMPOSE.read_text())["services"]["engine"]["command"])
    patch = yaml.safe_load((ROOT / "deploy/kubernetes/components/sidecar/engine-args.yaml").read_text())
    assert compose == words(step["value"] for step in patch if step["op"] == "add")


def test_ignored_for_the_image_is_all_that_the_dockerfile_does_not_copy():
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    sources = set()
    for line in (ROOT / "Dockerfile").read_text().splitlines():
        if line.startswith("COPY ") and "--from" not in line:
            sources |= set(line.split()[1:-1])
    assert all(any(source == keep or source.startswith(f"{keep}/") for keep in kept) for source in sources)
    assert all(os.path.exists(ROOT / source) for source in sources)
