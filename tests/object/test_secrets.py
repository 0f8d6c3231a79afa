"""L86: whatever goes wrong, no key is in an outcome, counter, error, log line, repr or traceback."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import traceback
import urllib.parse

import pytest
import yaml

from kvtierd.errors import TierError
from kvtierd.testing.backend_kit import LAYOUT, NAMESPACE, block, payload, write
from kvtierd.testing.backend_kit import read as read_block
from kvtierd.testing.fault_proxy import Fault, Kind
from kvtierd.testing.object_server import ACCESS_KEY, SECRET_KEY

ODD_SECRET = "odd/secret+with=signs%and'quotes"
FAULTS = [
    None,
    Fault(Kind.REFUSE, 403, "AccessDenied"),
    Fault(Kind.REFUSE, 403, ODD_SECRET),
    Fault(Kind.REFUSE, 500, f"<AWSAccessKeyId>{ACCESS_KEY}"),
    Fault(Kind.REFUSE, 400, "AuthorizationHeaderMalformed"),
    Fault(Kind.HANG),
    Fault(Kind.RESET),
    Fault(Kind.TRUNCATE),
]


def forms(secret):
    """The secret as it may show up: as it is, in a URL, in JSON, in Python's quotes."""
    return {secret, urllib.parse.quote(secret, safe=""), json.dumps(secret)[1:-1], repr(secret)[1:-1]}


def assert_clean(text, *secrets):
    for secret in secrets:
        for form in forms(secret):
            assert form not in text


def everything_said(backend):
    """Use every verb and return all that comes back, errors with their tracebacks included."""
    said = [repr(backend)]
    said.append(repr(write(backend, block(1), payload(1))))
    said.append(repr(read_block(backend, block(1))))
    said.append(repr(backend.delete([block(1).id, block(2).id], corrupt=True)))
    for verb in (
        lambda: backend.probe([block(1).id, block(3).id]),
        lambda: list(backend.list_blocks()),
        lambda: backend.describe(NAMESPACE, LAYOUT),
        backend.open,
    ):
        try:
            said.append(repr(verb()))
        except TierError as error:
            said.append("".join(traceback.format_exception(error)))
            said.append(repr(error.__context__) if error.__context__ is not None else "")
    said.append(repr(backend.statistics()))
    said += [repr(vars(backend)), repr(vars(backend._requests))]
    return "\n".join(said)


@pytest.mark.parametrize("secret", [SECRET_KEY, ODD_SECRET])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.kind.name if fault else "well")
def test_no_failure_shows_a_key(proxy, open_tier, monkeypatch, caplog, capfd, fault, secret):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("LAKE_SECRET_KEY", secret)
    proxy.set(fault)
    said = everything_said(
        open_tier(proxy.endpoint, connect_timeout="100ms", request_timeout="150ms", deadline="300ms")
    )
    out, err = capfd.readouterr()
    assert "lake" in said
    assert_clean(said + caplog.text + out + err, secret, ACCESS_KEY)


@pytest.mark.parametrize("source", ["variables", "file"])
def test_an_unreachable_store_shows_no_key(open_tier, tmp_path, caplog, source):
    caplog.set_level(logging.DEBUG)
    settings = {}
    if source == "file":
        path = tmp_path / "credentials"
        path.write_text(f"[default]\naws_access_key_id={ACCESS_KEY}\naws_secret_access_key={SECRET_KEY}\n")
        settings["credentials"] = {"file": str(path)}
    said = everything_said(open_tier("http://127.0.0.1:1", retries=0, **settings))
    assert "refuses connections" in said
    assert_clean(said + caplog.text, SECRET_KEY, ACCESS_KEY)


def test_the_check_command_shows_no_key(tmp_path, keys):
    path = tmp_path / "tiers.yaml"
    names = {"access_key_variable": "LAKE_ACCESS_KEY", "secret_key_variable": "LAKE_SECRET_KEY"}
    lake = {"name": "lake", "type": "object", "url": "s3://b-1/x", "region": "r", "credentials": names}
    tiers = [{"name": "cpu", "type": "cpu"}, lake]
    path.write_text(yaml.safe_dump({"version": 1, "pool": {"bytes": "1MiB"}, "tiers": tiers}))
    command = [sys.executable, "-m", "kvtierd", "check", "--config", str(path), "--print-effective"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    assert "LAKE_SECRET_KEY" in done.stdout
    assert_clean(done.stdout + done.stderr, SECRET_KEY, ACCESS_KEY)
