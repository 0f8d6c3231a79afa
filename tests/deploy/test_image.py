"""The image as it is built from this repository: small, non-root, read-only, complete for every probe."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LIMIT = 70 << 20
"""What the image adds to its base. Without torch, which alone is ten times that."""


def tree_bytes(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


def test_the_image_adds_little_to_its_base_and_no_torch(image):
    opt = image.rootfs / "opt" / "kvtierd"
    size = tree_bytes(opt)
    print(f"\nthe image adds {size / (1 << 20):.0f} MiB to its base")
    assert 20 << 20 < size < LIMIT
    assert not list(opt.glob("lib/python3*/site-packages/torch"))
    assert not list(opt.glob("lib/python3*/site-packages/pip"))


def test_the_image_says_how_it_wants_to_be_run(image):
    settings = image.settings
    assert settings["User"] == "65532:65532"
    assert settings["StopSignal"] == "SIGTERM"
    assert settings["Entrypoint"] == ["kvtierd"]
    assert settings["Cmd"] == ["serve", "--config", "/etc/kvtierd/tiers.yaml"]
    assert settings["Healthcheck"]["Test"] == ["CMD", "kvtierd", "status", "--quiet"]
    labels = settings["Labels"]
    assert labels["org.opencontainers.image.version"] == "1.2.3"
    assert labels["org.opencontainers.image.revision"] == "abc"


def test_nothing_in_the_image_belongs_to_the_daemons_user_but_its_own_folders(image):
    """So that a daemon gone wrong cannot change its own program."""
    own = {
        str(path.relative_to(image.rootfs))
        for path in image.rootfs.rglob("*")
        if not path.is_symlink() and path.lstat().st_uid == 65532
    }
    assert own == {"run/kvtierd", "var/lib/kvtierd", "var/cache/kvtierd"}


def test_the_glue_is_the_package_and_nothing_else(image):
    glue = image.rootfs / "opt" / "kvtierd" / "glue"
    assert (glue / "kvtierd" / "engines" / "vllm" / "__init__.py").is_file()
    assert not list(glue.rglob("*.so"))
    assert all(stat.S_IMODE(path.stat().st_mode) & 0o004 for path in glue.rglob("*"))
