"""Metrics: the promise of their names, every series from the start, and what a scraper accepts."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvtierd.edges.metrics.exporter import FAMILIES, Exporter
from kvtierd.edges.metrics.family import Kind

GOLDEN = Path(__file__).parents[2] / "golden" / "metrics_v1.json"
FORBIDDEN = {"key", "hash", "block", "request", "session", "job", "namespace", "engine_id", "path", "pid"}


def scrape(figures, accept=""):
    return Exporter(lambda: figures).render(accept)[1].decode()


def series(figures):
    """Return the value of each series of ours by (name, labels)."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(scrape(figures))
        for sample in family.samples
        if sample.name.startswith("kvtierd_")
    }


def test_names_types_and_labels_are_those_that_were_promised():
    """A dashboard or an alert that somebody wrote must go on working: change the golden file deliberately."""
    promised = json.loads(GOLDEN.read_text())
    declared = {
        family.series: {"type": family.kind.value, "labels": list(family.labels)} for family in FAMILIES
    }
    assert promised == declared


def test_every_series_is_there_before_anything_happened_and_all_counters_are_zero(fresh):
    """L135: else idle looks like misnamed."""
    found = series(fresh)
    seen = {name for name, _ in found}
    for family in FAMILIES:
        suffix = "_count" if family.kind is Kind.HISTOGRAM else ""
        assert family.series + suffix in seen, f"{family.series} has no series"
    for (name, labels), value in found.items():
        if name.endswith(("_total", "_count", "_sum", "_bucket")):
            assert value == 0, (name, labels)
    for tier in ("cpu", "disk", "bucket"):
        assert ("kvtierd_tier_hits_total", (("tier", tier),)) in found
    assert ("kvtierd_events_total", (("audience", "default"), ("kind", "stored"), ("medium", "GPU"))) in found
    ranks = {dict(labels)["audience"] for name, labels in found if name == "kvtierd_event_batches_total"}
    assert ranks == {"default", "ranks", "ranks.1"}


def test_no_label_can_grow_without_bound(fresh):
    for family in FAMILIES:
        assert not FORBIDDEN & set(family.labels), family.series
    counts = Counter(name for name, _ in series(fresh))
    assert max(counts.values()) < 500, counts.most_common(3)


def test_labels_are_as_declared_and_no_series_comes_twice(fresh):
    for family in FAMILIES:
        rows = [labels for labels, _ in family.read(fresh)]
        assert len(rows) == len(set(rows)), family.series
        assert all(len(labels) == len(family.labels) for labels in rows), family.series


@pytest.mark.parametrize(
    "accept", ["", "application/openmetrics-text; version=1.0.0", "garbage;;;q=x", "*/*"]
)
def test_every_accept_header_gets_a_format_that_it_can_read(fresh, accept):
    content_type, body = Exporter(lambda: fresh).render(accept)
    assert body.decode().endswith("# EOF\n") == ("openmetrics" in content_type)
    assert b"kvtierd_build_info" in body


def test_promtool_finds_nothing_to_criticise(fresh):
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool is not here: install Debian's package prometheus to lint the metrics")
    ours = [line for line in scrape(fresh).splitlines() if "process_" not in line]
    done = subprocess.run(
        [tool, "check", "metrics"],
        input="\n".join(ours) + "\n",
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
