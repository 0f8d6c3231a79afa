"""The tier file: what may stand in it, with defaults. Strict types, no unknown keys, frozen once read.

Checks of one value stand with its field; :func:`problems_between` holds those that look at several.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    Strict,
    StringConstraints,
    Tag,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from kvtierd.config import plugins
from kvtierd.config.access import Access, Engine, access_problems, engine_problems
from kvtierd.config.audiences import Events, audience_problems
from kvtierd.config.endpoints import UNIX_PATH_MAX, Endpoint, parse_endpoint, parse_listen
from kvtierd.config.fields import AbsolutePath, Duration, Limit, Name, Problem, Section, Size
from kvtierd.config.object_store import (
    check_endpoint,
    check_url,
    check_variable,
    setting_problems,
    split_url,
)
from kvtierd.config.relay import relay_problems
from kvtierd.config.tenants import SPARE, Tenant, tenant_problems
from kvtierd.core.geometry import UNIT
from kvtierd.core.model import Locality

BestEffort = Literal["auto", "require", "off"]
"""``auto``: try, and say in status what came of it. ``require``: refuse to start without. ``off``: never."""


def _to_locality(value: object) -> object:
    if isinstance(value, Locality):
        return value
    if value not in ("LOCAL", "REMOTE"):
        raise ValueError("write LOCAL or REMOTE, upper case, or leave the key out")
    return Locality(value)


def _check_version(value: object) -> object:
    if type(value) is not int or value != 1:  # Literal alone takes true and 1.0
        raise ValueError("write version: 1, the only one there is")
    return value


def _check_listen(value: str) -> str:
    parse_listen(value)
    return value


def _to_credentials(value: object) -> object:
    return {} if value == "env" else value


LocalityField = Annotated[
    Locality,
    BeforeValidator(_to_locality),
    WithJsonSchema({"enum": ["LOCAL", "REMOTE"]}),
]
ListenField = Annotated[str, AfterValidator(_check_listen)]
PluginType = Annotated[
    str, WithJsonSchema({"type": "string", "not": {"enum": list(plugins.BUILT_IN)}, "minLength": 1})
]
VariableName = Annotated[str, AfterValidator(check_variable)]
Policy = Literal["auto", "lru", "s3fifo", "arc"]
"""What leaves a full tier first; the names of :data:`kvtierd.core.policies.POLICIES`."""

Workers = Annotated[int, Field(ge=1, le=64)]


class Pool(Section):
    """The shared host memory that is the CPU tier. ``bytes`` is the total, whatever the number of ranks."""

    bytes: Annotated[Size, Field(ge=UNIT)]
    backing: Literal["memfd", "file"] = "memfd"
    path: AbsolutePath | None = None
    lock: BestEffort = "auto"
    pin: BestEffort = "auto"
    huge_pages: bool = False
    prefault_threads: Annotated[int, Field(ge=0, le=256)] = 0


class CpuTier(Section):
    """The primary tier: the slots of the pool. It has no locality; only fs and object tiers may."""

    name: Name
    type: Literal["cpu"] = "cpu"
    policy: Policy = "auto"
    events: bool = True


class _StorageTier(Section):
    """What all tiers below the pool have in common.

    ``ttl``: a block unused for this long leaves. ``demote``: write when a block is stored, or only when the
    pool evicts it. ``deadline``: an operation that takes longer marks the tier stalled. ``shared``: other
    daemons write to the same place, so that unknown keys are worth a look. ``max_load_time``: what would take
    longer than this to load, at the pace of the tier's last reads, is a miss: computing it anew is cheaper.
    """

    name: Name
    locality: LocalityField | None = None
    events: bool = True
    policy: Policy = "auto"
    readers: Workers = 4
    writers: Workers = 2
    inflight_bytes: Size = 256 << 20
    deadline: Duration = 30.0
    ttl: Duration | None = None
    demote: Literal["on_store", "on_evict"] = "on_store"
    shared: bool = False
    max_load_time: Duration | None = None


class FsTier(_StorageTier):
    """Blocks as files below ``path``. ``max_bytes`` must be written out, be it as ``unlimited``.

    ``min_free``: bytes that the filesystem must keep free for others. ``io``: how bytes move; ``auto`` serves
    what the page cache holds from there and the rest directly. ``fsync: data`` survives a power cut.
    ``pack_below``: smaller blocks share segment files, if no other daemon shares the path; ``1B``: none do.
    """

    type: Literal["fs"] = "fs"
    path: AbsolutePath
    max_bytes: Limit
    min_free: Size | None = None
    io: Literal["auto", "direct", "buffered"] = "auto"
    fsync: Literal["none", "data"] = "none"
    pack_below: Size = 32 << 20


class Credentials(Section):
    """Where an object tier's keys come from; nothing set, or ``env``: the provider's own chain.

    That is its variables, workload identity or the machine's metadata service. Keys themselves never stand in
    a tier file. ``file``: an AWS credentials file, a service account's JSON (gs) or the account's key (az).
    """

    file: AbsolutePath | None = None
    profile: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,64}$")] | None = None
    access_key_variable: VariableName | None = None
    secret_key_variable: VariableName | None = None
    session_token_variable: VariableName | None = None


class ObjectTier(_StorageTier):
    """Blocks in an object store, or in this process with ``memory://NAME``.

    ``shared`` is true by default but for ``memory://``: what the bucket holds is then learnt by looking keys
    up; with ``shared: false`` it is listed at start. ``request_timeout`` is one request's, ``deadline`` that
    of a whole operation with all its ``retries``. ``unsigned_payload: auto``: only to this machine.
    """

    type: Literal["object"] = "object"
    url: Annotated[str, AfterValidator(check_url)]
    max_bytes: Limit = "unlimited"
    endpoint: Annotated[str, AfterValidator(check_endpoint)] | None = None
    region: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9-]{1,64}$")] | None = None
    account: Annotated[str, StringConstraints(pattern=r"^[a-z0-9]{3,24}$")] | None = None
    credentials: Annotated[Credentials, BeforeValidator(_to_credentials)] = Credentials()
    ca_bundle: AbsolutePath | None = None
    allow_http: bool = False
    unsigned_payload: Literal["auto", "always", "never"] = "auto"
    connect_timeout: Duration = 2.0
    request_timeout: Duration = 10.0
    retries: Annotated[int, Field(ge=0, le=20)] = 4

    @model_validator(mode="before")
    @classmethod
    def _share_buckets(cls, value: Any) -> Any:
        if isinstance(value, dict) and "shared" not in value:
            url = value.get("url")
            return {**value, "shared": isinstance(url, str) and not url.startswith("memory://")}
        return value


class PluginTier(_StorageTier):
    """Blocks in storage of a type that an installed package adds (:mod:`kvtierd.config.plugins`).

    ``options`` go to the package as they are; they are shown by ``kvtierd check``, so no secrets in there.
    """

    type: PluginType
    max_bytes: Limit = "unlimited"
    options: dict[str, Any] = Field(default_factory=dict)


def _tier_tag(value: object) -> str | None:
    """Return which kind of tier a mapping or model is meant to be; a tag that is none names the mistake."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if not isinstance(kind, str) or kind in plugins.BUILT_IN:
        return kind if isinstance(kind, str) else None
    return "plugin" if kind in plugins.installed() else kind


