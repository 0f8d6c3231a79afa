"""From file and environment to values with origins, or to errors that say where and what to do."""

import re
from pathlib import Path

import pytest
import yaml

from kvtierd.cli.check import effective_yaml
from kvtierd.config.load import load_tier_file
from kvtierd.config.schema import Credentials, ObjectTier
from kvtierd.core.model import Locality
from kvtierd.errors import ConfigError, ExitCode

EXAMPLES = Path(__file__).parents[2] / "config"
GOOD = """\
version: 1
pool: { bytes: 1GiB }
tiers:
  - { name: cpu, type: cpu }
  - name: disk
    type: fs
    path: /var/cache/kvtierd
    max_bytes: 2GiB
"""


@pytest.fixture
def load(tmp_path):
    def load(text, **environ):
        path = tmp_path / "tiers.yaml"
        path.write_text(text)
        return load_tier_file(path, environ)

    return load


@pytest.fixture
def errors(load):
    """The lines of the ConfigError, with the file's folder cut off."""

    def errors(text, **environ):
        with pytest.raises(ConfigError) as caught:
            load(text, **environ)
        assert caught.value.exit_code == ExitCode.CONFIG
        return [re.sub(r"^/\S*/tiers", "tiers", line) for line in str(caught.value).splitlines()]

    return errors


@pytest.mark.parametrize("name", ["quickstart.yaml", "full.yaml"])
def test_the_examples_load_without_a_warning(name):
    loaded = load_tier_file(EXAMPLES / name, {})
    assert loaded.warnings == ()


def test_the_quickstart_works_unprivileged():
    quick = load_tier_file(EXAMPLES / "quickstart.yaml", {}).tier_file
    assert quick.pool.bytes == 256 << 20
    for path in (quick.runtime_dir, quick.state_dir, quick.tiers[1].path):
        assert path.is_relative_to("/tmp/kvtierd")


def test_the_full_example_shows_every_key():
    loaded = load_tier_file(EXAMPLES / "full.yaml", {})
    assert not [path for path, origin in loaded.origins.items() if origin == "default"]
    text = (EXAMPLES / "full.yaml").read_text()
    commented = "\n".join(
        line.replace("# ", "", 1) if line.startswith("  # ") else line for line in text.splitlines()
    )
    lake = yaml.safe_load(commented)["tiers"][2]
    assert lake.keys() == ObjectTier.model_fields.keys()
    assert lake["credentials"].keys() == Credentials.model_fields.keys()


def test_the_commented_object_tier_of_the_full_example_loads(load):
    text = (EXAMPLES / "full.yaml").read_text()
    loaded = load(re.sub(r"^  # ( ?)", r"  \1", text, flags=re.MULTILINE))
    assert loaded.tier_file.tiers[2] == ObjectTier(
        name="lake", url="s3://bucket/prefix", region="us-east-1", locality=Locality.REMOTE
    )


@pytest.mark.parametrize(
    ("typo", "known"),
    [("root_dri: /x", "path"), ("localty: LOCAL", "locality"), ("max_byte: 1GiB", "max_bytes")],
)
def test_an_unknown_key_is_refused_with_file_line_path_and_nearest_key(errors, typo, known):
    """L88."""
    key = typo.partition(":")[0]
    assert errors(GOOD + f"    {typo}\n") == [
        f"tiers.yaml:9: tiers.1.{key}: unknown key; did you mean {known!r}?"
    ]


def test_a_key_that_was_misspelt_is_not_called_missing_too(errors):
    assert errors(GOOD.replace("max_bytes", "max_byte")) == [
        "tiers.yaml:8: tiers.1.max_byte: unknown key; did you mean 'max_bytes'?"
    ]


