"""Whose stored namespaces are: read from their records, which nobody can make say something else."""

import json

import msgspec

from kvtierd.core.model import Group, Layout
from kvtierd.edges.backends import fs_records, fs_tree
from kvtierd.edges.backends.fs import FsBackend

LAYOUT = Layout(model="m", dtype="f", layout="l", groups=(Group(tokens_per_block=1, block_bytes=4096),))


def test_tenants_are_read_back_and_what_is_not_sound_is_left_out(tmp_path):
    backend = FsBackend("disk", tmp_path)
    backend.open()
    layouts = {name: msgspec.structs.replace(LAYOUT, tenant=name) for name in ("a", "b", "c", "d", None)}
    for layout in layouts.values():
        backend.describe(layout.namespace(), layout)
    folders = {
        name: tmp_path / fs_tree.BLOCKS / layout.namespace() / fs_tree.RECORD
        for name, layout in layouts.items()
    }
    folders["b"].write_text("{")
    forged = json.loads(folders["c"].read_text())
    forged["layout"]["tenant"] = "a"
    folders["c"].write_text(json.dumps(forged))
    folders["d"].unlink()
    folders["d"].symlink_to(folders["a"])
    assert backend.tenants() == {layouts["a"].namespace(): "a", layouts[None].namespace(): None}
    backend.close()


def test_a_folder_that_is_not_there_says_nothing(tmp_path):
    assert fs_records.tenants(tmp_path / "missing") == {}
