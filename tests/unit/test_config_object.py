"""An object tier's settings: what is missing is named by its path, and no secret is ever repeated."""

from __future__ import annotations

import json

import pytest
import yaml

from kvtierd.config.load import load_tier_file
from kvtierd.errors import ConfigError

S3 = {"url": "s3://bucket/some/prefix", "region": "eu-west-1"}


@pytest.fixture
def load(tmp_path):
    def run(tier, environ=None):
        path = tmp_path / "tiers.yaml"
        tiers = [{"name": "cpu", "type": "cpu"}, {"name": "lake", "type": "object", **tier}]
        path.write_text(yaml.safe_dump({"version": 1, "pool": {"bytes": "1MiB"}, "tiers": tiers}))
        return load_tier_file(path, environ or {})

    return run


@pytest.mark.parametrize(
    "tier",
    [
        S3,
        {"url": "s3://bucket", "endpoint": "http://127.0.0.1:9000"},
        {"url": "s3://bucket/p/", "endpoint": "http://localhost:9000/"},
        {"url": "s3://bucket", "endpoint": "http://store:9000", "allow_http": True},
        {"url": "s3://bucket", "endpoint": "https://store.example"},
        {"url": "gs://bucket/prefix"},
        {"url": "az://container/prefix", "account": "account1"},
        {**S3, "credentials": "env"},
        {**S3, "credentials": {"file": "/run/secrets/aws", "profile": "kv"}},
        {**S3, "credentials": {"access_key_variable": "A", "secret_key_variable": "B"}},
        {"url": "gs://bucket", "credentials": {"secret_key_variable": "SERVICE_ACCOUNT"}},
        {**S3, "unsigned_payload": "always", "request_timeout": "5s", "deadline": "5s"},
    ],
)
def test_a_real_store_is_taken_and_written_out_as_it_can_be_read(load, tier):
    loaded = load(tier)
    again = load(
        {k: v for k, v in loaded.tier_file.model_dump(mode="json")["tiers"][1].items() if v is not None}
    )
    assert again.tier_file == loaded.tier_file
    assert loaded.tier_file.tiers[1].shared is True


def test_only_a_bucket_is_shared_by_default(load):
    assert load({"url": "memory://x"}).tier_file.tiers[1].shared is False
    assert load({**S3, "shared": False}).tier_file.tiers[1].shared is False


@pytest.mark.parametrize(
    ("tier", "problems"),
    [
        ({}, ["tiers.1.url: is required"]),
        ({"url": "s3://"}, ["tiers.1.url: names no bucket: write s3://BUCKET"]),
        ({"url": "s3:///prefix"}, ["tiers.1.url: names no bucket"]),
        ({"url": "s3://bucket"}, ["tiers.1.region: is required"]),
        ({"url": "az://container"}, ["tiers.1.account: is required"]),
        (
            {"url": "az://container", "region": "x"},
            ["tiers.1.account: is required", "tiers.1.region: has a meaning"],
        ),
        ({"url": "file:///x"}, ["tiers.1.url: write s3://, gs:// or az://"]),
        ({"url": "s3://bucket/../x", "region": "r"}, ["tiers.1.url: the prefix"]),
        ({"url": "s3://bucket/a//b", "region": "r"}, ["tiers.1.url: the prefix"]),
        ({"url": "s3://b/x", "region": "r"}, ["tiers.1.url: the bucket's name"]),
        ({**S3, "endpoint": ""}, ["tiers.1.endpoint: write http://"]),
        ({**S3, "endpoint": "store:9000"}, ["tiers.1.endpoint: write http://"]),
        ({**S3, "endpoint": "http://store:99999"}, ["tiers.1.endpoint: write http://"]),
        ({**S3, "endpoint": "http://store:9000"}, ["tiers.1.endpoint: is plain HTTP"]),
        ({**S3, "ca_bundle": "ca.pem"}, ["tiers.1.ca_bundle: write an absolute path"]),
        ({**S3, "request_timeout": "1m"}, ["tiers.1.request_timeout: is longer than the tier's deadline"]),
        ({**S3, "connect_timeout": "11s"}, ["tiers.1.connect_timeout: is longer than request_timeout"]),
        ({**S3, "retries": 99}, ["tiers.1.retries: "]),
        ({**S3, "unsigned_payload": "maybe"}, ["tiers.1.unsigned_payload"]),
        (
            {**S3, "credentials": {"access_key_variable": "A"}},
            ["tiers.1.credentials.secret_key_variable: is required beside the other one"],
        ),
        (
            {**S3, "credentials": {"session_token_variable": "A"}},
            ["tiers.1.credentials.access_key_variable: is required"],
        ),
        (
            {**S3, "credentials": {"file": "/x", "access_key_variable": "A", "secret_key_variable": "B"}},
            ["tiers.1.credentials: write a file or names of variables, not both"],
        ),
        ({**S3, "credentials": {"profile": "x"}}, ["tiers.1.credentials.profile: has a meaning only"]),
        (
            {"url": "gs://bucket", "credentials": {"access_key_variable": "A"}},
            ["tiers.1.credentials: with gs:// only secret_key_variable"],
        ),
    ],
)
def test_each_wrong_or_missing_setting_is_named_by_its_path(load, tier, problems):
    """L83."""
    with pytest.raises(ConfigError) as caught:
        load(tier)
    for problem in problems:
        assert problem in str(caught.value)
    assert len(str(caught.value).splitlines()) == len(problems)