Tier = Annotated[
    Annotated[CpuTier, Tag("cpu")]
    | Annotated[FsTier, Tag("fs")]
    | Annotated[ObjectTier, Tag("object")]
    | Annotated[PluginTier, Tag("plugin")],
    Discriminator(_tier_tag),
]
StorageTier = FsTier | ObjectTier | PluginTier
"""Every tier below the pool."""


class Admin(Section):
    """The read-only HTTP listener (probes, status); ``null`` turns it off."""

    listen: ListenField | None = "127.0.0.1:9557"


class Log(Section):
    """What the daemon writes to its standard error. ``format: auto``: text on a terminal, else JSON lines."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "json", "text"] = "auto"


class Traces(Section):
    """OpenTelemetry spans of stores and loads, as children of the engine's own.

    They need the packages of the extra ``traces``; where they go, and how many, is set by OpenTelemetry's own
    variables (``OTEL_EXPORTER_OTLP_ENDPOINT``, ``OTEL_TRACES_SAMPLER``).
    """

    enabled: bool = False


class TierFile(Section):
    """A whole tier file. The order of ``tiers`` is the order in which their events are drained.

    ``watch_file``: how often to look whether this file changed, to reload it then; ``null``: never.
    """

    version: Annotated[Literal[1], BeforeValidator(_check_version)]
    runtime_dir: AbsolutePath = Path("/run/kvtierd")
    state_dir: AbsolutePath = Path("/var/lib/kvtierd")
    pool: Pool
    tiers: Annotated[tuple[Tier, ...], Strict(False)]
    tenants: Annotated[tuple[Tenant, ...], Strict(False)] = ()
    events: Events = Events()
    admin: Admin = Admin()
    log: Log = Log()
    traces: Traces = Traces()
    access: Access = Access()
    engine: Engine = Engine()
    watch_file: Duration | None = None

    @property
    def primary(self) -> CpuTier:
        """The tier that is the pool."""
        first = self.tiers[0]
        assert isinstance(first, CpuTier), "checked with the tier file"
        return first

    @property
    def secondaries(self) -> tuple[StorageTier, ...]:
        """The tiers below the pool."""
        return tuple(tier for tier in self.tiers if not isinstance(tier, CpuTier))

    @model_validator(mode="after")
    def _check_between(self) -> TierFile:
        problems = list(problems_between(self))
        if problems:
            text = "; ".join(f"{'.'.join(map(str, path))}: {message}" for path, message in problems)
            raise PydanticCustomError("tier_file", "{text}", {"text": text, "problems": problems})
        return self


def problems_between(tier_file: TierFile) -> Iterator[Problem]:
    """Yield what is wrong between values that are each right on their own."""
    yield from _pool_problems(tier_file.pool)
    yield from _tier_problems(tier_file)
    yield from _object_tier_problems(tier_file.tiers)
    yield from tenant_problems(tier_file.tenants, _room(tier_file))
    yield from audience_problems(tier_file.events)
    if tier_file.events.on_stop == "keep" and tier_file.pool.backing != "file":
        yield ("events", "on_stop"), "keep needs a pool that outlives the process: pool.backing: file"
    yield from _endpoint_problems(tier_file)
    yield from access_problems(tier_file.access)
    yield from engine_problems(tier_file.engine)


def _room(tier_file: TierFile) -> dict[str, int | None]:
    """Return the bytes that are surely for blocks in each tier, None where there is no limit."""
    below = {
        tier.name: tier.max_bytes - tier.max_bytes // SPARE if isinstance(tier.max_bytes, int) else None
        for tier in tier_file.secondaries
    }
    cpu = {tier.name: tier_file.pool.bytes for tier in tier_file.tiers[:1] if isinstance(tier, CpuTier)}
    return {**cpu, **below}


def _pool_problems(pool: Pool) -> Iterator[Problem]:
    if pool.backing == "memfd" and pool.path is not None:
        yield ("pool", "path"), "has an effect only with backing: file"
    if pool.backing == "file" and pool.huge_pages:
        yield ("pool", "huge_pages"), "works only with backing: memfd"


def _tier_problems(tier_file: TierFile) -> Iterator[Problem]:
    tiers = tier_file.tiers
    if not tiers or not isinstance(tiers[0], CpuTier):
        yield ("tiers", 0) if tiers else ("tiers",), "the first tier must be the primary one, of type cpu"
    for index, tier in enumerate(tiers):
        if index and isinstance(tier, CpuTier):
            yield ("tiers", index), "only the first tier can be of type cpu, and there is exactly one"
        if any(tier.name == other.name for other in tiers[:index]):
            yield ("tiers", index, "name"), f"another tier is already named {tier.name!r}"
    taken = [("runtime_dir", tier_file.runtime_dir), ("state_dir", tier_file.state_dir)]
    for index, tier in enumerate(tiers):
        if isinstance(tier, FsTier):
            # A tier below a tier would index the other's files.
            for owner, path in taken:
                nested = owner.startswith("tier ") and (
                    path in tier.path.parents or tier.path in path.parents
                )
                if path == tier.path or nested:
                    yield ("tiers", index, "path"), f"is shared with {owner} ({path})"
            taken.append((f"tier {tier.name!r}", tier.path))


def _object_tier_problems(tiers: tuple[Tier, ...]) -> Iterator[Problem]:
    for index, tier in enumerate(tiers):
        if not isinstance(tier, ObjectTier):
            continue
        for key, text in _object_problems(tier):
            yield ("tiers", index, *key.split(".")), text
        if any(isinstance(other, ObjectTier) and _same_place(tier, other) for other in tiers[:index]):
            yield ("tiers", index, "url"), "another tier keeps its blocks in the same place"


def _same_place(tier: ObjectTier, other: ObjectTier) -> bool:
    """Say whether two tiers would store into the same keys of the same bucket."""
    return not tier.url.startswith("memory://") and (
        (split_url(tier.url), tier.endpoint) == (split_url(other.url), other.endpoint)
    )


def _object_problems(tier: ObjectTier) -> Iterator[tuple[str, str]]:
    if tier.url.startswith("memory://"):
        return
    keys = tier.credentials
    if tier.request_timeout > tier.deadline:
        yield "request_timeout", "is longer than the tier's deadline"
    if tier.connect_timeout > tier.request_timeout:
        yield "connect_timeout", "is longer than request_timeout"
    yield from setting_problems(
        scheme=split_url(tier.url)[0],
        endpoint=tier.endpoint,
        region=tier.region,
        account=tier.account,
        allow_http=tier.allow_http,
        access_key=keys.access_key_variable is not None,
        secret_key=keys.secret_key_variable is not None,
        session_token=keys.session_token_variable is not None,
        file=keys.file is not None,
        profile=keys.profile is not None,
    )


def _endpoint_problems(tier_file: TierFile) -> Iterator[Problem]:
    bound: list[tuple[tuple[str | int, ...], Endpoint]] = []
    for index, audience in enumerate(tier_file.events.audiences):
        path = ("events", "audiences", index)
        bound += [((*path, key), parse_endpoint(where)) for key, where in audience.bound()]
    yield from relay_problems(tier_file.events.relay, [endpoint for _, endpoint in bound])
    for index, relay in enumerate(tier_file.events.relay):
        if relay.bind is not None:
            bound.append((("events", "relay", index, "bind"), parse_endpoint(relay.bind)))
    if tier_file.admin.listen is not None:
        bound.append((("admin", "listen"), parse_listen(tier_file.admin.listen)))
    for (first, one), (second, other) in combinations(bound, 2):
        if one.collides(other):
            yield second, f"is the same address as {'.'.join(map(str, first))}"
    if len(bytes(tier_file.runtime_dir / "control.sock")) > UNIX_PATH_MAX:
        yield ("runtime_dir",), f"is too long: a Unix socket's path has at most {UNIX_PATH_MAX} bytes"
    own = {str(tier_file.runtime_dir / name) for name in ("engine.sock", "control.sock")}
    yield from ((path, "is kvtierd's own socket") for path, endpoint in bound if endpoint.path in own)
