"""The tools against a real daemon and its real files: inventory, gc, verify and bench tiers."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvtierd.client import Client, Group, Layout, group_of, hash_of
from kvtierd.errors import RequestRefused
from kvtierd.testing.daemon_rig import BLOCK, LAYOUT, chain, keys_of, store

pytestmark = pytest.mark.timeout(90)

OTHER = Layout(
    model="org/other", dtype="float16", layout="test", groups=(Group(tokens_per_block=4, block_bytes=BLOCK),)
)

BIG_BLOCK = 512 << 10
BIG = Layout(
    model="org/big",
    dtype="float16",
    layout="test",
    groups=(Group(tokens_per_block=4, block_bytes=BIG_BLOCK),),
)
"""Blocks large enough for a file each."""


@pytest.fixture
def big(make):
    """A running daemon with room for 32 big blocks."""
    return make(slots=32 * BIG_BLOCK // BLOCK).start()


def file_of(rig, block, layout=BIG):
    name = f"{hash_of(block.key).hex()}.{group_of(block.key)}"
    return rig.folder / "disk" / "v1" / layout.namespace() / hash_of(block.key)[-1:].hex() / name


def tool(*arguments: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "kvtierd", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    assert not done.stderr or code, done.stderr
    return done.stdout + done.stderr


def rows(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines()]


def fill(rig, layout=LAYOUT, seed="chain", count=8):
    blocks = chain(count, seed)
    with rig.attach(layout) as session:
        store(session, blocks)
    return blocks


def config(rig) -> list[str]:
    return ["--config", str(rig.daemon.config)]


# -- inventory ------------------------------------------------------------------------------------------


def test_inventory_counts_all_namespaces_as_the_sessions_own_inventories_do(rig):
    fill(rig)
    fill(rig, OTHER, "other", 5)
    rig.settle()
    counted = {
        (row["tier"], row["namespace"]): (row["blocks"], row["model"])
        for row in rows(tool("inventory", *config(rig), "--json"))
    }
    assert counted == {
        ("cpu", LAYOUT.namespace()): (8, "tiny"),
        ("cpu", OTHER.namespace()): (5, "org/other"),
        ("disk", LAYOUT.namespace()): (8, "tiny"),
        ("disk", OTHER.namespace()): (5, "org/other"),
    }
    shown = tool("inventory", *config(rig), "--tier", "disk", "--model", "other")
    assert shown.splitlines()[1].split()[:4] == ["disk", OTHER.namespace(), "org/other", "5"]
    assert len(shown.splitlines()) == 2


def test_every_block_is_listed_over_many_pages(make):
    rig = make(slots=4096).start()
    blocks = fill(rig, count=3000)
    rig.settle()
    listed = rows(tool("inventory", *config(rig), "--blocks", "--json"))
    assert len(listed) == 6000
    for name in ("cpu", "disk"):
        hashes = {row["hash"] for row in listed if row["tier"] == name}
        assert hashes == {hash_of(key).hex() for key in keys_of(blocks)}
    assert {row["bytes"] for row in listed if row["tier"] == "cpu"} == {BLOCK}


def test_a_survey_is_for_the_control_socket_and_pages_follow_each_other(rig):
    fill(rig)
    rig.settle()
    with pytest.raises(RequestRefused, match="surveys are made at"):
        list(rig.client.survey())
    with Client(str(rig.folder / "run" / "control.sock"), deadline=10.0) as control:
        assert sum(len(page.entries) for page in control.survey()) == 16
        with pytest.raises(RequestRefused, match="no tier is named 'tape'; the tiers are cpu, disk"):
            list(control.survey("tape"))


# -- gc -------------------------------------------------------------------------------------------------


def test_gc_refuses_what_a_living_daemon_uses(rig):
    fill(rig)
    rig.settle()
    said = tool("gc", *config(rig), "--yes", "--keep", "none", code=74)
    assert f"tier 'disk': the daemon with process id {rig.daemon.pid} uses it" in said
    assert "stop it first" in said


def test_gc_refuses_a_root_that_a_daemon_has_locked(rig):
    fill(rig)
    rig.settle()
    said = tool("gc", "--path", str(rig.folder / "disk"), "--yes", code=74)
    assert "in use by" in said


def test_gc_removes_orphans_when_told_to_and_the_daemon_starts_without_them(rig):
    kept, gone = fill(rig), fill(rig, OTHER, "other", 5)
    rig.settle()
    assert rig.daemon.stop() == 0
    arguments = ["gc", *config(rig), "--keep", LAYOUT.namespace(), "--json"]
    for yes in ([], ["--yes"]):
        found = {row["name"]: row for row in rows(tool(*arguments, *yes))}
        assert (found[LAYOUT.namespace()]["marked"], found[LAYOUT.namespace()]["blocks"]) == (False, 8)
        assert (found[OTHER.namespace()]["marked"], found[OTHER.namespace()]["blocks"]) == (True, 5)
        assert found[OTHER.namespace()]["removed"] is bool(yes)
        assert found[OTHER.namespace()]["model"] == "org/other"
    assert "nothing to remove" in tool("gc", *config(rig))
    rig.router.close()
    rig.router = type(rig.router)()
    rig.start()
    with rig.attach() as session:
        assert session.lookup(keys_of(kept)).prefix == 8
    with rig.attach(OTHER) as session:
        assert session.lookup(keys_of(gone)).prefix == 0


def test_gc_finds_what_a_killed_writer_left_behind(big):
    rig = big
    blocks = fill(rig, BIG)
    rig.settle()
    assert rig.daemon.stop() == 0
    folder = file_of(rig, blocks[0]).parent
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    left = folder / f".tmp-{boot}-1-{'0' * 16}"
    left.write_bytes(bytes(8192))
    os.utime(left, (1, 1))
    assert [row["what"] for row in rows(tool("gc", *config(rig), "--json"))] == ["temporary", "namespace"]
    assert left.exists()
    assert "removed 1 of 2: 8.0 KiB" in tool("gc", "--path", str(rig.folder / "disk"), "--yes")
    assert not left.exists()


# -- verify ---------------------------------------------------------------------------------------------


def test_verify_finds_a_flipped_byte_in_packed_blocks_too(rig):
    fill(rig, count=12)
    rig.settle()
    assert rig.daemon.stop() == 0
    copy = max(rig.copies().values(), key=lambda copy: copy.offset)
    copy.flip(copy.nbytes - 1)
    said = tool("verify", *config(rig), code=74)
    assert "payload checksum differs" in said
    assert "1 block is not good" in said
    assert "1 block was not good and was taken out" in tool("verify", *config(rig), "--remove")
    assert "every block is good" in tool("verify", *config(rig))


def test_verify_finds_every_flipped_byte_and_takes_it_out_when_told_to(big):
    rig = big
    blocks = fill(rig, BIG, count=12)
    rig.settle()
    assert rig.daemon.stop() == 0
    assert "every block is good" in tool("verify", *config(rig))
    for number, offset in ((2, -1), (5, 60), (7, 4096)):
        path = file_of(rig, blocks[number])
        raw = bytearray(path.read_bytes())
        raw[offset] ^= 4
        path.write_bytes(raw)
    found = rows(tool("verify", *config(rig), "--json", code=74))
    bad, (total,) = found[:-1], found[-1:]
    assert {row["hash"] for row in bad} == {hash_of(blocks[number].key).hex() for number in (2, 5, 7)}
    assert (total["good"], total["corrupt"], total["removed"]) == (9, 3, 0)
    assert file_of(rig, blocks[2]).exists(), "nothing is changed without --remove"
    assert "3 blocks were not good and were taken out" in tool("verify", *config(rig), "--remove")
    assert not file_of(rig, blocks[2]).exists()
    assert "every block is good" in tool("verify", *config(rig))
    assert "quarantined" in tool("gc", *config(rig))


def test_a_living_daemons_blocks_are_proved_and_never_taken_out(rig):
    fill(rig)
    rig.settle()
    assert "every block is good" in tool("verify", *config(rig))
    assert [row["what"] for row in rows(tool("gc", *config(rig), "--json"))] == ["namespace"]
    assert "stop it first" in tool("verify", *config(rig), "--remove", code=74)


def test_verify_shows_a_bar_on_a_terminal(rig):
    fill(rig)
    rig.settle()
    assert rig.daemon.stop() == 0
    leader, follower = pty.openpty()
    seen = bytearray()

    def read() -> None:
        try:
            while chunk := os.read(leader, 4096):
                seen.extend(chunk)
        except OSError:  # the other end is closed
            pass

    reader = threading.Thread(target=read)
    reader.start()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "kvtierd", "verify", *config(rig)],
            stdout=subprocess.PIPE,
            stderr=follower,
            timeout=60,
            check=True,
            text=True,
            env={**os.environ, "COLUMNS": "100"},
        )
    finally:
        os.close(follower)
        reader.join(20)
        os.close(leader)
    assert b"verify disk  [" in seen
    assert seen.endswith(b"\r"), "the bar is wiped"
    assert "every block is good" in done.stdout


# -- bench tiers ----------------------------------------------------------------------------------------


def test_bench_tiers_measures_a_folder_beside_plain_files_and_leaves_nothing(tmp_path):
    """L108."""
    arguments = ("--path", str(tmp_path), "--total", "2MiB", "--rounds", "2", "--cold")
    done = tool("bench", "tiers", *arguments, "--block-bytes", "64KiB", "--block-bytes", "5000", "--json")
    small, odd = json.loads(done)["details"]
    assert (small["block_bytes"], small["blocks"], odd["blocks"]) == (65536, 32, 419)
    for result in (small, odd):
        assert set(result["figures"]) == {
            "memcpy",
            "checksum",
            "plain write",
            "store",
            "plain read",
            "load",
            "load, cached",
            "plain read, cold",
            "load, cold",
        }
        assert all(
            figure["gb_per_second"] > 0 and len(figure["seconds"]) == 2
            for figure in result["figures"].values()
        )
        assert result["checksum_share"]["store"] > 0
        assert set(result["policies"]) == {"plain write", "plain read", "plain read, cold"}
    assert list(tmp_path.iterdir()) == []
    shown = tool("bench", "tiers", *arguments, "--block-bytes", "64KiB").splitlines()
    assert shown[0].startswith(f"{tmp_path} (")
    assert shown[0].endswith("32 blocks of 64KiB, 2 writers, 4 readers, 2 rounds")


def test_plain_files_of_the_bench_pass_the_page_cache_as_the_tier_is_told_to(tmp_path):
    from kvtierd.cli.bench_copies import Arena
    from kvtierd.cli.bench_plain import PlainFiles
    from kvtierd.config.schema import FsTier

    for size in (5000, 600_000):  # packed by the tier, and a file each
        with Arena(size, 5) as arena:
            for io in ("auto", "direct", "buffered"):
                own = tmp_path / f"{size}-{io}"
                own.mkdir()
                tier = FsTier(name="bench", path=own, max_bytes="unlimited", io=io, fsync="data")
                plain = PlainFiles(tier, own, arena)
                assert plain.write_policy.endswith(", fdatasync")
                assert plain.write_policy.startswith("page cache") == (
                    io == "buffered" or (io == "direct" and plain.read_policy(cold=False) == "page cache")
                )
                for cold in (False, True):
                    plain.write()
                    plain.read(cold=cold)
                    assert arena.wrong() == 0
                assert io != "buffered" or plain.read_policy(cold=True) == "page cache"


def test_bench_tiers_says_when_a_folder_cannot_be_used(tmp_path):
    assert "cannot use" in tool("bench", "tiers", "--path", str(tmp_path / "none"), code=74)
    assert "free; needs" in tool("bench", "tiers", "--path", str(tmp_path), "--total", "900TiB", code=74)


def test_the_bytes_of_the_bench_are_those_of_the_blocks():
    """The comparison sees one wrong byte."""
    from kvtierd.cli.bench_copies import Arena, memcpy

    with Arena(5000, 4) as arena:
        assert arena.wrong() == 4
        memcpy(arena)
        assert arena.wrong() == 0
        memcpy(arena)
        arena.targets()[2][4999] ^= 1
        assert arena.wrong() == 1
