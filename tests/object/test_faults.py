"""An object store that throttles, hangs, breaks and lies: every call ends in time and says what happened."""

from __future__ import annotations

import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import trustme

from kvtierd.core.model import hash_of
from kvtierd.core.stimuli import Status
from kvtierd.edges.backends.base import Transfer
from kvtierd.errors import TierError
from kvtierd.testing.backend_kit import LAYOUT, NAMESPACE, block, payload, read, write
from kvtierd.testing.clock import wait_for
from kvtierd.testing.fault_proxy import Fault, FaultProxy, Kind

DEADLINE = 0.7
SLACK = 0.6  # of a busy machine

EVERY = {
    "throttling": (Fault(Kind.REFUSE, 503, "SlowDown"), "throttled (503 SlowDown)"),
    "too many requests": (Fault(Kind.REFUSE, 429, "TooManyRequests"), "throttled (429 TooManyRequests)"),
    "internal error": (Fault(Kind.REFUSE, 500, "InternalError"), "the store's own error (500 InternalError)"),
    "hang": (Fault(Kind.HANG), "no answer in time"),
    "reset": (Fault(Kind.RESET), "the connection was reset"),
    "denied": (Fault(Kind.REFUSE, 403, "AccessDenied"), "access denied (403 AccessDenied)"),
    "expired": (Fault(Kind.REFUSE, 403, "ExpiredToken"), "access denied (403 ExpiredToken)"),
    "no bucket": (Fault(Kind.REFUSE, 404, "NoSuchBucket"), "the bucket does not exist (404 NoSuchBucket)"),
}
BODY = {
    "hang in the body": (Fault(Kind.HANG_BODY), "no answer in time"),
    "truncated body": (Fault(Kind.TRUNCATE), "the answer was cut short"),
}


def outcome_of_read(backend, one):
    memory = bytearray(one.payload_bytes)
    (outcome,) = backend.read([Transfer(one, memoryview(memory))])
    return outcome


class Timed:
    """Checks that what it surrounds ends within a tier's deadline."""

    def __enter__(self):
        self.began = time.monotonic()

    def __exit__(self, kind, error, trace):
        if kind is None:
            assert time.monotonic() - self.began < DEADLINE + SLACK


@pytest.mark.parametrize(("fault", "reason"), EVERY.values(), ids=EVERY)
def test_a_store_that_fails_is_told_in_time_and_forgotten_when_it_is_well(proxy, open_tier, fault, reason):
    """L84, L85, L87."""
    backend = open_tier(proxy.endpoint)
    write(backend, block(1), payload(1))
    proxy.set(fault)
    with Timed():
        written = write(backend, block(2), payload(2))
    with Timed():
        got = outcome_of_read(backend, block(1))
    with Timed():
        (deleted,) = backend.delete([block(1).id])
    with Timed(), pytest.raises(TierError, match="s3://blocks/"):
        backend.probe([block(1).id, block(2).id])
    with Timed():
        backend.describe(NAMESPACE, LAYOUT)
    for outcome in (written, got, deleted):
        assert outcome.status is Status.FAILED
        assert outcome.reason.startswith(reason)
    proxy.set(None)
    proxy.release()
    assert read(backend, block(1)) == payload(1)
    assert write(backend, block(2), payload(2)).status is Status.OK


@pytest.mark.parametrize(("fault", "reason"), BODY.values(), ids=BODY)
def test_an_answer_that_breaks_off_is_a_passing_fault_and_no_corruption(proxy, open_tier, fault, reason):
    """L87."""
    backend = open_tier(proxy.endpoint)
    write(backend, block(1), payload(1))
    proxy.set(fault)
    with Timed():
        outcome = outcome_of_read(backend, block(1))
    assert (outcome.status, outcome.reason) == (Status.FAILED, reason)
    proxy.set(None)
    assert read(backend, block(1)) == payload(1)


@pytest.mark.parametrize("kind", [Kind.RESET, Kind.TRUNCATE, Kind.REFUSE, Kind.HANG_BODY])
def test_one_broken_request_is_made_good_by_another(proxy, open_tier, kind):
    backend = open_tier(proxy.endpoint, deadline="3s")
    write(backend, block(1), payload(1))
    first = len(proxy.seen)
    proxy.set(lambda seen: Fault(kind) if seen.number == first else None)
    assert read(backend, block(1)) == payload(1)
    assert backend.statistics()["retries"] == 1


