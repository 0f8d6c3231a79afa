"""Who hears the event stream: audiences, the presets for real routers, and topics with placeholders."""

from __future__ import annotations

import string
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, Strict, StringConstraints, model_validator

from kvtierd.config.endpoints import offset, parse_endpoint
from kvtierd.config.fields import AbsolutePath, Duration, Name, Problem, Section, Size
from kvtierd.config.relay import Relay

PLACEHOLDERS = {"pod_name": "POD_NAME", "pod_ip": "POD_IP", "namespace": "POD_NAMESPACE"}
"""Of topics: what stands for which variable, set from Kubernetes' downward API."""
OTHER_PLACEHOLDERS = ("model", "dp_rank")

PRESETS: dict[str, dict[str, Any]] = {
    "vllm-router": {
        "topic": "",
        "form": "map",
        "shared_blocks": "each_rank",
        "reannounce_orphans": True,
        "coalesce": "50ms",
        "renumber_after": 1 << 17,
    },
    "dynamo": {"topic": "", "form": "map", "shared_blocks": "each_rank"},
    "llm-d": {
        "topic": "kv@{pod_ip}:8000@{model}",
        "form": "map",
        "shared_blocks": "once",
        "reannounce_orphans": True,
        "coalesce": "50ms",
        "renumber_after": 1 << 17,
    },
    "aibrix": {
        "topic": "",
        "form": "array",
        "media": ["GPU", "CPU"],
        "removals": False,
        "one_block_per_event": True,
        "reannounce_orphans": True,
        "shared_blocks": "once",
    },
    "vllm-0.26": {
        "topic": "",
        "form": "map",
        "medium_names": {"fs": "FS", "object": "OBJ"},
        "one_block_per_event": False,
        "shared_blocks": "once",
    },
}
"""What a preset sets; keys written in the tier file win. The reasons stand in ``kvtierd/wire/ROUTERS.md``."""


def _check_endpoint(value: str) -> str:
    parse_endpoint(value)
    return value


def _check_topic(value: str) -> str:
    for name in _fields(value):
        if name not in PLACEHOLDERS and name not in OTHER_PLACEHOLDERS:
            known = ", ".join(f"{{{known}}}" for known in (*PLACEHOLDERS, *OTHER_PLACEHOLDERS))
            raise ValueError(f"{{{name}}} is no placeholder; there are {known}")
    return value


def _fields(topic: str) -> list[str]:
    try:
        parts = list(string.Formatter().parse(topic))
    except ValueError as error:
        raise ValueError(f"{error}; write {{{{ for a brace itself") from None
    if any(spec or conversion for _, _, spec, conversion in parts):
        raise ValueError("a placeholder is a plain name in braces")
    return [name for _, name, _, _ in parts if name is not None]


EndpointField = Annotated[str, AfterValidator(_check_endpoint)]
Topic = Annotated[str, StringConstraints(max_length=512), AfterValidator(_check_topic)]
MediumName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_]{1,32}$")]
Ranks = Annotated[int, Field(ge=1, le=1024)]


class Curve(Section):
    """ZeroMQ's encryption and authentication; kvtierd is the CURVE server, clients need its public key.

    Files hold a key as ``pyzmq`` writes it (``zmq.auth.create_certificates``). ``allowed_clients``: public
    keys of those who may connect; empty: everybody who knows kvtierd's public key.
    """

    secret_key_file: AbsolutePath
    allowed_clients: Annotated[tuple[AbsolutePath, ...], Strict(False)] = ()


class Audience(Section):
    """One PUB endpoint with its replay endpoint, and what readers there get to hear.

    ``preset`` sets the other keys for a known router. ``connect`` instead of ``bind``: the router binds.
    ``rank_ports``: so many dp ranks get ports of their own, rank r the written port + r. ``renumber_after``:
    numbers start low again after so many batches, for readers that take this for a new start and ask for
    every number from 0.
    """

    name: Name
    preset: Literal["vllm-router", "dynamo", "llm-d", "aibrix", "vllm-0.26"] | None = None
    bind: EndpointField | None = "tcp://127.0.0.1:5557"
    connect: EndpointField | None = None
    replay: EndpointField | None = "tcp://127.0.0.1:5558"
    topic: Topic = ""
    form: Literal["map", "array"] = "map"
    tokens: bool | None = None
    media: (
        Annotated[
            tuple[Literal["GPU", "CPU", "STORAGE"], ...], Strict(False), Field(min_length=1, max_length=3)
        ]
        | None
    ) = None
    removals: bool = True
    one_block_per_event: bool = True
    medium_names: dict[Name, MediumName] = Field(default_factory=dict)
    shared_blocks: Literal["once", "each_rank"] = "once"
    reannounce_orphans: bool = False
    rank_ports: Ranks | None = None
    max_events: Annotated[int, Field(ge=1, le=4096)] = 4096
    max_bytes: Annotated[Size, Field(ge=64 << 10, le=16 << 20)] = 4 << 20
    coalesce: Duration | None = None
    renumber_after: Annotated[int, Field(ge=1 << 16, le=1 << 40)] | None = None
    hwm: Annotated[int, Field(ge=1, le=10_000_000)] = 100_000
    curve: Curve | None = None

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        preset = value.get("preset")
        defaults = PRESETS.get(preset, {}) if isinstance(preset, str) else {}
        if value.get("connect") is not None:
            defaults = {**defaults, "bind": None}
        return {**defaults, **value}

    @property
    def publishes_tokens(self) -> bool:
        """``tokens`` with its default filled in: true, since unset is only allowed inside the pod."""
        return self.tokens is not False

    def endpoints(self) -> Iterator[tuple[str, str]]:
        """Yield each key that names an endpoint, and the endpoint of the first rank."""
        for key, value in (("bind", self.bind), ("connect", self.connect), ("replay", self.replay)):
            if value is not None:
                yield key, value

    def bound(self) -> Iterator[tuple[str, str]]:
        """Yield all endpoints that are bound, of every rank, with their keys."""
        for key, value in self.endpoints():
            port = parse_endpoint(value).port
            for rank in range(min(self.rank_ports or 1, 65536 - port) if port else 1):
                if key != "connect":
                    yield key, offset(value, rank)


