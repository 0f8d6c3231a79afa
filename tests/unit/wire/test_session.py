"""The daemon's half of a connection: every request gets an answer, and only in its state is one passed on."""

import re

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtierd.core.effects import Attached, Done, ErrorCode, Refused, Revoked
from kvtierd.core.model import Group, Layout
from kvtierd.core.stimuli import Attach, Goodbye, Lookup, Touch
from kvtierd.errors import LocalProtocolError, RemoteProtocolError
from kvtierd.wire.framing import Deframer, frame
from kvtierd.wire.messages import (
    Hello,
    StatusReport,
    StatusRequest,
    SurveyRequest,
    Welcome,
    decode_server,
    encode,
)
from kvtierd.wire.session import ANSWERS, RULES, Kind, ServerConnection, State, Verdict

LAYOUT = Layout(model="m", dtype="f", layout="l", groups=(Group(tokens_per_block=1, block_bytes=1),))
HELLO = Hello(id=1, versions=(1, 1), client="test")
ATTACH = Attach(id=2, layout=LAYOUT, engine_id="e", process=b"p" * 16)
ATTACHED = Attached(
    id=2,
    session=1,
    namespace="n",
    pool_id="p",
    pool_bytes=1,
    unit_bytes=1,
    slot_bytes=1,
    payload_bytes=(1,),
    rank_offsets=((0,),),
    fence=0,
    tiers=("cpu",),
)
REQUESTS = {
    Kind.HELLO: HELLO,
    Kind.STATUS: StatusRequest(id=3),
    Kind.SURVEY: SurveyRequest(id=6),
    Kind.ATTACH: ATTACH,
    Kind.GOODBYE: Goodbye(id=4),
    Kind.VERB: Lookup(id=5, keys=()),
}


def data(*messages):
    return b"".join(frame(encode(message)) for message in messages)


def replies(connection):
    return [decode_server(payload) for payload in Deframer().feed(b"".join(connection.take_output()))]


def connection_in(state):
    connection = ServerConnection(daemon="d")
    if state is not State.NEW:
        connection.receive(data(HELLO))
    if state in (State.ATTACHING, State.ATTACHED, State.CLOSING):
        connection.receive(data(ATTACH))
    if state in (State.ATTACHED, State.CLOSING):
        connection.send(ATTACHED)
    if state is State.CLOSING:
        connection.receive(data(Goodbye(id=9)))
    connection.take_output()
    assert connection.state is state
    return connection


@pytest.mark.parametrize("state", list(RULES))
@pytest.mark.parametrize("kind", list(Kind))
def test_each_request_is_passed_on_or_answered_as_the_table_says(state, kind):
    connection, target = connection_in(state), RULES[state][kind]
    request = REQUESTS[kind]
    passed, answers = connection.receive(data(request)), replies(connection)
    assert len(passed) + len(answers) == 1
    if isinstance(target, ErrorCode):
        assert connection.state is state
        assert (answers[0].id, answers[0].code) == (request.id, target)
        assert kind.value in answers[0].message
    else:
        assert connection.state is target
        assert passed == [request] or answers[0].id == request.id


def test_the_tables_name_every_state_and_kind():
    assert set(RULES) | {State.CLOSED} == set(State)
    assert all(set(row) == set(Kind) for row in RULES.values())
    assert {verdict for _, verdict in ANSWERS} == set(Verdict)


def test_a_whole_conversation():
    connection = ServerConnection(daemon="kvtierd/9")
    assert connection.receive(data(HELLO)) == []
    assert replies(connection) == [Welcome(id=1, version=1, daemon="kvtierd/9")]
    assert (connection.version, connection.client) == (1, "test")
    assert connection.receive(data(ATTACH)) == [ATTACH]
    assert connection.send(ATTACHED) == data(ATTACHED)
    connection.attached(ATTACHED)  # saying it again changes nothing
    assert connection.state is State.ATTACHED
    many = [Touch(id=n, keys=()) for n in range(10, 20)]
    assert connection.receive(data(*many)) == many
    assert connection.receive(data(Goodbye(id=30))) == [Goodbye(id=30)]
    connection.send(Done(id=15))  # an answer to what was asked before the goodbye
    assert not connection.closed
    assert connection.send(Done(id=30))
    assert connection.closed
    assert connection.send(Done(id=16)) == b""
    assert connection.receive(data(HELLO)) == []
    assert replies(connection) == []


