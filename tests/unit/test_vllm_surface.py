"""The vLLM glue fits every version that it claims: its source is held against the table of their surfaces."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtierd.testing import vllm_surface

ROOT = Path(__file__).parents[2]
GLUE = ROOT / "kvtierd" / "engines" / "vllm"
TABLE: vllm_surface.Table = json.loads((ROOT / "tests" / "golden" / "vllm_surface.json").read_text())
VERSIONS = ["0.26.0", "0.27.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0"]
MOVED = {
    "KVConnectorTransferResults": "0.30.0",
    "to_event_extra_keys": "0.31.0",
    "CacheHitSource": "0.32.0",
}
"""Names that came after 0.26, and when: only ``versions.py`` may import them."""
BASES = {
    "OffloadingConnector": ("offloading_connector:OffloadingConnector", "base:KVConnectorBase_V1"),
    "OffloadingManager": ("kv_offload/base:OffloadingManager",),
    "OffloadingWorker": ("kv_offload/base:OffloadingWorker",),
    "OffloadingSpec": ("kv_offload/base:OffloadingSpec",),
    "OffloadingWorkerMetadata": ("common:OffloadingWorkerMetadata",),
}


def sources(*, but: str = "") -> Iterator[ast.Module]:
    for path in sorted(GLUE.glob("*.py")):
        if path.name != but:
            yield ast.parse(path.read_text())


def imported(*, but: str = "") -> set[str]:
    """``module:name`` of every import from vLLM, wherever in a file it stands."""
    return {
        f"{node.module.replace('.', '/')}:{alias.name}"
        for tree in sources(but=but)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("vllm")
        for alias in node.names
    }


def overrides() -> Iterator[tuple[str, str, ast.FunctionDef]]:
    """Every public method of a glue's class whose base is one of vLLM's: (base, name, method)."""
    for tree in sources():
        for node in ast.walk(tree):
            bases = [base.id for base in getattr(node, "bases", ()) if isinstance(base, ast.Name)]
            for base in set(bases) & BASES.keys():
                assert isinstance(node, ast.ClassDef)
                for inner in node.body:
                    if isinstance(inner, ast.FunctionDef):
                        yield base, inner.name, inner


def symbol_of(base: str, method: str) -> str | None:
    """The symbol of the table that a method overrides, if it is one of vLLM's."""
    for place in BASES[base]:
        for symbol in TABLE:
            if symbol.endswith(f"{place}.{method}"):
                return symbol
    return None


def test_the_table_has_every_supported_version() -> None:
    assert sorted({v for row in TABLE.values() for versions in row.values() for v in versions}) == VERSIONS
    assert list(TABLE) == list(vllm_surface.symbols())


@pytest.mark.parametrize("version", VERSIONS)
def test_every_import_of_the_glue_is_in_every_version(version: str) -> None:
    there = vllm_surface.of_version(TABLE, version)
    surface = {symbol.rpartition(":")[2] for symbol in there}
    wanted = {
        name for name in imported(but="versions.py") if not name.startswith(("vllm/platforms", "vllm:"))
    }
    missing = sorted(name for name in wanted if name not in there and not moved_home(name, surface))
    assert not missing


def moved_home(name: str, surface: set[str]) -> bool:
    """Whether a name is imported from a package that re-exports it."""
    return name.rpartition(":")[0].endswith("v1") and name.rpartition(":")[2] in surface


def test_what_came_later_is_asked_for_in_one_module_only() -> None:
    first = {
        symbol.rpartition(":")[2]: min(v for versions in row.values() for v in versions)
        for symbol, row in TABLE.items()
        if "." not in symbol and row
    }
    late = {name.rpartition(":")[2] for name in imported() if first.get(name.rpartition(":")[2]) != "0.26.0"}
    late &= first.keys()
    assert {name: first[name] for name in late} == MOVED


@pytest.mark.parametrize("version", VERSIONS)
def test_every_override_takes_what_that_version_passes(version: str) -> None:
    there = vllm_surface.of_version(TABLE, version)
    checked = 0
    for base, name, method in overrides():
        symbol = symbol_of(base, name)
        theirs = there.get(symbol or "")
        if theirs is None or theirs == "attribute":
            continue
        wanted = ast.parse(f"def f{theirs[theirs.index('(') :]}: ...").body[0]
        assert isinstance(wanted, ast.FunctionDef)
        asked = [argument.arg for argument in wanted.args.args]
        ours = [argument.arg for argument in method.args.args]
        assert ours[: len(asked)] == asked, (
            f"{symbol} of vLLM {version} is called with {asked}, ours takes {ours}"
        )
        without_default = len(ours) - len(method.args.defaults)
        assert without_default <= len(asked), (
            f"{symbol}: {ours[len(asked) :]} are not passed by vLLM {version}"
        )
        checked += 1
    assert checked > 20


@pytest.mark.parametrize("version", VERSIONS)
def test_every_abstract_method_is_implemented(version: str) -> None:
    implemented = {(base, name) for base, name, _ in overrides()}
    for symbol, signature in vllm_surface.of_version(TABLE, version).items():
        if signature.startswith("abstract"):
            base, _, method = symbol.rpartition(":")[2].partition(".")
            assert (base, method) in implemented, symbol


def test_every_method_that_the_glue_adds_to_vllms_is_in_the_checked_surface_or_its_own() -> None:
    """A new override must be added to the surface, or the next version's change of it goes unseen."""
    known = {symbol.rpartition(".")[2] for symbol in TABLE}
    own = {"bind", "track", "failures", "fill", "flush", "problem", "loads_failed"}
    unknown = {
        f"{base}.{name}"
        for base, name, method in overrides()
        if name not in known | own and not name.startswith("_") and not method.name.startswith(OWN)
    }
    assert unknown == set()


OWN = ("note_", "settle_", "take_", "has_failed")
"""How the glue's own verbs, between its connector and its manager or worker, begin."""


def test_a_difference_is_named(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "_version.py").write_text("__version__ = version = '9.9.0+cpu'\n")
    with pytest.raises(ValueError, match="does not exist"):
        vllm_surface.reader(tmp_path / "nothing")
    version, read = vllm_surface.reader(tmp_path)
    assert version == "9.9.0"
    assert vllm_surface.surface(read) == {}
    before = vllm_surface.of_version(TABLE, "0.32.0")
    after = vllm_surface.of_version(TABLE, "0.33.0")
    (line,) = [line for line in vllm_surface.moved(before, after) if "submit_load" in line]
    assert "-> abstract(self, job_id, src_spec, dst_spec, expedited=False)" in line
    assert any("get_load_source" in line and "is gone" in line for line in vllm_surface.moved(before, {}))
