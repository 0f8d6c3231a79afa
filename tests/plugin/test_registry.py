"""Added tier types: every mistake of a tier file or a package is said with the name of who made it."""

from __future__ import annotations

import json

import pytest

from kvtierd.config.load import load_tier_file
from kvtierd.config.plugins import installed
from kvtierd.config.schema import PluginTier
from kvtierd.edges.backends.factory import make_backend
from kvtierd.edges.backends.memory import MemoryBackend
from kvtierd.errors import ConfigError


def tier_file(folder, **tier):
    path = folder / "tiers.yaml"
    tiers = [{"name": "cpu", "type": "cpu"}, {"name": "extra", **tier}]
    path.write_text(json.dumps({"version": 1, "pool": {"bytes": "16MiB"}, "tiers": tiers}, indent=1))
    return path


def load(folder, **tier):
    return load_tier_file(tier_file(folder, **tier), {})


def module(site, name, text):
    (site / f"{name}.py").write_text(text)


def test_common_settings_are_checked_and_options_are_passed_through(distribution, tmp_path):
    site = distribution("acme-tiers", {"acme": "acme_tiers:make"})
    module(
        site,
        "acme_tiers",
        "from kvtierd.edges.backends.memory import MemoryBackend\n"
        "def make(name, options):\n"
        "    backend = MemoryBackend(name)\n"
        "    backend.options = options\n"
        "    return backend\n",
    )
    options = {"endpoint": "x:1", "depth": 3, "nested": {"list": [1, None, True]}}
    loaded = load(tmp_path, type="acme", deadline="5s", locality="REMOTE", options=options)
    tier = loaded.tier_file.tiers[1]
    assert isinstance(tier, PluginTier)
    assert (tier.deadline, tier.max_bytes) == (5.0, "unlimited")
    assert loaded.warnings == ("tier 'extra': max_bytes is unlimited: the daemon will evict nothing from it",)
    backend = make_backend(tier)
    assert isinstance(backend, MemoryBackend)
    assert (backend.name, backend.options) == ("extra", options)
    with pytest.raises(ConfigError, match=r"tiers\.1\.path: unknown key"):
        load(tmp_path, type="acme", path="/x")
    with pytest.raises(ConfigError, match=r"tiers\.1\.readers"):
        load(tmp_path, type="acme", readers=0)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("acmee", "did you mean 'acme'? built in are cpu, fs and object; installed packages add acme"),
        ("filesystem-x", "built in are cpu, fs and object; installed packages add acme"),
        ("FS", "did you mean 'fs'?"),
    ],
)
def test_an_unknown_type_is_refused_with_the_nearest_and_all_known(distribution, tmp_path, kind, said):
    distribution("acme-tiers", {"acme": "acme_tiers:make"})
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, type=kind, path="/x")
    (line,) = str(caught.value).splitlines()
    assert f"tiers.1.type: no tier type is named {kind!r}; " in line
    assert said in line


def test_without_any_package_the_message_says_so(tmp_path):
    assert "no installed package adds one" in _error(lambda: load(tmp_path, type="acme"))


def _error(call):
    with pytest.raises(ConfigError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "import acme_sdk_missing",
            "cannot be imported: ModuleNotFoundError: No module named 'acme_sdk_missing'",
        ),
        ("1 / 0", "cannot be imported: ZeroDivisionError: division by zero"),
        ("other = 1", "cannot be imported: AttributeError:"),
        ("make = 5", "names something that cannot be called"),
        (
            "def make(name, options): raise ValueError('no bucket')",
            "refuses the tier's options: ValueError: no",
        ),
        ("def make(name): pass", "refuses the tier's options: TypeError:"),
        ("def make(name, options): return object()", "makes no backend: object lacks open, scan,"),
    ],
)
def test_what_a_package_gets_wrong_is_said_in_its_name(distribution, tmp_path, text, said, request):
    name = f"acme_wrong_{abs(hash(text))}"
    site = distribution("acme-tiers", {"acme": f"{name}:make"}, version="2.5")
    module(site, name, text + "\n")
    tier = load(tmp_path, type="acme").tier_file.tiers[1]
    message = _error(lambda: make_backend(tier))
    assert message.startswith(f"tier 'extra': type 'acme' of acme-tiers 2.5 ({name}:make) ")
    assert said in message


def test_two_packages_with_one_type_are_refused(distribution, tmp_path):
    distribution("acme-tiers", {"acme": "acme_tiers:make"})
    distribution("other-tiers", {"acme": "other_tiers:make"}, version="3")
    message = _error(lambda: load(tmp_path, type="acme"))
    assert "acme-tiers 0.1 (acme_tiers:make)" in message
    assert "other-tiers 3 (other_tiers:make)" in message


def test_a_package_cannot_take_the_place_of_a_built_in_type(distribution):
    distribution(
        "acme-tiers", {"fs": "acme_tiers:make", "object": "acme_tiers:make", "acme": "acme_tiers:make"}
    )
    assert list(installed()) == ["acme"]