def test_a_refused_attach_leaves_the_connection_greeted_and_a_new_attach_is_taken():
    connection = connection_in(State.ATTACHING)
    connection.send(Refused(id=2, code=ErrorCode.POOL_EXHAUSTED, message="full"))
    assert connection.state is State.GREETED
    again = msgspec.structs.replace(ATTACH, id=7)
    assert connection.receive(data(again)) == [again]
    with pytest.raises(LocalProtocolError):
        connection.attached(ATTACHED)
    connection.attached(msgspec.structs.replace(ATTACHED, id=7))
    assert connection.state is State.ATTACHED


def test_notices_and_other_answers_do_not_move_the_connection():
    connection = connection_in(State.ATTACHING)
    connection.send(Revoked(id=0, fence=1))
    connection.send(StatusReport(id=3, body={}))
    assert connection.state is State.ATTACHING


@pytest.mark.parametrize(
    ("theirs", "ours", "agreed"),
    [((1, 1), (1, 1), 1), ((1, 3), (2, 5), 3), ((1, 9), (1, 1), 1), ((2, 3), (3, 4), 3)],
)
def test_the_highest_common_version_is_agreed(theirs, ours, agreed):
    connection = ServerConnection(versions=ours)
    connection.receive(data(Hello(id=1, versions=theirs)))
    assert replies(connection)[0].version == agreed


@pytest.mark.parametrize("theirs", [(2, 3), (0, 0), (5, 2)])
def test_no_common_version_is_a_coded_refusal_then_the_end(theirs):
    """L37."""
    connection = ServerConnection(versions=(1, 1))
    assert connection.receive(data(Hello(id=8, versions=theirs), ATTACH)) == []
    (refused,) = replies(connection)
    assert (refused.id, refused.code, connection.closed) == (8, ErrorCode.BAD_VERSION, True)
    assert f"client speaks {theirs[0]}-{theirs[1]}, this daemon 1-1" in refused.message


def test_features_are_those_of_both_and_an_unknown_required_one_is_refused():
    connection = ServerConnection(features=("a", "b", "c"))
    connection.receive(data(Hello(id=1, versions=(1, 1), features=("c", "x"), required=("a",))))
    assert replies(connection)[0].features == connection.features == ("a", "c")
    connection = ServerConnection(features=("a",))
    connection.receive(data(Hello(id=1, versions=(1, 1), required=("zip", "a"))))
    (refused,) = replies(connection)
    assert refused.code == ErrorCode.BAD_VERSION
    assert "zip" in refused.message
    assert connection.closed


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ({"type": "frobnicate", "id": 4}, r"'frobnicate'.*\$.type"),
        ({"id": 4}, "`type`"),
        ({"type": "lookup", "id": 4}, "`keys`"),
        ({"type": "lookup", "id": 4, "keys": [bytes(4)]}, r"keys\[0\]"),
        ({"type": "lookup", "id": 4, "keys": [bytes(69)]}, r"keys\[0\]"),
        ({"type": "load", "id": 4, "keys": [], "deadline": "soon"}, r"\$.deadline"),
        ({"type": "hello", "id": 4}, "`versions`"),
        ({"type": 7, "id": 4}, r"\$.type"),
    ],
)
@pytest.mark.parametrize("state", [State.NEW, State.ATTACHED])
def test_a_message_that_does_not_fit_is_refused_by_field_and_the_connection_stays(message, named, state):
    connection = connection_in(state)
    assert connection.receive(frame(msgspec.msgpack.encode(message))) == []
    (refused,) = replies(connection)
    assert (refused.id, refused.code) == (4, ErrorCode.BAD_REQUEST)
    assert re.search(named, refused.message)
    assert connection.state is state