class Events(Section):
    """The event stream. The replay ring of a stream holds at most ``ring_batches`` and ``ring_bytes``.

    ``model``: what routers call the served model, for topics with ``{model}``. ``relay``: engines whose own
    events join the stream. ``on_stop``: whether a clean stop takes back the pool's and the engines' blocks,
    or leaves readers with them because the next start finds them again.
    """

    enabled: bool = True
    audiences: Annotated[tuple[Audience, ...], Strict(False), Field(min_length=1, max_length=64)] = (
        Audience(name="default"),
    )
    model: Annotated[str, StringConstraints(min_length=1, max_length=256)] | None = None
    ring_batches: Annotated[int, Field(ge=1, le=10_000_000)] = 10_000
    ring_bytes: Size = 64 << 20
    heartbeat: Duration = 5.0
    relay: Annotated[tuple[Relay, ...], Strict(False), Field(max_length=1024)] = ()
    on_stop: Literal["remove", "keep"] = "remove"


def render_topic(audience: Audience, model: str | None, environ: Mapping[str, str], rank: int = 0) -> str:
    """Return the audience's topic with its placeholders filled in.

    Raises:
        ValueError: a variable or ``events.model`` is missing, or llm-d could not take the topic apart.
    """
    values = {"dp_rank": str(rank)}
    for name in _fields(audience.topic):
        variable = PLACEHOLDERS.get(name)
        if variable is not None and not environ.get(variable):
            raise ValueError(f"{{{name}}} needs the variable {variable}, which is not set")
        if variable is not None:
            values[name] = environ[variable]
        elif name == "model":
            if model is None:
                raise ValueError("{model} needs events.model: what routers call the served model")
            values[name] = model
    topic = audience.topic.format_map(values)
    if audience.preset == "llm-d" and (topic.count("@") != 2 or not topic.startswith("kv@")):
        raise ValueError(f"llm-d reads kv@POD@MODEL with exactly two @, not {topic!r}")
    return topic


def topic_problems(events: Events, environ: Mapping[str, str]) -> Iterator[Problem]:
    """Yield the topics that cannot be filled in from ``environ``."""
    for index, audience in enumerate(events.audiences if events.enabled else ()):
        try:
            render_topic(audience, events.model, environ)
        except ValueError as error:
            yield ("events", "audiences", index, "topic"), str(error)


def audience_problems(events: Events) -> Iterator[Problem]:
    """Yield what is wrong between an audience's values, and between audiences."""
    for index, audience in enumerate(events.audiences):
        path = ("events", "audiences", index)
        if any(audience.name == other.name for other in events.audiences[:index]):
            yield (*path, "name"), f"another audience is already named {audience.name!r}"
        for key, text in _problems_of(audience):
            yield (*path, key), text


def _problems_of(audience: Audience) -> Iterator[tuple[str, str]]:
    if (audience.bind is None) == (audience.connect is None):
        yield "bind", "write either bind or connect"
    outside = [where for _, where in audience.endpoints() if not parse_endpoint(where).is_loopback]
    if outside and audience.tokens is None:
        yield (
            "tokens",
            f"{outside[0]} can be reached from outside the pod: write tokens: true (events carry the "
            "prompts' token ids, which some routers need) or tokens: false",
        )
    if audience.connect is not None:
        target = parse_endpoint(audience.connect)
        if target.is_wildcard or not (target.port or target.path):
            yield "connect", "write the router's own host and port"
    if audience.rank_ports is None and "dp_rank" in _fields(audience.topic):
        yield "topic", "{dp_rank} needs rank_ports: numbers run through all ranks of one stream"
    if (audience.rank_ports or 1) > 1:
        for key, where in audience.endpoints():
            endpoint = parse_endpoint(where)
            if not endpoint.port:
                yield key, "with rank_ports, write a tcp endpoint and its port"
            elif endpoint.port + (audience.rank_ports or 1) - 1 > 65535:
                yield key, "there are not so many ports after this one"
