"""``kvtierd events``: ``tail`` prints an event stream, any audience's and any vLLM engine's too."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from kvtierd.cli.events_curve import add_curve, client_keys
from kvtierd.cli.events_line import HEADER, SHOWN_TOKENS, Message, human_line, json_line
from kvtierd.cli.events_watch import add_watch, run_watch
from kvtierd.cli.main import Subparsers
from kvtierd.errors import ConfigError, ExitCode, RemoteProtocolError, Unavailable

if TYPE_CHECKING:
    import zmq

    from kvtierd.edges.curve import ClientKeys

POLL = 0.2
"""Seconds; how soon a timeout is noticed."""
QUIET = 2.0
"""Seconds without a line after which a word on stderr says that it is the stream that is silent."""
DEFAULT_ENDPOINT = "tcp://127.0.0.1:5557"


class Source(NamedTuple):
    """Where to listen."""

    endpoint: str
    replay: str | None
    topic: str
    keys: ClientKeys | None = None


class Patience:
    """Watches how long nothing was told: says so once, and after ``timeout`` seconds gives up.

    Heartbeats are heard but tell nothing; only a batch with events starts the time anew.
    """

    def __init__(
        self, endpoint: str, timeout: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._endpoint = endpoint
        self._timeout = timeout
        self._clock = clock
        self._since = clock()
        self._heard = False
        self._said = False

    def heard(self, *, events: bool) -> None:
        """Note a batch, with or without events."""
        self._heard = True
        if events:
            self._since = self._clock()
            self._said = True

    def check(self) -> None:
        """Say what there is to say.

        Raises:
            Unavailable: there was no event for ``timeout`` seconds.
        """
        silent = self._clock() - self._since
        if self._timeout is not None and silent >= self._timeout:
            what = "event" if self._heard else "message"
            raise Unavailable(f"no {what} from {self._endpoint} for {self._timeout:g} s")
        if silent >= QUIET and not self._said:
            self._said = True
            so_far = "only heartbeats so far" if self._heard else "nothing yet"
            print(f"listening on {self._endpoint}; {so_far}", file=sys.stderr, flush=True)


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
        "--timeout",
        metavar="S",
        type=float,
        help="stop, with code 69, after S seconds without an event (heartbeats do not count)",
    )
    tail.add_argument("--json", action="store_true", help="print a JSON object on each line")
    tail.add_argument(
        "--tokens",
        action="store_true",
        help=f"print all token ids, not their number ({SHOWN_TOKENS} a block with --json)",
    )
    tail.add_argument("--empty", action="store_true", help="print batches without events (heartbeats) too")
    add_curve(tail)
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

    patience = Patience(source.endpoint, args.timeout)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() and not args.tokens else None
    if sys.stdout.isatty() and not args.json:
        print(HEADER[:width])
    printed = 0
    for message in _messages(source, args.since, patience):
        try:
            batch = decode_batch(message.payload)
        except MsgspecError as error:
            raise RemoteProtocolError(f"batch {message.number} is no event batch: {error}") from error
        patience.heard(events=bool(batch.events))
        rank = batch.data_parallel_rank
        for event in batch.events or ((None,) if args.empty else ()):
            if args.count is not None and printed >= args.count:
                return ExitCode.OK
            if args.json:
                line = json_line(message, batch.ts, rank, event, tokens=args.tokens)
            else:
                line = human_line(message, batch.ts, rank, event, tokens=args.tokens, width=width)
            print(line, flush=True)
            printed += 1
        if args.count is not None and printed >= args.count:
            return ExitCode.OK
    return ExitCode.OK


def _source(args: argparse.Namespace) -> Source:
    if args.config is None:
        keys = client_keys(args, None)
        source = Source(args.endpoint or DEFAULT_ENDPOINT, args.replay, args.topic or "", keys)
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
            keys = client_keys(args, audience)
            return Source(connectable(audience.bind), replay and connectable(replay), topic, keys)
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


def _messages(source: Source, since: int | None, patience: Patience) -> Iterator[Message]:
    """Yield what is replayed, then what is live, each batch once.

    Raises:
        Unavailable: ``patience`` is at its end.
    """
    import zmq

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        sub = _connect(context, zmq.SUB, source.endpoint, source.keys)
        sub.setsockopt_string(zmq.SUBSCRIBE, source.topic)
        seen = -1
        if source.replay is not None:
            for message in _replay(context, source, since or 0, patience):
                seen = message.number
                yield message
        while True:
            frames = _receive(sub, patience)
            if len(frames) != 3 or len(frames[1]) != 8:
                raise RemoteProtocolError(f"{source.endpoint}: expected topic, number and payload")
            topic, number = frames[0].decode(errors="replace"), int.from_bytes(frames[1], "big")
            if number > seen:
                yield Message(topic, number, frames[2], replayed=False)
    finally:
        context.destroy(linger=0)


def _replay(
    context: zmq.Context[zmq.Socket[bytes]], source: Source, start: int, patience: Patience
) -> Iterator[Message]:
    import zmq

    from kvtierd.wire.stream import END, encode_sequence

    assert source.replay is not None
    with _connect(context, zmq.DEALER, source.replay, source.keys) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.send_multipart([b"", encode_sequence(start)])
        while True:
            frames = _receive(dealer, patience)
            if len(frames) < 3 or len(frames[-2]) != 8:
                raise RemoteProtocolError(f"{source.replay}: not a replay's reply")
            if frames[-2] == END:
                return
            topic = frames[1].decode(errors="replace") if len(frames) > 3 else ""  # vLLM <= 0.24 sends none
            yield Message(topic, int.from_bytes(frames[-2], "big"), frames[-1], replayed=True)


def _connect(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, endpoint: str, keys: ClientKeys | None
) -> zmq.Socket[bytes]:
    import zmq

    socket = context.socket(kind)
    try:
        if keys is not None:
            keys.apply(socket)
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(f"cannot connect to {endpoint!r}: {error.strerror}") from error
    return socket


def _receive(socket: zmq.Socket[bytes], patience: Patience) -> list[bytes]:
    patience.check()
    while not socket.poll(int(POLL * 1000)):
        patience.check()
    return socket.recv_multipart()


def _number(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError("must be 0 or more")
    return number
