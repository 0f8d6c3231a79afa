"""The metrics of tenants: named ones from the start, a bounded number of them ever."""

from dataclasses import replace

import msgspec

from kvtierd.core.tenants import NAMED
from kvtierd.edges.metrics.family import Figures
from kvtierd.edges.metrics.tenants import FAMILIES
from kvtierd.testing.rig import LAYOUT, LadderRig, fs_spec


def readings(figures):
    return {family.series: dict(family.read(figures)) for family in FAMILIES}


def test_named_tenants_have_all_their_series_before_anything_happened(plan):
    named = replace(plan, tenants=("a", "other"))
    for found in readings(Figures({"state": "starting"}, named)).values():
        assert found == {(name, tier): 0 for name in ("a", "other") for tier in ("cpu", "disk", "bucket")}


def test_series_are_bounded_however_engines_call_themselves(plan):
    rig = LadderRig(4 * 64, [fs_spec()], attach=False)
    for number in range(NAMED + 20):
        layout = msgspec.structs.replace(LAYOUT, tenant=f"t{number}")
        rig.attach(f"engine-{number}", layout=layout)
    found = readings(Figures(rig.ladder.statistics(), plan))
    for values in found.values():
        assert len(values) == (NAMED + 1) * 3
    assert ("t0", "cpu") in found["kvtierd_tenant_blocks"]
    assert ("other", "cpu") in found["kvtierd_tenant_blocks"]