@pytest.mark.parametrize(
    ("key", "message"),
    [("bind: 'tcp://x'", "bind: write host:port"), ("preset: foo", "preset: write 'vllm-router', ")],
)
def test_a_wrong_audience_does_not_make_the_list_too_short(errors, key, message):
    (line,) = errors(GOOD + f"events: {{ audiences: [{{ name: a, {key} }}] }}\n")
    assert line.startswith(f"tiers.yaml:9: events.audiences.0.{message}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD.replace("1GiB", "1KiB"), "2: pool.bytes: write at least 4KiB (got '1KiB')"),
        (
            GOOD + "engine: { max_frame_bytes: 8GiB }",
            "9: engine.max_frame_bytes: write at most 1GiB (got '8GiB')",
        ),
        (GOOD + "events: { ring_batches: 0 }", "9: events.ring_batches: write at least 1 (got 0)"),
        (GOOD + "events: { audiences: [] }", "9: events.audiences: write at least 1 in this list"),
        (GOOD + "events: { model: '' }", "9: events.model: write at least 1 character (got '')"),
    ],
)
def test_a_bound_is_told_in_plain_words_with_its_unit(errors, text, message):
    assert errors(text) == [f"tiers.yaml:{message}"]


@pytest.mark.parametrize("more", ["", ", path: /x, max_bytes: 1GiB"])
def test_a_first_tier_that_stores_is_told_that_the_pool_comes_first(errors, more):
    (line,) = errors(f"version: 1\npool: {{ bytes: 1GiB }}\ntiers: [{{ name: disk, type: fs{more} }}]\n")
    assert line.startswith("tiers.yaml:3: tiers.0")
    assert line.endswith("the first tier must be the primary one, of type cpu")


def test_an_unknown_key_like_no_other_is_refused_with_the_known_ones(errors):
    assert errors(GOOD + "xyzzy: 1\n") == [
        "tiers.yaml:9: xyzzy: unknown key; known keys here: version, runtime_dir, state_dir, pool, tiers, "
        "tenants, events, admin, log, traces, access, engine, watch_file"
    ]


def test_a_cpu_tier_with_a_locality_is_told_why(errors):
    text = GOOD.replace("type: cpu }", "type: cpu, locality: LOCAL }")
    assert errors(text) == [
        "tiers.yaml:4: tiers.0.locality: a cpu tier has no locality: only fs and object tiers may have one"
    ]


def test_all_errors_come_at_once_in_the_order_of_the_file(errors):
    text = (
        GOOD.replace("1GiB", "big")
        .replace("max_bytes: 2GiB", "xyzzy: 2GiB")
        .replace("type: cpu", "type: gpu")
    )
    assert [
        line.split(": ", 2)[:2] for line in errors(text + "engine: { job_ttl: 5 }\n", KVTIERD__NO__SUCH="1")
    ] == [
        ["tiers.yaml:2", "pool.bytes"],
        ["tiers.yaml:4", "tiers.0.type"],
        ["tiers.yaml:5", "tiers.1.max_bytes"],
        ["tiers.yaml:8", "tiers.1.xyzzy"],
        ["tiers.yaml:9", "engine.job_ttl"],
        ["env KVTIERD__NO__SUCH", "no"],
    ]


def test_checks_between_values_carry_the_line_of_the_value(errors):
    text = GOOD + "  - { name: disk, type: fs, path: /other, max_bytes: 2GiB }\n"
    assert errors(text) == ["tiers.yaml:9: tiers.2.name: another tier is already named 'disk'"]


def test_a_missing_section_is_named(errors):
    assert errors("version: 1\ntiers: [{ name: cpu, type: cpu }]\n") == ["tiers.yaml:1: pool: is required"]


def test_a_tier_without_a_type_is_told_the_types(errors):
    assert errors(GOOD + "  - { name: x }\n") == ["tiers.yaml:9: tiers.2.type: write type: cpu, fs or object"]


def test_a_duplicate_key_is_refused(errors):
    assert errors(GOOD + "version: 1\n") == ["tiers.yaml:9: version: duplicate key, first written on line 1"]
    assert errors(GOOD + "    path: /y\n") == [
        "tiers.yaml:9: tiers.1.path: duplicate key, first written on line 7"
    ]


@pytest.mark.parametrize("word", ["yes", "True", "TRUE", "on", "1", '"true"', "no", "~"])
def test_yaml_words_for_booleans_are_refused(errors, word):
    """L90."""
    (line,) = errors(GOOD + f"    events: {word}\n")
    assert line.startswith("tiers.yaml:9: tiers.1.events: write true or false (got ")


