"""The Kubernetes manifests: rendered, strictly valid from 1.29 on, made of what the daemon really takes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml

from kvtierd.config.load import load_tier_file
from kvtierd.config.units import parse_size

KUBERNETES = Path(__file__).parents[2] / "deploy" / "kubernetes"
OVERLAYS = sorted(path.parent.name for path in KUBERNETES.glob("overlays/*/kustomization.yaml"))
VERSIONS = ("1.29", "1.33", "1.37")
PLAIN = ("networkpolicy.yaml", "poddisruptionbudget.yaml", "pod.yaml")
POD = {"POD_IP": "10.0.0.3", "POD_NAME": "engine-0", "POD_NAMESPACE": "serving"}
MEMORY = {"Ki": "KiB", "Mi": "MiB", "Gi": "GiB", "Ti": "TiB"}


def size(quantity: str) -> int:
    """Bytes of a Kubernetes quantity."""
    return parse_size(quantity[:-2] + MEMORY[quantity[-2:]])


def workload(rendered: str) -> dict:
    """The one object that has the sidecar."""
    bodies = [body for body in yaml.safe_load_all(rendered) if body["kind"] in ("Deployment", "StatefulSet")]
    [found] = [body for body in bodies if body["metadata"]["labels"].get("kvtierd.io/sidecar") == "true"]
    return found


def named(things: list[dict], name: str) -> dict:
    [found] = [thing for thing in things if thing["name"] == name]
    return found


def strictly_valid(validate, run, tmp_path: Path, text: str) -> None:
    path = tmp_path / "rendered.yaml"
    path.write_text(text)
    for version in VERSIONS:
        run(validate, "--strict", "-k", version, path)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_is_strictly_valid_from_1_29_to_the_newest(overlay, kustomize, need, run, tmp_path):
    validate = need("kubernetes-validate", "make .venvs/deploy/.stamp")
    strictly_valid(validate, run, tmp_path, kustomize(f"overlays/{overlay}"))


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_manifest_is_strictly_valid_from_1_29_to_the_newest(name, need, run, tmp_path):
    validate = need("kubernetes-validate", "make .venvs/deploy/.stamp")
    strictly_valid(validate, run, tmp_path, (KUBERNETES / name).read_text())


def test_the_validator_would_find_a_misspelt_field(need, run, tmp_path):
    validate = need("kubernetes-validate", "make .venvs/deploy/.stamp")
    text = (KUBERNETES / "pod.yaml").read_text().replace("restartPolicy: Always", "restartpolicy: Always")
    with pytest.raises(AssertionError, match="restartpolicy"):
        strictly_valid(validate, run, tmp_path, text)


def test_the_single_file_example_is_the_rendered_minimal_overlay(kustomize):
    head, body = (KUBERNETES / "pod.yaml").read_text().split("\n---\n", 1)
    assert all(line.startswith("#") for line in head.splitlines())
    assert body == kustomize("overlays/minimal"), "run: make manifests"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_sidecar_starts_before_the_engine_and_is_probed_on_its_own_port(overlay, kustomize):
    pod = workload(kustomize(f"overlays/{overlay}"))["spec"]["template"]["spec"]
    sidecar = named(pod["initContainers"], "kvtierd")
    assert sidecar["restartPolicy"] == "Always"
    probes = {name: sidecar[name]["httpGet"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert {name: (probe["path"], probe["port"]) for name, probe in probes.items()} == {
        "startupProbe": ("/startupz", 9557),
        "readinessProbe": ("/readyz", 9557),
        "livenessProbe": ("/livez", 9557),
    }
    env = {entry["name"]: entry.get("value") for entry in sidecar["env"]}
    assert env["KVTIERD__ADMIN__LISTEN"].endswith(":9557")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_container_of_ours_fits_the_restricted_profile(overlay, kustomize):
    pod = workload(kustomize(f"overlays/{overlay}"))["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert not any(pod.get(key) for key in ("hostNetwork", "hostPID", "hostIPC"))
    assert not any("hostPath" in volume for volume in pod["volumes"])
    for container in pod["initContainers"] + pod["containers"]:
        context = container["securityContext"]
        assert context["runAsNonRoot"] is True
        assert context["runAsUser"] > 0
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    for name in ("kvtierd", "kvtierd-glue"):
        container = named(pod["initContainers"], name)
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["securityContext"]["runAsUser"] == 65532


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_limits_hold_what_the_tier_file_asks_for(overlay, kustomize):
    pod = workload(kustomize(f"overlays/{overlay}"))["spec"]["template"]["spec"]
    tier_file = tier_file_of(overlay)
    limit = size(named(pod["initContainers"], "kvtierd")["resources"]["limits"]["memory"])
    in_flight = sum(tier.inflight_bytes for tier in tier_file.tiers[1:])
    assert limit >= tier_file.pool.bytes + (1 << 30) + in_flight
    assert size(named(pod["volumes"], "kvtierd-pool")["emptyDir"]["sizeLimit"]) > tier_file.pool.bytes
    disk = named(pod["volumes"], "kvtierd-disk").get("emptyDir")
    assert disk is None or size(disk["sizeLimit"]) > tier_file.tiers[1].max_bytes


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_the_tier_file_names_is_mounted_and_the_relay_is_where_the_engine_publishes(overlay, kustomize):
    pod = workload(kustomize(f"overlays/{overlay}"))["spec"]["template"]["spec"]
    tier_file = tier_file_of(overlay)
    sidecar, engine = named(pod["initContainers"], "kvtierd"), pod["containers"][0]
    mounts = {mount["mountPath"]: mount["name"] for mount in sidecar["volumeMounts"]}
    assert {str(tier_file.runtime_dir), str(tier_file.state_dir), str(tier_file.tiers[1].path)} <= set(mounts)
    assert str(tier_file.pool.path.parent) in mounts
    shared = {mount["name"] for mount in engine["volumeMounts"]}
    assert mounts[str(tier_file.runtime_dir)] in shared
    events = json.loads(engine["args"][engine["args"].index("--kv-events-config") + 1])
    transfer = json.loads(engine["args"][engine["args"].index("--kv-transfer-config") + 1])
    [relay] = tier_file.events.relay
    assert (relay.connect, relay.replay) == (events["endpoint"], events["replay_endpoint"])
    assert transfer["kv_connector_extra_config"]["kvtierd_socket"] == f"{tier_file.runtime_dir}/engine.sock"


def tier_file_of(overlay: str):
    """The tier file as the sidecar's environment changes it."""
    patch = yaml.safe_load((KUBERNETES / "components" / "sidecar" / "sidecar.yaml").read_text())
    containers = patch["spec"]["template"]["spec"]["initContainers"]
    written = {entry["name"]: entry.get("value", "") for entry in named(containers, "kvtierd")["env"]}
    env = POD | {name: value.replace("$(POD_IP)", POD["POD_IP"]) for name, value in written.items() if value}
    loaded = load_tier_file(KUBERNETES / "overlays" / overlay / "tiers.yaml", env)
    assert loaded.warnings == ()
    return loaded.tier_file


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_audience_is_bound_to_the_pods_address_and_ports_are_numbers(overlay, kustomize):
    [audience] = tier_file_of(overlay).events.audiences
    assert (audience.bind, audience.replay) == ("tcp://10.0.0.3:5557", "tcp://10.0.0.3:5558")
    services = [
        body for body in yaml.safe_load_all(kustomize(f"overlays/{overlay}")) if body["kind"] == "Service"
    ]
    assert all(isinstance(port["targetPort"], int) for body in services for port in body["spec"]["ports"])


