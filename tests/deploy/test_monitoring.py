"""Alert rules, dashboard and scrape configuration: well formed, on names that the daemon really exports."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "prometheus" / "rules.yaml"
DASHBOARD = ROOT / "deploy" / "grafana" / "kvtierd.json"
OTHERS = {
    "container_memory_working_set_bytes": {"container", "namespace", "pod"},
    "kube_pod_container_resource_limits": {"container", "namespace", "pod", "resource"},
    "process_resident_memory_bytes": set(),
    "up": {"job"},
}
"""From the kubelet, kube-state-metrics and the Prometheus client."""
TARGET = {"namespace", "pod", "le"}
"""Labels that a scrape or a histogram adds."""


def exported() -> dict[str, set[str]]:
    """Every series' name with its labels, as the daemon promises them."""
    promised = json.loads((ROOT / "tests" / "golden" / "metrics_v1.json").read_text())
    series = {}
    for name, family in promised.items():
        suffixes = ("_bucket", "_sum", "_count") if family["type"] == "histogram" else ("",)
        series |= {name + suffix: set(family["labels"]) for suffix in suffixes}
    return series | OTHERS


def expressions() -> list[str]:
    dashboard = json.loads(DASHBOARD.read_text())
    panels = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    queries = [variable["query"] for variable in dashboard["templating"]["list"]]
    rules = [rule["expr"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    return panels + rules + [query["query"] for query in queries if isinstance(query, dict)]


@pytest.mark.parametrize("expression", expressions())
def test_an_expression_names_only_series_and_labels_that_exist(expression):
    series = exported()
    names = set(re.findall(r"\bup\b|\b(?:kvtierd|process|container|kube)_[a-z_]+", expression))
    assert names
    assert names <= set(series)
    labels = set().union(*(series[name] for name in names)) | TARGET
    matched = re.findall(r"[{,]\s*([a-z_]+)\s*(?:=~|!~|!=|=)", expression)
    grouped = [
        label.strip()
        for group in re.findall(r"\b(?:by|on) \(([^)]*)\)", expression)
        for label in group.split(",")
    ]
    assert set(matched) | set(grouped) <= labels


def test_every_alert_has_a_line_in_the_runbook():
    runbook = (ROOT / "deploy" / "README.md").read_text()
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            assert f"`{rule['alert']}`" in runbook
            assert rule["annotations"]["runbook"]


def test_every_alert_of_the_runbook_exists():
    alerts = {
        rule["alert"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
    }
    assert set(re.findall(r"`(Kvtierd[A-Za-z]+)`", (ROOT / "deploy" / "README.md").read_text())) == alerts


def test_promtool_takes_the_rules_and_they_fire_when_they_should(need, run, tmp_path):
    promtool = need("promtool", "apt-get install prometheus")
    run(promtool, "check", "rules", RULES)
    cases = tmp_path / "cases.yaml"
    cases.write_text(yaml.safe_dump(CASES | {"rule_files": [str(RULES)]}))
    run(promtool, "test", "rules", cases)


def series(name: str, values: str) -> dict[str, str]:
    return {"series": name, "values": values}


STATE = 'kvtierd_tier_state{namespace="n", pod="p", tier="disk", state="%s"}'
CASES = {
    "evaluation_interval": "1m",
    "tests": [
        {
            "interval": "1m",
            "input_series": [
                series(STATE % "degraded", "0 0 1 1 1 1 1 1 0 0 0"),
                series(STATE % "stalled", "0x10"),
                series('kvtierd_event_batches_dropped_total{namespace="n", pod="p", audience="a"}', "0x10"),
            ],
            "promql_expr_test": [
                {
                    "expr": 'ALERTS{alertstate="firing"}',
                    "eval_time": minute,
                    "exp_samples": [
                        {
                            "labels": 'ALERTS{alertname="KvtierdTierDegraded", alertstate="firing",'
                            ' namespace="n", pod="p", severity="warning", state="degraded", tier="disk"}',
                            "value": 1,
                        }
                    ]
                    if firing
                    else [],
                }
                for minute, firing in (("1m", False), ("6m", True), ("9m", False))
            ],
        }
    ],
}


def test_the_pod_monitor_scrapes_the_port_that_the_sidecar_names(tmp_path):
    monitor = yaml.safe_load((ROOT / "deploy" / "kubernetes" / "podmonitor.yaml").read_text())
    sidecar = yaml.safe_load((ROOT / "deploy/kubernetes/components/sidecar/sidecar.yaml").read_text())
    [endpoint] = monitor["spec"]["podMetricsEndpoints"]
    pod = sidecar["spec"]["template"]
    [container] = [item for item in pod["spec"]["initContainers"] if item["name"] == "kvtierd"]
    assert endpoint["portNumber"] in [port["containerPort"] for port in container["ports"]]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()


VALIDATE = """
import {readFileSync} from "node:fs";
import {PodMonitor} from "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1";
new PodMonitor(JSON.parse(readFileSync(process.argv[2]))).validate();
"""


def test_the_pod_monitor_fits_the_operators_schema_and_a_wrong_one_would_not(need, run, tmp_path):
    node = need("node", "Node.js")
    modules = ROOT / ".venvs" / "node" / "node_modules"
    if not modules.is_dir():
        pytest.skip(
            "the Prometheus operator's schemas are not installed: make .venvs/node/.stamp (needs npm)"
        )
    (tmp_path / "node_modules").symlink_to(modules)
    script, monitor = tmp_path / "validate.mjs", tmp_path / "monitor.json"
    script.write_text(VALIDATE)
    body = yaml.safe_load((ROOT / "deploy" / "kubernetes" / "podmonitor.yaml").read_text())
    monitor.write_text(json.dumps(body))
    run(node, script, monitor)
    body["spec"]["podMetricsEndpoints"][0]["portNumber"] = "9557"
    monitor.write_text(json.dumps(body))
    with pytest.raises(AssertionError, match="portNumber must be integer"):
        run(node, script, monitor)
