"""The object tier's parts without a server: what errors mean, tries in time, names, copies, and secrets."""

from __future__ import annotations

import random
import sys
import threading

import pytest

from kvtierd.config.schema import ObjectTier
from kvtierd.core.model import BlockId, block_key
from kvtierd.core.stimuli import Status
from kvtierd.edges.backends import object_store
from kvtierd.edges.backends.object_copy import copy_into
from kvtierd.edges.backends.object_errors import Fault, Meaning, StoreFailed, explain
from kvtierd.edges.backends.object_keys import Keys
from kvtierd.edges.backends.object_patience import MAX_BACKOFF, Patience, backoff
from kvtierd.edges.backends.object_tier import make_object_backend
from kvtierd.errors import TierError
from kvtierd.testing.clock import ManualClock

NAMESPACE = "0123456789abcdef" * 2

# Cut out of the texts of obstore 0.12.1.
DNS = 'inner: Http(HttpError { kind: Connect, source: ConnectError("dns error", Custom { kind: Uncategorized'
METADATA = "Error performing PUT http://169.254.169.254/latest/api/token in 1s - HTTP error: kind: Connect,"
SIGNED = (
    "Error performing GET https://x.invalid/b/k?sig=SECRETSIG - Server returned non-2xx status code: 418 X"
)


@pytest.mark.parametrize(
    ("text", "reason", "transient"),
    [
        (DNS, "the endpoint's name cannot be resolved", True),
        (METADATA, "no credentials: no variables, and no metadata service gave any", False),
        (SIGNED, "refused (418)", False),
        (
            'DeleteFailed { path: "a", code: "InternalError", message: "SECRET" }',
            "refused (InternalError)",
            False,
        ),
        (
            "source: ValueError: [credentials] tier 'lake': the file is gone\n",
            "tier 'lake': the file is gone",
            False,
        ),
        ("inner: BareRedirect,", "redirected: check region and endpoint", False),
        ("who knows SECRET", "Exception", False),
    ],
)
def test_a_failure_is_told_in_words_without_its_text(text, reason, transient):
    assert explain(Exception(text)) == Fault(Meaning.UNKNOWN, reason, transient)


@pytest.mark.parametrize(
    ("meaning", "status"),
    [
        (Meaning.ABSENT, Status.GONE),
        (Meaning.NO_SPACE, Status.FULL),
        (Meaning.UNKNOWN, Status.FAILED),
        (Meaning.PRESENT, Status.FAILED),
    ],
)
def test_only_an_absent_object_is_gone_and_only_no_space_is_full(meaning, status):
    assert Fault(meaning, "x").status is status


def test_waits_between_tries_grow_are_capped_and_differ():
    """L85."""
    draw = random.Random(1).uniform
    waits = [[backoff(attempt, draw) for attempt in range(12)] for _ in range(50)]
    for attempt in range(12):
        ceiling = min(MAX_BACKOFF, 0.1 * 2**attempt)
        at = {wait[attempt] for wait in waits}
        assert all(ceiling / 2 <= one <= ceiling for one in at)
        assert len(at) == 50


class Waits(threading.Event):
    """Lets the manual clock move instead of waiting."""

    def __init__(self, clock):
        super().__init__()
        self.clock = clock

    def wait(self, timeout=None):
        self.clock.advance(timeout)
        return False


@pytest.mark.parametrize("took", [0.0, 0.4, 2.9])
def test_a_call_that_only_fails_ends_by_its_deadline(took):
    """L85: whatever each try takes up to the request's timeout, and however many tries are allowed."""
    clock, tries = ManualClock(), []
    patience = Patience(
        deadline=10.0,
        request_timeout=3.0,
        retries=1000,
        count=lambda what: None,
        clock=clock,
        uniform=lambda low, high: high,
        closing=Waits(clock),
    )

    def fail():
        tries.append(clock())
        clock.advance(took)
        raise RuntimeError("kind: Timeout")

    budget = patience.begin()
    for _ in range(5):  # the blocks of one call share its time
        with pytest.raises(StoreFailed):
            patience.request(fail, budget)
    assert clock() <= 10.0
    assert len(tries) >= 3
    assert tries[-1] <= 7.0


def test_a_closed_tier_makes_no_try():
    patience = Patience(deadline=1.0, request_timeout=1.0, retries=3, count=lambda what: None)
    patience.stop()
    with pytest.raises(StoreFailed, match="closing"):
        patience.request(lambda: 1, patience.begin())