@pytest.mark.parametrize(
    ("overlay", "labels"),
    [
        ("llm-d", {"llm-d.ai/inference-serving": "true"}),
        ("aibrix", {"model.aibrix.ai/name": "qwen", "model.aibrix.ai/kv-events-enabled": "true"}),
    ],
)
def test_a_router_finds_the_pods_by_its_own_labels(overlay, labels, kustomize):
    found = workload(kustomize(f"overlays/{overlay}"))["spec"]["template"]["metadata"]["labels"]
    assert labels.items() <= found.items()


OWN = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"name": "own", "labels": {"kvtierd.io/sidecar": "true"}},
}
ENGINE = {"name": "engine", "image": "vllm", "args": ["--model", "qwen"]}


def beside(folder: Path, **spec: object) -> Path:
    """Write a kustomization that adds the component to a Deployment of somebody's own."""
    body = OWN | {"spec": {"template": {"spec": spec}}}
    (folder / "own.yaml").write_text(yaml.safe_dump(body))
    component = os.path.relpath(KUBERNETES / "components" / "sidecar", folder)
    text = yaml.safe_dump({"resources": ["own.yaml"], "components": [component]})
    (folder / "kustomization.yaml").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("containers", "told"),
    [
        ([ENGINE | {"name": "vllm"}], "containers/0/name failed"),
        ([{"name": "proxy", "image": "proxy", "args": ["-v"]}, ENGINE], "containers/0/name failed"),
        ([{"name": "engine", "image": "vllm", "command": ["vllm", "serve"]}], "missing path.*args/-"),
    ],
)
def test_what_the_component_does_not_fit_stops_the_build_and_says_where(
    containers, told, kustomize, tmp_path
):
    with pytest.raises(AssertionError, match=told):
        kustomize(beside(tmp_path, containers=containers))


def test_what_the_component_does_not_need_of_a_pod_stays(kustomize, tmp_path):
    fetch = {"name": "fetch", "image": "fetch"}
    context = {"supplementalGroups": [4000]}
    own = beside(tmp_path, initContainers=[fetch], containers=[ENGINE], securityContext=context)
    pod = workload(kustomize(own))["spec"]["template"]["spec"]
    assert [container["name"] for container in pod["initContainers"]] == ["kvtierd-glue", "kvtierd", "fetch"]
    assert [container["name"] for container in pod["containers"]] == ["engine"]
    assert pod["securityContext"]["supplementalGroups"] == [4000]
    assert pod["securityContext"]["fsGroup"] == 65532


def test_the_policy_opens_the_ports_of_events_to_routers_only():
    policy = yaml.safe_load((KUBERNETES / "networkpolicy.yaml").read_text())
    for rule in policy["spec"]["ingress"]:
        ports = {entry["port"] for entry in rule["ports"]}
        assert ("from" in rule) == bool(ports & {5557, 5558, 9557})
