"""``kvtierd gc``: shows everything, removes only what was marked, and that only with ``--yes``."""

from __future__ import annotations

import json

import pytest

from kvtierd.cli.gc import Choice, Item, collect, json_lines, lines, refuse_typos
from kvtierd.cli.main import main
from kvtierd.edges.backends.base import Leftover, Maintained, StoredNamespace
from kvtierd.edges.backends.memory import MemoryBackend
from kvtierd.errors import ConfigError, ExitCode

DAY = 86400.0
NOW = 1_000 * DAY
OLD, NEW, SILENT = "a" * 32, "b" * 32, "c" * 32


class Shelf(MemoryBackend):
    """Storage with something of everything; ``gone`` notes what was removed."""

    def __init__(self):
        super().__init__("shelf")
        self.gone = []
        self.left = {"temporary": [Leftover("v1/.tmp-1", 4096)], "quarantined": [Leftover("q/\x1b[2J", 8192)]}
        self.spaces = [
            StoredNamespace(OLD, "org/old", 10, 40960, NOW - 90 * DAY),
            StoredNamespace(NEW, "org/new", 20, 81920, NOW - DAY / 2),
            StoredNamespace(SILENT, "", 1, 4096, 0.0),
        ]

    def namespaces(self):
        return list(self.spaces)

    def remove_namespace(self, namespace):
        self.gone.append(namespace)
        self.spaces = [space for space in self.spaces if space.namespace != namespace]

    def _leftovers(self, kind, remove):
        found = self.left[kind]
        if remove:
            self.left[kind] = []
            self.gone.extend(one.place for one in found)
        return found

    def stale_temporaries(self, *, remove=False):
        return self._leftovers("temporary", remove)

    def quarantined(self, *, remove=False):
        return self._leftovers("quarantined", remove)

    def verify(self):
        yield []


def marked(items):
    return [item.name for item in items if item.marked]


def test_the_fake_is_what_the_tools_ask_for():
    assert isinstance(Shelf(), Maintained)


def test_a_dry_run_shows_everything_and_changes_nothing():
    shelf = Shelf()
    for choice in (Choice((), None, NOW), Choice((NEW,), None, NOW)):
        items = collect("disk", shelf, choice, remove=False)
        assert len(items) == 5
        assert not any(item.removed for item in items)
    assert shelf.gone == []


@pytest.mark.parametrize(
    ("choice", "orphans"),
    [
        (Choice((), None, NOW), []),
        (Choice((NEW,), None, NOW), [OLD, SILENT]),
        (Choice(("b", "c"), None, NOW), [OLD]),
        (Choice((), 30 * DAY, NOW), [OLD, SILENT]),
        (Choice(("a",), 30 * DAY, NOW), [SILENT]),
        (Choice((), 365 * DAY, NOW), [SILENT]),
    ],
)
def test_only_namespaces_that_were_asked_for_are_orphans(choice, orphans):
    shelf = Shelf()
    items = collect("disk", shelf, choice, remove=True)
    assert marked(items) == ["v1/.tmp-1", "q/\x1b[2J", *orphans]
    assert shelf.gone == marked(items)
    assert all(item.removed == item.marked for item in items)


def test_a_namespace_to_keep_that_is_not_there_stops_everything():
    """A typing mistake would make an orphan of every namespace."""
    refuse_typos([NEW, "aa", "c"], [Shelf(), Shelf()])
    with pytest.raises(ConfigError, match=r"--keep dd: no namespace begins so; nothing was changed"):
        refuse_typos([NEW, "dd"], [Shelf()])
    with pytest.raises(ConfigError):
        refuse_typos([NEW], [])


def test_a_second_run_finds_nothing_to_remove():
    shelf = Shelf()
    choice = Choice((NEW,), None, NOW)
    collect("disk", shelf, choice, remove=True)
    again = collect("disk", shelf, choice, remove=True)
    assert [(item.what, item.name) for item in again] == [("namespace", NEW)]
    assert list(lines(again, removed=True))[-1] == "removed 0 of 1: 0 B"


def test_people_see_what_would_go_and_how_much_it_is():
    shown = list(lines(collect("disk", Shelf(), Choice((NEW,), None, NOW), remove=False), removed=False))
    assert shown[0].split() == [
        "tier",
        "what",
        "name",
        "model",
        "blocks",
        "bytes",
        "unused",
        "for",
        "decision",
    ]
    assert shown[2].split()[2] == "q/\\x1b[2J", "nothing that a terminal takes for a command"
    assert shown[3].endswith("90d         to be removed")
    assert shown[4].endswith("12h         kept")
    assert shown[-1] == "would remove 4 of 5: 56.0 KiB; nothing was changed, --yes does it"
    kept = collect("disk", Shelf(), Choice((), None, NOW), remove=False)[2:]
    assert list(lines(kept, removed=False))[-1] == "nothing to remove"
    assert list(lines([], removed=False)) == ["nothing found"]


def test_json_has_one_object_per_thing_found():
    rows = [
        json.loads(line)
        for line in json_lines(collect("disk", Shelf(), Choice((NEW,), None, NOW), remove=False))
    ]
    assert [row["what"] for row in rows] == ["temporary", "quarantined", "orphan", "namespace", "orphan"]
    assert rows[2] == {
        "tier": "disk",
        "what": "orphan",
        "name": OLD,
        "model": "org/old",
        "blocks": 10,
        "bytes": 40960,
        "unused_seconds": 90 * DAY,
        "marked": True,
        "removed": False,
    }


def test_a_folder_without_a_tree_is_refused_and_left_as_it_is(tmp_path, capsys):
    assert main(["gc", "--path", str(tmp_path / "typo"), "--yes"]) == ExitCode.IO
    assert main(["gc", "--path", str(tmp_path)]) == ExitCode.IO
    assert f"there is no kvtierd tree in {tmp_path}" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_row_fits_a_screen_whatever_the_names_are():
    """Hashes are cut for people; a program gets them whole."""
    place = f"quarantine/{'1' * 20}.{OLD}.{'b' * 64}.0"
    items = [
        Item("disk", "quarantined", place, "", 0, 4096, None, True, False),
        Item(
            "disk", "namespace", OLD, "an-organisation/" + "a-long-name-" * 4 + "70B", 1, 2, 3.0, True, False
        ),
    ]
    shown = list(lines(items, removed=False))
    assert max(map(len, shown)) <= 120
    assert f"{OLD[:12]}…" in shown[2]
    assert "70B " in shown[2]
    assert json.loads(next(json_lines(items)))["name"] == place


def test_a_path_is_named_as_a_path_and_not_as_a_tier(tmp_path, capsys):
    assert main(["gc", "--path", str(tmp_path)]) == ExitCode.IO
    assert capsys.readouterr().err == f"kvtierd: there is no kvtierd tree in {tmp_path}\n"
    assert main(["verify", "--path", str(tmp_path)]) == ExitCode.IO
    assert "tier" not in capsys.readouterr().err.replace("kvtierd", "").replace(str(tmp_path), "")


@pytest.mark.parametrize("age", ["soon", "0s", "0d", "5"])
def test_an_age_that_is_none_is_answered_with_the_form_of_one(tmp_path, capsys, age):
    assert main(["gc", "--path", str(tmp_path), "--unused-for", age]) == ExitCode.USAGE
    err = capsys.readouterr().err
    assert f"such as 30m, 12h or 30d (got '{age}')" in err


def test_wrong_arguments_are_refused(tmp_path):
    assert main(["gc"]) == ExitCode.USAGE
    assert main(["gc", "--path", str(tmp_path), "--tier", "disk"]) == ExitCode.CONFIG