@pytest.mark.parametrize(("word", "value"), [("true", True), ("false", False)])
def test_true_and_false_are_booleans(load, word, value):
    assert load(GOOD + f"    events: {word}\n").tier_file.tiers[1].events is value


def test_numbers_with_colons_are_no_numbers(errors):
    """YAML 1.1 reads 1:30 as 90."""
    assert "got '1:30'" in errors(GOOD.replace("2GiB", "1:30"))[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "tiers.yaml:1: a tier file is a mapping"),
        ("- 1\n", "tiers.yaml:1: a tier file is a mapping"),
        ("version: 1\npool: [\n", "tiers.yaml:3: "),
        ("version: 1\n---\nversion: 1\n", "tiers.yaml:2: expected a single document"),
        ("version: 1\n\tpool: 1\n", "tiers.yaml:2: "),
        ("version: *x\n", "tiers.yaml:1: found undefined alias"),
        (
            "version: 1\npool: &a { bytes: *a }\n",
            "tiers.yaml:2: pool.bytes: an alias to something that contains it",
        ),
        (
            "version: !!python/name:os.system x\n",
            "tiers.yaml:1: version: cannot read 'x' as python/name:os.system",
        ),
        ("version: " + "[" * 5000, "tiers.yaml:1: "),
        ("version: 1\x00\n", "tiers.yaml:1: "),
        ("version: " + "9" * 5000, "tiers.yaml:1: version: cannot read"),
        ("? [1]\n: 2\n", "tiers.yaml:1: a key must be a plain word"),
    ],
)
def test_text_that_is_no_tier_file_is_refused_with_its_line(errors, text, message):
    assert any(line.startswith(message) for line in errors(text))


def test_a_file_that_cannot_be_read_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        load_tier_file(tmp_path / "none.yaml", {})
    (tmp_path / "latin.yaml").write_bytes(b"version: \xff\n")
    with pytest.raises(ConfigError, match="UTF-8"):
        load_tier_file(tmp_path / "latin.yaml", {})
    (tmp_path / "big.yaml").write_bytes(b"#" * (2 << 20))
    with pytest.raises(ConfigError, match="larger than"):
        load_tier_file(tmp_path / "big.yaml", {})


def test_a_variable_overrides_the_file_and_origins_say_so(load, tmp_path):
    """L89."""
    loaded = load(
        GOOD,
        KVTIERD__POOL__BYTES="64MiB",
        KVTIERD__TIERS__1__MAX_BYTES="unlimited",
        KVTIERD__ENGINE__JOB_TTL="5s",
        KVTIERD__EVENTS__ENABLED="false",
        PATH="/bin",
    )
    assert loaded.tier_file.pool.bytes == 64 << 20
    assert loaded.tier_file.tiers[1].max_bytes == "unlimited"
    assert loaded.tier_file.engine.job_ttl == 5.0
    assert loaded.tier_file.events.enabled is False
    assert loaded.origins["pool.bytes"] == "env KVTIERD__POOL__BYTES"
    assert loaded.origins["tiers.1.max_bytes"] == "env KVTIERD__TIERS__1__MAX_BYTES"
    assert loaded.origins["tiers.1.path"] == f"{tmp_path}/tiers.yaml:7"
    assert loaded.origins["engine.lease_ttl"] == "default"
    assert loaded.origins["events.audiences.0.bind"] == "default"


