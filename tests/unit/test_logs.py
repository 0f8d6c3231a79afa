"""The log: stable names, forms for machines and people, counted repeats, and no turn that waits for it."""

from __future__ import annotations

import ast
import io
import json
import logging
import threading
from pathlib import Path

import pytest

import kvtierd
from kvtierd.logs import limiter as limiters
from kvtierd.logs import output
from kvtierd.logs.events import EVENTS, RESERVED, event
from kvtierd.logs.formats import JsonFormatter, TextFormatter
from kvtierd.logs.limiter import BURST, MAX_KINDS, PERIOD, Limiter
from kvtierd.logs.output import Logs
from kvtierd.testing.clock import wait_for

ROOT = Path(kvtierd.__file__).parent
LEVELS = {"debug", "info", "warning", "error", "exception", "critical", "log"}


def record(message="tier %s: no", *values, level=logging.WARNING, extra=None, error=None):
    made = logging.LogRecord("kvtierd.x", level, "f", 1, message, values, None if error is None else error)
    made.__dict__.update(extra or {})
    made.created, made.msecs = 1_700_000_000.0, 5.0
    return made


def calls():
    """Yield (file, event names, fields) of every log call in the daemon's code."""
    for path in sorted(ROOT.rglob("*.py")):
        room = path.relative_to(ROOT).parts[0]
        if room in ("engines", "testing"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if node.func.attr in LEVELS and ast.unparse(node.func.value) in ("log", "logger"):
                yield path, node


def named(node):
    """Return the event names that a log call can have, and its fields."""
    made = next(keyword.value for keyword in node.keywords if keyword.arg == "extra")
    if isinstance(made, ast.Name):  # made before, by the one function that takes a name
        return set(), set()
    names = {part.value for part in ast.walk(made.args[0]) if isinstance(part, ast.Constant)}
    return names, {keyword.arg for keyword in made.keywords if keyword.arg}


def test_every_line_of_the_daemon_names_an_event_that_is_listed_and_every_listed_one_is_used():
    """Names and fields are what people search and alert by; texts may change."""
    used = set()
    for path, node in calls():
        assert any(keyword.arg == "extra" for keyword in node.keywords), (
            f"{path}:{node.lineno} names no event"
        )
        names, fields = named(node)
        assert names <= set(EVENTS), (path, names)
        assert not fields & (RESERVED - {"stack"}), (path, fields)
        assert not fields & {"token_ids", "tokens", "secret", "key", "keys"}, (path, fields)
        used |= names
    text = "".join(path.read_text() for path in (ROOT / "edges").glob("*.py"))
    used |= {name for name in ("connection_closed", "connection_refused") if f'complain("{name}"' in text}
    used |= {name for name in ("connection_refused",) if f'"{name}"' in text}
    assert used == set(EVENTS), set(EVENTS) ^ used


def test_a_json_line_has_the_event_and_its_fields_and_is_one_line():
    extra = event("tier_stalled", tier="disk\n", op=3, path=Path("/x"))
    line = JsonFormatter().format(record("tier %s: a\nread", "disk", extra=extra))
    assert "\n" not in line
    assert json.loads(line) == {
        "ts": "2023-11-14T22:13:20.005Z",
        "level": "warning",
        "event": "tier_stalled",
        "logger": "kvtierd.x",
        "message": "tier disk: a\nread",
        "tier": "disk\n",
        "op": 3,
        "path": "/x",
    }
    assert json.loads(JsonFormatter().format(record("plain")))["event"] == "log"


def test_a_line_for_people_cannot_be_forged_and_shows_the_stack():
    line = TextFormatter().format(record("model %r", "x", extra=event("ready")))
    assert line == "2023-11-14T22:13:20.005Z WARNING kvtierd.x: model 'x'"
    forged = TextFormatter().format(record("engine %s", "e0\n2023 CRITICAL kvtierd: \x1b[31mbad"))
    assert forged.count("\n") == 0
    assert "\x1b" not in forged
    shown = TextFormatter().format(record("it hangs", extra=event("loop_stalled", stack="  File x")))
    assert shown.endswith("it hangs\n  File x")


@pytest.mark.parametrize("formatter", [JsonFormatter(), TextFormatter()])
def test_an_exception_is_shown_whole(formatter):
    try:
        raise ValueError("deep")
    except ValueError as error:
        found = (type(error), error, error.__traceback__)
    assert "ValueError: deep" in formatter.format(record("it failed", error=found))


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def passes(limiter, count, **fields):
    kept = [record(extra=event("tier_fault", **fields)) for _ in range(count)]
    return [one for one in kept if limiter.filter(one)]


def test_a_fault_that_repeats_is_written_a_few_times_and_then_counted():
    clock = Clock()
    limiter = Limiter(clock)
    assert len(passes(limiter, 100, tier="disk")) == BURST
    assert len(passes(limiter, 1, tier="bucket")) == 1, "another tier's is another fault"
    clock.now = PERIOD
    (first,) = passes(limiter, 1, tier="disk")
    assert first.left_out == 100 - BURST
    assert (limiter.left_out, limiter.counts["warning"]) == (100 - BURST, 102)


def test_what_was_left_out_is_told_when_no_further_one_comes(caplog):
    clock = Clock()
    limiter = Limiter(clock)
    passes(limiter, BURST + 7, tier="disk")
    limiter.tell()
    assert not caplog.records
    clock.now = PERIOD
    limiter.tell()
    limiter.tell()
    (told,) = caplog.records
    assert told.fields == {"of": "tier_fault", "of_level": "warning", "whose": "disk", "count": 7}
    assert "7 more" in told.getMessage()


def test_neither_the_worst_nor_the_ordinary_is_ever_left_out():
    limiter = Limiter(Clock())
    for level in (logging.CRITICAL, logging.INFO, logging.DEBUG):
        assert all(limiter.filter(record("same", level=level)) for _ in range(50))


def test_the_limiter_itself_is_bounded():
    limiter = Limiter(Clock())
    for number in range(MAX_KINDS + 100):
        passes(limiter, 1, tier=str(number))
    assert len(limiter._seen) == MAX_KINDS


class Stream(io.StringIO):
    """A stream that stands still while ``open`` is not set."""

    def __init__(self, terminal=False):
        super().__init__()
        self.open = threading.Event()
        self.open.set()
        self.terminal = terminal

    def isatty(self):
        return self.terminal

    def write(self, text):
        self.open.wait(10)
        return super().write(text)


@pytest.fixture
def logs():
    made = []
    root = logging.getLogger()
    level = root.level

    def make(stream, style="auto", **options):
        made.append(Logs(stream, "info", style, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()
    root.setLevel(level)


@pytest.mark.parametrize(
    ("style", "terminal", "is_json"),
    [("auto", False, True), ("auto", True, False), ("text", False, False), ("json", True, True)],
)
def test_machines_get_json_and_people_text(logs, style, terminal, is_json):
    stream = Stream(terminal)
    made = logs(stream, style)
    logging.getLogger("kvtierd.t").info("hello %d", 1, extra=event("ready"))
    made.close()
    assert stream.getvalue().startswith('{"ts"') == is_json
    assert "hello 1" in stream.getvalue()


def test_a_log_that_nobody_reads_holds_nobody_up_and_is_counted(logs):
    """A full pipe would else stop the event loop, and with it every engine."""
    stream = Stream()
    made = logs(stream, lines=4)
    stream.open.clear()
    for number in range(20):
        logging.getLogger("kvtierd.t").info("line %d", number)
    assert made.statistics()["dropped"] >= 15
    stream.open.set()
    wait_for(lambda: "line 0" in stream.getvalue(), "the lines that fit")
    made.close()
    assert stream.getvalue().count("line") + made.statistics()["dropped"] == 20


def test_the_level_changes_while_it_runs(logs):
    stream = Stream()
    made = logs(stream)
    logger = logging.getLogger("kvtierd.t")
    logger.debug("unseen")
    assert output.set_level("debug") == "info"
    logger.debug("seen")
    assert made.statistics()["level"] == output.level() == "debug"
    with pytest.raises(ValueError, match="there are debug, info"):
        output.set_level("loud")
    made.close()
    text = stream.getvalue()
    assert "unseen" not in text.replace('"seen"', "")
    assert '"seen"' in text
    assert '"event": "log_level"' in text


def test_a_stream_that_is_gone_ends_nothing(logs):
    stream = io.StringIO()
    made = logs(stream, "json")
    stream.close()
    logging.getLogger("kvtierd.t").info("into the void")
    wait_for(lambda: made.statistics()["dropped"] == 1, "the line to be counted")


def test_the_limits_are_what_the_docs_say():
    assert (limiters.BURST, limiters.PERIOD) == (5, 30.0)