def test_a_third_of_requests_throttled_loses_nothing(proxy, open_tier):
    """L85."""
    proxy.set(lambda seen: Fault(Kind.REFUSE) if seen.number % 10 in (1, 4, 8) else None)
    backend = open_tier(proxy.endpoint, deadline="20s", request_timeout="2s", retries=8)

    def work(number):
        return write(backend, block(number), payload(number)).status, read(backend, block(number))

    with ThreadPoolExecutor(6) as pool:
        for number, (status, data) in enumerate(pool.map(work, range(24))):
            assert (status, data) == (Status.OK, payload(number))
    assert backend.statistics()["retries"] >= 15
    assert backend.statistics()["requests"] == len(proxy.seen)


def test_tries_are_counted_and_no_more_are_made(proxy, open_tier):
    proxy.set(Fault(Kind.REFUSE))
    backend = open_tier(proxy.endpoint, deadline="10s", retries=2)
    assert read(backend, block(1)) is Status.FAILED
    assert len(proxy.seen) == 3


@pytest.mark.parametrize("code", ["AccessDenied", "InvalidAccessKeyId"])
def test_a_refusal_is_not_tried_again(proxy, open_tier, code):
    proxy.set(Fault(Kind.REFUSE, 403, code))
    backend = open_tier(proxy.endpoint)
    assert read(backend, block(1)) is Status.FAILED
    assert len(proxy.seen) == 1


@pytest.mark.parametrize("at", [3, 100, 5000, -1])
def test_a_byte_flipped_on_the_way_is_read_again(proxy, open_tier, at):
    backend = open_tier(proxy.endpoint)
    write(backend, block(1), payload(1))
    first = len(proxy.seen)
    proxy.set(lambda seen: Fault(Kind.FLIP, at=at) if seen.number == first else None)
    assert read(backend, block(1)) == payload(1)


@pytest.mark.parametrize("at", [3, 100, 5000, -1])
def test_a_byte_that_is_always_wrong_is_corrupt(proxy, open_tier, at):
    backend = open_tier(proxy.endpoint)
    write(backend, block(1), payload(1))
    proxy.set(Fault(Kind.FLIP, at=at))
    assert read(backend, block(1)) is Status.CORRUPT


def test_a_write_whose_answer_was_lost_is_found_done(proxy, open_tier):
    backend = open_tier(proxy.endpoint)
    proxy.set(lambda seen: Fault(Kind.LOSE) if seen.number == 0 else None)
    assert write(backend, block(1), payload(1)).status is Status.OK
    assert backend.statistics()["was_there"] == 1
    assert [seen.method for seen in proxy.seen] == ["PUT", "PUT", "GET"]


@pytest.mark.parametrize(("status", "code"), [(507, "StorageFull"), (403, "QuotaExceeded")])
def test_a_store_without_room_is_full(proxy, open_tier, status, code):
    proxy.set(Fault(Kind.REFUSE, status, code))
    outcome = write(open_tier(proxy.endpoint), block(1), payload(1))
    assert outcome.status is Status.FULL
    assert outcome.reason == f"the store has no room ({status} {code})"


def test_a_store_without_conditional_writes_is_written_all_the_same(proxy, open_tier):
    backend = open_tier(proxy.endpoint)
    proxy.set(lambda seen: Fault(Kind.REFUSE, 501, "NotImplemented") if seen.number == 0 else None)
    assert write(backend, block(1), payload(1)).status is Status.OK
    assert write(backend, block(1), payload(2)).status is Status.OK
    assert read(backend, block(1)) == payload(2)
    assert [seen.method for seen in proxy.seen] == ["PUT", "PUT", "PUT", "GET"]


def test_a_batch_ends_within_one_deadline(proxy, open_tier):
    """L87: sixteen blocks of a store that never answers take no longer than one."""
    backend = open_tier(proxy.endpoint)
    proxy.set(Fault(Kind.HANG))
    memory = bytearray(block(0).payload_bytes)
    with Timed():
        outcomes = backend.read([Transfer(block(number), memoryview(memory)) for number in range(16)])
    assert {(one.status, one.reason) for one in outcomes} == {(Status.FAILED, "no answer in time")}
    assert len(proxy.seen) <= 3