def test_a_variable_reaches_the_default_audience(load):
    loaded = load(
        GOOD, KVTIERD__EVENTS__AUDIENCES__0__BIND="tcp://127.0.0.1:7000", KVTIERD__ADMIN__LISTEN="[::1]:80"
    )
    assert loaded.tier_file.events.audiences[0].bind == "tcp://127.0.0.1:7000"
    assert loaded.tier_file.admin.listen == "[::1]:80"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("KVTIERD__POOL__SIZ", "1", "pool.siz: unknown key; did you mean 'bytes'?"),
        ("KVTIERD__POOL__BYTE", "1", "pool.byte: unknown key; did you mean 'bytes'?"),
        ("KVTIERD__POOL__HUGE_PAGES", "yes", "pool.huge_pages: write true or false (got 'yes')"),
        ("KVTIERD__TIERS__1__LOCALITY", "local", "tiers.1.locality: write LOCAL or REMOTE"),
        ("KVTIERD__TIERS__7__PATH", "/x", "tiers has 2 entries"),
        ("KVTIERD__TIERS__DISK__PATH", "/x", "tiers has 2 entries"),
        ("KVTIERD__VERSION__X", "/x", "version has no entry 'x'"),
        ("KVTIERD__0", "/x", "the tier file has no entry 0"),
        ("KVTIERD__POOL", "1GiB", "pool: write a section"),
        ("KVTIERD__", "x", "write it as KVTIERD__SECTION__KEY"),
        ("KVTIERD__pool__bytes", "1GiB", "write it as KVTIERD__SECTION__KEY"),
        ("KVTIERD__POOL__BYTES", "", "pool.bytes: write a size"),
        ("KVTIERD_POOL_BYTES", "1GiB", "has no effect; write KVTIERD__POOL__BYTES"),
        ("KVTIERD_TIERS_1_MAX_BYTES", "1GiB", "has no effect; write KVTIERD__TIERS__1__MAX_BYTES"),
        ("KVTIERD_POOL__BYTES", "1GiB", "has no effect; write KVTIERD__POOL__BYTES"),
    ],
)
def test_a_variable_that_cannot_work_is_refused_by_name(errors, name, value, message):
    """L89."""
    (line,) = errors(GOOD, **{name: value})
    assert line.startswith(f"env {name}: {message}")


def test_variables_that_kubernetes_sets_for_a_service_are_left_alone(load):
    load(GOOD, KVTIERD_SERVICE_HOST="10.0.0.1", KVTIERD_PORT="tcp://10.0.0.1:5557", KVTIERD_EVENTS_PORT="x")


def test_the_effective_file_loads_to_the_same_values(load):
    loaded = load(
        GOOD, KVTIERD__EVENTS__AUDIENCES__0__TOPIC="kv@pod # x: [y]", KVTIERD__ENGINE__JOB_TTL="1.5s"
    )
    assert load("\n".join(effective_yaml(loaded))).tier_file == loaded.tier_file


def test_what_is_allowed_but_hardly_meant_is_warned_of(load):
    text = GOOD.replace("2GiB", "1MiB") + "events: { enabled: false }\n"
    text = text.replace("events:", "  - { name: lake, type: object, url: memory://x }\nevents:")
    assert [re.sub(":.*", "", warning) for warning in load(text).warnings] == [
        "tier 'disk'",
        "tier 'lake'",
        "events.enabled is false",
    ]
    (warning,) = load(GOOD.replace("2GiB", "unlimited")).warnings
    assert "only the filesystem's size bounds it" in warning


OUTSIDE = (
    GOOD
    + """\
events:
  model: org/m
  audiences:
    - name: routers
      bind: tcp://*:5557
      tokens: false
      topic: "kv@{pod_ip}@{model}"
"""
)


def test_an_address_that_anybody_can_reach_is_warned_of_unless_keys_guard_it(load):
    """L125."""
    (warning,) = load(OUTSIDE, POD_IP="10.0.0.1").warnings
    assert "'routers'" in warning
    assert "tcp://*:5557" in warning
    assert "do not carry" in warning
    keys = OUTSIDE + "      curve: { secret_key_file: /etc/kvtierd/key }\n"
    assert load(keys, POD_IP="10.0.0.1").warnings == ()


def test_a_topic_that_the_environment_cannot_fill_is_refused_with_its_line(errors):
    assert errors(OUTSIDE) == [
        "tiers.yaml:15: events.audiences.0.topic: {pod_ip} needs the variable POD_IP, which is not set"
    ]
    assert errors(OUTSIDE.replace("  model: org/m\n", ""), POD_IP="1") == [
        "tiers.yaml:14: events.audiences.0.topic: {model} needs events.model: what routers call the served"
        " model"
    ]