def test_names_lead_back_to_their_blocks():
    keys = Keys("a/b")
    block_id = BlockId(NAMESPACE, block_key(b"../\0\xff", 7))
    assert keys.block(block_id) == f"a/b/v1/{NAMESPACE}/ff/2e2e2f00ff.7"
    assert keys.parse(keys.block(block_id)) == block_id
    assert Keys("").block(block_id) == f"v1/{NAMESPACE}/ff/2e2e2f00ff.7"


@pytest.mark.parametrize(
    "path",
    [
        f"a/v1/{NAMESPACE}/ff/00.0",
        f"a/v1/{NAMESPACE}/00/00.00",
        f"a/v1/{NAMESPACE}/00/0.0",
        f"a/v1/{NAMESPACE}/namespace.json",
        f"b/v1/{NAMESPACE}/00/00.0",
        f"a/v1/{NAMESPACE}/x/00/00.0",
        "a/v1/../00/00.0",
        "a/v1",
        "",
    ],
)
def test_a_foreign_name_is_no_block(path):
    assert Keys("a").parse(path) is None


@pytest.mark.parametrize("size", [0, 1, 16 << 10, (16 << 10) + 1, 300_001])
def test_a_copy_is_exact_and_stays_in_its_place(size):
    source = bytes(index * 7 % 256 for index in range(size + 3))
    target = bytearray(size + 10)
    copy_into(memoryview(target)[5 : 5 + size], memoryview(source)[3:])
    assert target == bytes(5) + source[3:] + bytes(5)


def test_a_copy_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="do not fit"):
        copy_into(memoryview(bytearray(5)), memoryview(bytes(6)))
    with pytest.raises(ValueError, match="do not fit"):
        copy_into(memoryview(bytes(5)), memoryview(bytes(5)))


def tier(**settings):
    return ObjectTier.model_validate(
        {"name": "lake", "type": "object", "url": "s3://bucket/x", "endpoint": "https://s3.invalid"}
        | settings
    )


def test_without_the_package_the_tier_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(TierError, match=r"'lake'.*pip install kvtierd\[object\]"):
        make_object_backend(tier()).open()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ca_bundle": "/no/such"}, "ca_bundle: cannot read /no/such"),
        ({"credentials": {"file": "/no/such"}}, "credentials.file: cannot read /no/such"),
        (
            {"credentials": {"access_key_variable": "NOT_SET_A", "secret_key_variable": "NOT_SET_B"}},
            "credentials.access_key_variable: the variable NOT_SET_A is not set",
        ),
        (
            {"url": "gs://bucket", "credentials": {"secret_key_variable": "NOT_SET_C"}},
            "credentials.secret_key_variable: the variable NOT_SET_C is not set",
        ),
        (
            {"url": "az://container", "account": "acc", "credentials": {"file": "/no/such"}},
            "credentials.file: cannot read /no/such",
        ),
    ],
)
def test_what_the_settings_name_and_is_not_there_is_told_at_start(settings, message):
    """L83."""
    with pytest.raises(TierError, match=message):
        make_object_backend(tier(**settings)).open()


def test_a_file_that_is_no_credentials_file_is_told_without_its_content(tmp_path):
    """L86."""
    path = tmp_path / "credentials"
    for text in ("THE-SECRET", "[default]\naws_secret_access_key = THE-SECRET", "[other]\nx = THE-SECRET"):
        path.write_text(text)
        with pytest.raises(TierError, match="has no aws_access_key_id") as caught:
            make_object_backend(tier(credentials={"file": str(path)})).open()
        assert "SECRET" not in str(caught.value)
        assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"endpoint": None, "region": "eu-central-1"},
        {"url": "gs://bucket/x", "endpoint": None},
        {"url": "az://container/x", "account": "account", "endpoint": None},
        {"url": "az://container/x", "account": "account", "credentials": {"secret_key_variable": "B64"}},
    ],
)
def test_every_kind_of_store_is_set_up_without_a_request(settings, monkeypatch):
    monkeypatch.setenv("B64", "a2V5")
    assert object_store.connect(tier(**settings)) is not None


def test_a_rotated_file_of_keys_is_read_again(tmp_path):
    path = tmp_path / "credentials"
    settings = tier(credentials={"file": str(path), "profile": "kv"}).credentials
    secrets = object_store._Secrets("lake", settings, {})
    path.write_text("[kv]\naws_access_key_id = one\naws_secret_access_key = two\n")
    provide = secrets.s3_provider()
    assert provide()["access_key_id"] == "one"
    path.write_text("[kv]\naws_access_key_id = three\naws_secret_access_key = 4%\naws_session_token = t\n")
    given = provide()
    assert (given["access_key_id"], given["secret_access_key"], given["token"]) == ("three", "4%", "t")
    path.unlink()
    with pytest.raises(ValueError, match=r"\[credentials\] tier 'lake': credentials.file: cannot read"):
        provide()