def test_text_that_is_no_utf_8_is_refused_and_the_connection_stays():
    connection = connection_in(State.ATTACHED)
    assert connection.receive(frame(b"\x82\xa2id\x01\xa4type\xa2\xff\xfe")) == []
    assert replies(connection)[0].code == ErrorCode.BAD_REQUEST


def test_the_id_of_notices_is_no_request_id():
    connection = connection_in(State.ATTACHED)
    assert connection.receive(data(Touch(id=0, keys=()))) == []
    assert replies(connection)[0].code == ErrorCode.BAD_REQUEST


def test_unknown_fields_are_ignored():
    connection = connection_in(State.ATTACHED)
    message = {"type": "touch", "id": 4, "keys": [b"x" + bytes(4)], "color": [1, {"a": None}]}
    assert [request.id for request in connection.receive(frame(msgspec.msgpack.encode(message)))] == [4]


@pytest.mark.parametrize(
    "payload",
    [
        b"\xc1",
        b"hello",
        b"\x93\x01\x02\x03",
        msgspec.msgpack.encode({"type": "touch"}),
        msgspec.msgpack.encode({"type": "touch", "id": "x"}),
        msgspec.msgpack.encode({"type": "touch", "id": -1}),
        b"\x80\x04\x95cos\nsystem\n",
        b"\x83\xa2id\x01\xa1x" + b"\x91" * 100_000,
        b"\x82\xa2id\x01\xa4ty",
    ],
)
@pytest.mark.parametrize("state", [State.NEW, State.ATTACHED])
def test_garbage_ends_the_connection(payload, state):
    """L39, L124: also a pickle and nesting without end."""
    connection = connection_in(state)
    with pytest.raises(RemoteProtocolError):
        connection.receive(frame(payload))
    assert connection.closed
    assert connection.receive(data(HELLO)) == []


def test_a_stranger_may_not_make_the_daemon_hold_much_before_hello():
    connection = ServerConnection()
    with pytest.raises(RemoteProtocolError, match="over 65536"):
        connection.receive((1 << 20).to_bytes(4, "big"))
    connection = connection_in(State.GREETED)
    assert connection.receive((1 << 20).to_bytes(4, "big")) == []


def test_hello_and_a_large_first_request_may_come_in_one_read():
    connection = ServerConnection()
    large = msgspec.structs.replace(ATTACH, engine_id="e" * 4000, layout=LAYOUT)
    wide = Layout(model="m", dtype="f", layout="x" * 4000, groups=LAYOUT.groups * 1024)
    large = msgspec.structs.replace(large, layout=wide)
    assert connection.receive(data(HELLO, large)) == [large]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(sorted(REQUESTS, key=str)), max_size=12), st.integers(1, 60))
def test_however_it_is_cut_every_request_is_passed_on_or_answered_once(kinds, size):
    connection = ServerConnection()
    messages = [msgspec.structs.replace(REQUESTS[kind], id=n + 1) for n, kind in enumerate(kinds)]
    stream, seen = data(*messages), []
    for start in range(0, len(stream), size):
        passed = connection.receive(stream[start : start + size])
        seen += [request.id for request in passed] + [reply.id for reply in replies(connection)]
    if connection.closed:
        assert sorted(seen) == list(range(1, len(seen) + 1))
    else:
        assert sorted(seen) == [message.id for message in messages]


def test_a_reply_too_long_for_a_frame_is_this_sides_error():
    connection = connection_in(State.ATTACHED)
    with pytest.raises(LocalProtocolError):
        connection.send(StatusReport(id=3, body={"x": "y" * (17 << 20)}))
    assert connection.send(Done(id=3))
