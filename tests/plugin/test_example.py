"""The example package: a tier type that passes the kit and carries a daemon's blocks over a restart."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from kvtierd.cli.main import main
from kvtierd.config.plugins import installed
from kvtierd.edges.backends.registry import make_added
from kvtierd.testing.backend_kit import BackendKit
from kvtierd.testing.daemon_rig import DaemonRig, chain, load, store
from kvtierd.testing.faults import FaultyBackend
from kvtierd.testing.local_daemon import short_folder


@pytest.fixture(autouse=True)
def fresh_import(example):
    sys.modules.pop("kvtierd_example", None)
    yield
    sys.modules.pop("kvtierd_example", None)


class TestFlat(BackendKit):
    @pytest.fixture
    def bare(self, tmp_path):
        return self.make(tmp_path / "flat")

    @pytest.fixture
    def backend(self, bare):
        return bare

    def make(self, folder):
        backend = make_added("flat", "flat", {"folder": str(folder)})
        backend.open()
        return backend

    def reopen(self, backend):
        return self.make(backend.folder)

    @pytest.fixture
    def raw_get(self, bare):
        def get(block_id):
            path = bare.path(block_id)
            return path.read_bytes() if path.exists() else None

        return get

    @pytest.fixture
    def raw_put(self, bare):
        def put(block_id, data):
            path = bare.path(block_id)
            path.unlink() if data is None else path.write_bytes(data)

        return put


class TestFlatBehindFaults(TestFlat):
    @pytest.fixture
    def backend(self, bare):
        return FaultyBackend(bare)

    def reopen(self, backend):
        return FaultyBackend(self.make(backend.inner.folder))


def test_the_package_is_found_with_its_name_and_version():
    assert installed()["flat"].origin == "kvtierd-example 0.1 (kvtierd_example:make)"


def tier(folder: Path):
    return {
        "name": "shelf",
        "type": "flat",
        "max_bytes": "1MiB",
        "options": {"folder": str(folder / "shelf")},
    }


def test_a_daemon_stores_evicts_and_finds_again_in_an_added_tier():
    with short_folder("plugin") as folder:
        rig = DaemonRig(folder, slots=64, tiers=[tier(folder)])
        try:
            rig.start()
            blocks = chain(16)
            with rig.attach() as session:
                store(session, blocks)
                rig.settle()
                assert rig.tier("shelf")["blocks"] == 16
                session.evict([block.key for block in blocks], tiers=["cpu"])
                assert load(session, blocks) == ["shelf"] * 16
                rig.agree()
            rig.restart()
            with rig.attach() as session:
                rig.settle()
                assert load(session, blocks) == ["shelf"] * 16
            for number in range(20):  # 8 KiB each: 1 MiB holds 128
                with rig.attach() as session:
                    store(session, chain(16, f"more {number}"))
                    rig.settle()
            assert rig.tier("shelf")["counters"]["evictions"] > 0
            assert sum(path.stat().st_size for path in (folder / "shelf").iterdir()) <= 1 << 20
            rig.agree()
            assert rig.daemon.stop() == 0
            assert rig.complaints() == []
        finally:
            rig.close()


def test_check_says_where_a_type_comes_from(tmp_path, capsys):
    config = tmp_path / "tiers.yaml"
    tiers = [{"name": "cpu", "type": "cpu"}, tier(tmp_path)]
    config.write_text(json.dumps({"version": 1, "pool": {"bytes": "16MiB"}, "tiers": tiers}))
    assert main(["check", "--config", str(config)]) == 0
    out = capsys.readouterr().out
    assert "  tier shelf: flat, from kvtierd-example 0.1 (kvtierd_example:make)\n" in out
    assert main(["check", "--config", str(config), "--json"]) == 0
    types = json.loads(capsys.readouterr().out)["tier_types"]
    assert types["cpu"] == "built in"
    assert types["shelf"].startswith("from kvtierd-example 0.1")
    assert not (tmp_path / "shelf").exists(), "check touches no storage"


def test_check_shows_what_a_package_refuses(tmp_path, capsys):
    config = tmp_path / "tiers.yaml"
    wrong = {**tier(tmp_path), "options": {"directory": "/x"}}
    tiers = [{"name": "cpu", "type": "cpu"}, wrong]
    config.write_text(json.dumps({"version": 1, "pool": {"bytes": "16MiB"}, "tiers": tiers}))
    assert main(["check", "--config", str(config)]) == 78
    err = capsys.readouterr().err
    assert "tier 'shelf': type 'flat' of kvtierd-example 0.1" in err
    assert "ValueError: write options: {folder: PATH} and nothing else" in err
