"""``kvtierd events``: ``tail`` prints an event stream, any audience's and any vLLM engine's too."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from kvtierd.cli.events_watch import add_watch, run_watch
from kvtierd.cli.main import Subparsers
from kvtierd.errors import ConfigError, ExitCode, RemoteProtocolError, Unavailable

if TYPE_CHECKING:
    import zmq

    from kvtierd.wire.kvevents import DecodedEvent

SHOWN_TOKENS = 4
POLL = 0.2
"""Seconds; how soon a timeout is noticed."""
DEFAULT_ENDPOINT = "tcp://127.0.0.1:5557"


class Source(NamedTuple):
    """Where to listen."""

    endpoint: str
    replay: str | None
    topic: str


class Message(NamedTuple):
    """One batch's frames."""

    topic: str
    number: int
    payload: bytes
    replayed: bool


def add_parser(subparsers: Subparsers) -> None:
    """Add the command's arguments."""
    parser = subparsers.add_parser(
        "events", help="watch the event stream", description="Watch the event stream."
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    tail = actions.add_parser(
        "tail",
        help="print events as they come",
        description="Print one line for each event until interrupted. Reads the map and the array form.",
    )
    where = tail.add_mutually_exclusive_group()
    where.add_argument("--endpoint", metavar="E", help=f"the PUB endpoint (default {DEFAULT_ENDPOINT})")
    where.add_argument("--config", metavar="F", help="take the endpoints from a tier file's audience")
    tail.add_argument(
        "--audience", metavar="NAME", help="which audience of the tier file (default: the first)"
    )
    tail.add_argument("--topic", metavar="T", help="subscribe to topics that start so (default: all)")
    tail.add_argument("--replay", metavar="E", help="the replay endpoint; first print what it has")
    tail.add_argument("--since", metavar="N", type=_number, help="replay from batch N (default 0)")
    tail.add_argument("--count", metavar="N", type=_number, help="stop after N lines")
    tail.add_argument(
        "--timeout", metavar="S", type=float, help="stop, with code 69, after S seconds of silence"
    )
    tail.add_argument("--json", action="store_true", help="print a JSON object on each line")
    tail.add_argument(
        "--tokens", action="store_true", help=f"print all token ids, not {SHOWN_TOKENS} a block"
    )
    tail.add_argument("--empty", action="store_true", help="print batches without events (heartbeats) too")
    add_watch(actions)


def run(args: argparse.Namespace) -> int:
    """Print until interrupted (0), ``--count`` is reached (0) or ``--timeout`` ran out (69); or watch."""
    try:
        return run_watch(args) if args.action == "watch" else _tail(args, _source(args))
    except KeyboardInterrupt:
        return ExitCode.OK


def _tail(args: argparse.Namespace, source: Source) -> int:
    from msgspec import MsgspecError

    from kvtierd.wire.kvevents import decode_batch

    line = _json_line if args.json else _human_line
    printed = 0
    for message in _messages(source, args.since, args.timeout):
        try:
            batch = decode_batch(message.payload)
        except MsgspecError as error:
            raise RemoteProtocolError(f"batch {message.number} is no event batch: {error}") from error
        rank = batch.data_parallel_rank
        for event in batch.events or ((None,) if args.empty else ()):
            if args.count is not None and printed >= args.count:
                return ExitCode.OK
            print(line(message, batch.ts, rank, event, tokens=args.tokens), flush=True)
            printed += 1
        if args.count is not None and printed >= args.count:
            return ExitCode.OK
    return ExitCode.OK


def _source(args: argparse.Namespace) -> Source:
    if args.config is None:
        source = Source(args.endpoint or DEFAULT_ENDPOINT, args.replay, args.topic or "")
        if args.since is not None and args.replay is None:
            raise ConfigError("--since needs --replay with the replay endpoint, or --config")
        return source
    from kvtierd.config.audiences import render_topic
    from kvtierd.config.load import load_tier_file

    events = load_tier_file(args.config, os.environ).tier_file.events
    for audience in events.audiences:
        if args.audience in (None, audience.name):
            if audience.bind is None:
                raise ConfigError(f"audience {audience.name!r} connects to {audience.connect}: listen there")
            replay = args.replay or (audience.replay if args.since is not None else None)
            topic = render_topic(audience, events.model, os.environ) if args.topic is None else args.topic
            return Source(connectable(audience.bind), replay and connectable(replay), topic)
    names = ", ".join(audience.name for audience in events.audiences)
    raise ConfigError(f"{args.config}: no audience {args.audience!r}; there are: {names or 'none'}")


def connectable(endpoint: str) -> str:
    """Return an endpoint to connect to for one that is bound: every address includes loopback."""
    for wildcard, loopback in (
        ("//*:", "//127.0.0.1:"),
        ("//0.0.0.0:", "//127.0.0.1:"),
        ("//[::]:", "//[::1]:"),
    ):
        endpoint = endpoint.replace(wildcard, loopback)
    if endpoint.startswith("tcp:") and endpoint.endswith(":0"):
        raise ConfigError(f"{endpoint}: the port is chosen at start; give it with --endpoint (see status)")
    return endpoint


def _messages(source: Source, since: int | None, timeout: float | None) -> Iterator[Message]:
    """Yield what is replayed, then what is live, each batch once.

    Raises:
        Unavailable: nothing came for ``timeout`` seconds.
    """
    import zmq

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        sub = _connect(context, zmq.SUB, source.endpoint)
        sub.setsockopt_string(zmq.SUBSCRIBE, source.topic)
        seen = -1
        if source.replay is not None:
            for message in _replay(context, source.replay, since or 0, timeout):
                seen = message.number
                yield message
        while True:
            frames = _receive(sub, timeout, source.endpoint)
            if len(frames) != 3 or len(frames[1]) != 8:
                raise RemoteProtocolError(f"{source.endpoint}: expected topic, number and payload")
            topic, number = frames[0].decode(errors="replace"), int.from_bytes(frames[1], "big")
            if number > seen:
                yield Message(topic, number, frames[2], replayed=False)
    finally:
        context.destroy(linger=0)


def _replay(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, start: int, timeout: float | None
) -> Iterator[Message]:
    import zmq

    from kvtierd.wire.stream import END, encode_sequence

    with _connect(context, zmq.DEALER, endpoint) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.send_multipart([b"", encode_sequence(start)])
        while True:
            frames = _receive(dealer, timeout, endpoint)
            if len(frames) < 3 or len(frames[-2]) != 8:
                raise RemoteProtocolError(f"{endpoint}: not a replay's reply")
            if frames[-2] == END:
                return
            topic = frames[1].decode(errors="replace") if len(frames) > 3 else ""  # vLLM <= 0.24 sends none
            yield Message(topic, int.from_bytes(frames[-2], "big"), frames[-1], replayed=True)


def _connect(context: zmq.Context[zmq.Socket[bytes]], kind: int, endpoint: str) -> zmq.Socket[bytes]:
    import zmq

    socket = context.socket(kind)
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(f"cannot connect to {endpoint!r}: {error.strerror}") from error
    return socket


def _receive(socket: zmq.Socket[bytes], timeout: float | None, endpoint: str) -> list[bytes]:
    deadline = None if timeout is None else time.monotonic() + timeout
    while not socket.poll(int(POLL * 1000)):
        if deadline is not None and time.monotonic() >= deadline:
            raise Unavailable(f"no message from {endpoint} for {timeout:g} s")
    return socket.recv_multipart()


def _fields(event: DecodedEvent, *, tokens: bool) -> dict[str, Any]:
    """Return an event as plain JSON values; hashes that are bytes as hex, tokens shortened with a count."""
    import msgspec

    fields: dict[str, Any] = _plain(msgspec.to_builtins(event, builtin_types=(bytes,)))
    count = len(fields.get("token_ids", ()))
    if count > SHOWN_TOKENS and not tokens:
        fields["token_ids"] = fields["token_ids"][:SHOWN_TOKENS]
        fields["token_count"] = count
    return fields


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value


def _json_line(
    message: Message, ts: float, rank: int | None, event: DecodedEvent | None, *, tokens: bool
) -> str:
    head = {
        "seq": message.number,
        "ts": ts,
        "topic": message.topic,
        "replayed": message.replayed,
        "dp_rank": rank,
    }
    return json.dumps({**head, "event": event and _fields(event, tokens=tokens)})


def _human_line(
    message: Message, ts: float, rank: int | None, event: DecodedEvent | None, *, tokens: bool
) -> str:
    clock = time.strftime("%H:%M:%S", time.localtime(ts)) + f".{int(ts % 1 * 1000):03d}"
    head = f"{message.number:>8} {clock} {'replay' if message.replayed else 'live':<6} dp={_or_dash(rank)}"
    if event is None:
        return f"{head} (empty)"
    fields = _fields(event, tokens=tokens)
    name = fields.pop("type")
    where = " ".join(filter(None, (fields.pop("medium", None), fields.pop("locality", None))))
    hashes = ",".join(_hash(value) for value in fields.pop("block_hashes", ()))
    details = [f"{key}={_detail(key, value)}" for key, value in fields.items() if value not in (None, [])]
    if "token_count" in fields:
        details = [text for text in details if not text.startswith("token_count=")]
        details = [f"{t} …({fields['token_count']})" if t.startswith("token_ids=") else t for t in details]
    return " ".join(filter(None, (head, f"{name:<12}", f"{where or '-':<8}", hashes, *details)))


def _detail(key: str, value: Any) -> str:
    if key == "parent_block_hash":
        return _hash(value)
    if key == "token_ids":
        return ",".join(map(str, value))
    return value if isinstance(value, str) else json.dumps(value)


def _hash(value: int | str) -> str:
    return f"{value:016x}" if isinstance(value, int) and value >= 0 else str(value)


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)


def _number(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError("must be 0 or more")
    return number