def test_a_store_that_never_answers_takes_no_threads_for_good(proxy, open_tier):
    """L87."""
    backend = open_tier(proxy.endpoint)
    read(backend, block(1))
    before = {thread.name for thread in threading.enumerate() if "probe" in thread.name}
    proxy.set(Fault(Kind.HANG))
    with Timed(), pytest.raises(TierError):
        backend.probe([block(number).id for number in range(50)])
    assert {thread.name for thread in threading.enumerate() if "probe" in thread.name} == before


def test_closing_ends_waits_for_another_try(proxy, open_tier):
    """L87."""
    proxy.set(Fault(Kind.REFUSE))
    backend = open_tier(proxy.endpoint, deadline="60s", request_timeout="5s", retries=20)
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(outcome_of_read, backend, block(number)) for number in range(4)]
        wait_for(lambda: len(proxy.seen) >= 8, "tries")
        began = time.monotonic()
        backend.close()
        assert {one.result(5).reason for one in running} <= {"closing", "throttled (503 SlowDown)"}
    assert time.monotonic() - began < 2


def test_a_probe_asks_many_at_once_but_not_too_many(proxy, open_tier):
    backend = open_tier(proxy.endpoint, deadline="10s", request_timeout="5s")
    for number in range(0, 60, 2):
        write(backend, block(number), payload(number))
    found = backend.probe([block(number).id for number in range(60)])
    assert [one.block.id for one in found] == [block(number).id for number in range(0, 60, 2)]
    assert 2 <= proxy.peak <= 8


def test_a_probe_tells_what_it_found_when_others_did_not_answer(proxy, open_tier):
    backend = open_tier(proxy.endpoint)
    write(backend, block(1), payload(1))
    name = hash_of(block(2).id.key).hex()
    proxy.set(lambda seen: Fault(Kind.HANG) if name in seen.path else None)
    with Timed():
        assert [one.block for one in backend.probe([block(1).id, block(2).id])] == [block(1)]


def test_nobody_listening_is_told_at_once(open_tier):
    outcome = outcome_of_read(open_tier("http://127.0.0.1:1", retries=0), block(1))
    assert (outcome.status, outcome.reason) == (Status.FAILED, "the endpoint refuses connections")


def test_a_wrong_key_and_a_wrong_bucket_are_told(open_tier, monkeypatch):
    """L84, against the real server."""
    all_fails(open_tier(url="s3://no-such-bucket/x"), "the bucket does not exist (404 NoSuchBucket)")
    monkeypatch.setenv("LAKE_SECRET_KEY", "wrong")
    all_fails(open_tier(), "access denied (403 SignatureDoesNotMatch)")


def all_fails(backend, reason):
    for outcome in (write(backend, block(1), payload(1)), outcome_of_read(backend, block(1))):
        assert outcome.status is Status.FAILED
        assert outcome.reason.startswith(reason)
    with pytest.raises(TierError, match=reason.split(" (")[0]):
        backend.probe([block(1).id])
    with pytest.raises(TierError, match="cannot be listed"):
        list(backend.list_blocks())


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


@pytest.fixture
def secure(server, authority):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    with FaultProxy(server.port, context) as running:
        yield running


def test_an_endpoint_that_is_not_trusted_is_told(secure, open_tier):
    """L84."""
    outcome = write(open_tier(secure.endpoint), block(1), payload(1))
    assert outcome.status is Status.FAILED
    assert outcome.reason == "TLS with the endpoint failed (UnknownIssuer): check ca_bundle and endpoint"
    assert secure.seen == []


def test_a_bundle_of_authorities_makes_an_endpoint_trusted(secure, authority, open_tier, tmp_path):
    bundle = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(bundle))
    backend = open_tier(secure.endpoint, ca_bundle=str(bundle), request_timeout="5s", deadline="9s")
    assert write(backend, block(1), payload(1)).status is Status.OK
    assert read(backend, block(1)) == payload(1)


def test_plain_http_where_tls_is_meant_is_told(server, open_tier):
    outcome = write(open_tier(server.endpoint.replace("http:", "https:")), block(1), payload(1))
    assert outcome.status is Status.FAILED
    assert outcome.reason.startswith("TLS with the endpoint failed")