SECRET = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"


@pytest.mark.parametrize(
    "tier",
    [
        {**S3, "credentials": SECRET},
        {**S3, "credentials": {"secret_key_variable": SECRET, "access_key_variable": "AKIAIOSFODNN7EXAMPLE"}},
        {**S3, "credentials": {"file": SECRET}},
        {**S3, "credentials": {"profile": SECRET}},
        {**S3, "credentials": {"secret_access_key": SECRET}},
        {**S3, "secret_access_key": SECRET},
        {**S3, "url": f"s3://AKIAIOSFODNN7EXAMPLE:{SECRET}@bucket/x"},
        {**S3, "endpoint": f"https://AKIAIOSFODNN7EXAMPLE:{SECRET}@store"},
        {"url": f"az://container@AKIAIOSFODNN7EXAMPLE?sig={SECRET}", "account": "account"},
    ],
)
def test_a_key_written_into_the_tier_file_is_refused_and_not_repeated(load, tier):
    """L86."""
    with pytest.raises(ConfigError, match=r"tiers\.1") as caught:
        load(tier)
    assert SECRET not in str(caught.value)
    assert SECRET[:12] not in str(caught.value)
    assert "AKIA" not in str(caught.value)


def test_a_key_in_an_override_is_refused_and_not_repeated(load):
    """L86."""
    with pytest.raises(ConfigError, match="KVTIERD__TIERS__1__CREDENTIALS__SECRET_KEY_VARIABLE") as caught:
        load(S3, {"KVTIERD__TIERS__1__CREDENTIALS__SECRET_KEY_VARIABLE": SECRET})
    assert SECRET not in str(caught.value)


def test_effective_settings_hold_names_and_never_values(load):
    """L86."""
    environ = {"MY_ACCESS": "AKIAIOSFODNN7EXAMPLE", "MY_SECRET": SECRET}
    names = {"access_key_variable": "MY_ACCESS", "secret_key_variable": "MY_SECRET"}
    loaded = load({**S3, "credentials": names}, environ)
    shown = (
        json.dumps(loaded.tier_file.model_dump(mode="json")) + repr(loaded) + json.dumps(dict(loaded.origins))
    )
    assert SECRET not in shown
    assert "AKIA" not in shown
    assert loaded.origins["tiers.1.credentials.secret_key_variable"].startswith(str(loaded.path))
    assert loaded.origins["tiers.1.credentials.file"] == "default"


def test_two_tiers_in_one_place_are_refused(load, tmp_path):
    path = tmp_path / "two.yaml"
    lake = {"type": "object", **S3}
    tiers = [{"name": "cpu", "type": "cpu"}, {"name": "a", **lake}, {"name": "b", **lake}]
    path.write_text(yaml.safe_dump({"version": 1, "pool": {"bytes": "1MiB"}, "tiers": tiers}))
    with pytest.raises(ConfigError, match=r"tiers\.2\.url: another tier keeps its blocks in the same place"):
        load_tier_file(path, {})
