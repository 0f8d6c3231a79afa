"""What may stand in a tier file."""

import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from kvtierd.config.audiences import PRESETS, Audience, Events, render_topic
from kvtierd.config.schema import CpuTier, Engine, FsTier, ObjectTier, Pool, TierFile
from kvtierd.core.model import Locality

CPU = {"name": "cpu", "type": "cpu"}
DISK = {"name": "disk", "type": "fs", "path": "/var/cache/kvtierd", "max_bytes": "1GiB"}


def tier_file(*tiers, **sections):
    tiers = list(tiers) or [CPU]
    return TierFile.model_validate({"version": 1, "pool": {"bytes": "1GiB"}, "tiers": tiers, **sections})


def refused(match, *tiers, **sections):
    with pytest.raises(ValidationError, match=match):
        tier_file(*tiers, **sections)


def test_the_shape_of_the_documentation_reads_with_its_defaults():
    got = tier_file(CPU, {**DISK, "locality": "LOCAL"})
    assert got.runtime_dir == Path("/run/kvtierd")
    assert got.state_dir == Path("/var/lib/kvtierd")
    assert got.pool == Pool(bytes=1 << 30)
    assert got.tiers == (
        CpuTier(name="cpu"),
        FsTier(name="disk", path=Path("/var/cache/kvtierd"), max_bytes=1 << 30, locality=Locality.LOCAL),
    )
    assert got.events == Events(audiences=(Audience(name="default"),))
    assert (got.events.ring_batches, got.events.ring_bytes, got.events.heartbeat) == (10_000, 64 << 20, 5.0)
    assert got.admin.listen == "127.0.0.1:9557"
    assert got.engine == Engine(job_ttl="60s", lease_ttl="1m", shutdown_grace="10s", max_frame_bytes="16MiB")


@pytest.mark.parametrize("value", ["local", "Local", "GLOBAL", "", "remote", 1, True])
@pytest.mark.parametrize("tier", [DISK, {"name": "lake", "type": "object", "url": "memory://lake"}])
def test_a_locality_is_local_or_remote_in_upper_case_and_nothing_else(tier, value):
    """L35."""
    refused("write LOCAL or REMOTE", CPU, {**tier, "locality": value})


@pytest.mark.parametrize("tier", [DISK, {"name": "lake", "type": "object", "url": "memory://lake"}])
def test_locality_is_what_was_written_and_never_inferred(tier):
    """L35: an object tier is not REMOTE by itself."""
    assert tier_file(CPU, tier).tiers[1].locality is None
    for locality in ("LOCAL", "REMOTE"):
        assert tier_file(CPU, {**tier, "locality": locality}).tiers[1].locality is Locality(locality)


def test_a_cpu_tier_takes_no_locality():
    refused("locality", {**CPU, "locality": "LOCAL"})


@pytest.mark.parametrize("value", ["yes", "True", "true", 1, 0, None, "on"])
def test_a_boolean_is_only_true_or_false(value):
    """L90."""
    refused("boolean", {**CPU, "events": value})
    refused("boolean", pool={"bytes": "1GiB", "huge_pages": value})


@pytest.mark.parametrize("value", [True, 1.0, "1", 2, None])
def test_the_version_is_the_number_one(value):
    refused("version", version=value)


@pytest.mark.parametrize("value", [True, 4.0, "4", 0, 65])
def test_counts_are_whole_numbers_in_range(value):
    refused("readers", CPU, {**DISK, "readers": value})


def test_a_file_tier_needs_its_limit_written_out():
    """L93."""
    without = {key: value for key, value in DISK.items() if key != "max_bytes"}
    refused("max_bytes", CPU, without)
    assert tier_file(CPU, {**without, "max_bytes": "unlimited"}).tiers[1].max_bytes == "unlimited"
    refused("max_bytes", CPU, {**DISK, "max_bytes": "Unlimited"})
    refused("max_bytes", CPU, {**DISK, "max_bytes": None})


@pytest.mark.parametrize("name", ["", "Disk", "-disk", "di sk", "a" * 64, "disk\n", 7])
def test_a_tier_name_is_short_and_plain(name):
    refused("name", CPU, {**DISK, "name": name})


def test_the_first_tier_is_the_one_and_only_cpu_tier():
    refused("first tier", DISK)
    refused("first tier", DISK, CPU)
    refused("exactly one", CPU, {"name": "more", "type": "cpu"})
    with pytest.raises(ValidationError, match="first tier"):
        TierFile.model_validate({"version": 1, "pool": {"bytes": "1GiB"}, "tiers": []})


def test_tiers_keep_the_order_of_the_file():
    others = [{**DISK, "name": name, "path": f"/cache/{name}"} for name in ("zeta", "alpha", "mid")]
    assert [tier.name for tier in tier_file(CPU, *others).tiers] == ["cpu", "zeta", "alpha", "mid"]


def test_two_tiers_share_neither_name_nor_folder():
    refused("already named 'disk'", CPU, DISK, {**DISK, "path": "/other"})
    refused("is shared with tier 'disk'", CPU, DISK, {**DISK, "name": "two"})
    refused("is shared with tier 'disk'", CPU, DISK, {**DISK, "name": "two", "path": DISK["path"] + "/sub"})
    refused("is shared with tier 'disk'", CPU, DISK, {**DISK, "name": "two", "path": "/var"})
    refused("is shared with state_dir", CPU, {**DISK, "path": "/var/lib/kvtierd"})


@pytest.mark.parametrize("path", ["cache", "~/cache", "", 7])
def test_a_path_is_absolute(path):
    refused("path", CPU, {**DISK, "path": path})


def test_an_object_tier_keeps_blocks_in_this_process():
    got = tier_file(CPU, {"name": "lake", "type": "object", "url": "memory://lake"}).tiers[1]
    assert got == ObjectTier(name="lake", url="memory://lake", max_bytes="unlimited")
    refused("memory://NAME", CPU, {"name": "lake", "type": "object", "url": "file:///x"})


@pytest.mark.parametrize("key", ["bind", "replay"])
def test_an_audience_outside_the_pod_must_say_whether_tokens_go_out(key):
    outside = {"name": "default", key: "tcp://*:6000"}
    refused("write tokens: true", events={"audiences": [outside]})
    for tokens in (True, False):
        got = tier_file(events={"audiences": [{**outside, "tokens": tokens}]}).events.audiences[0]
        assert got.publishes_tokens is tokens
    assert Audience(name="default").publishes_tokens is True


def test_addresses_that_collide_are_refused_before_any_bind():
    """L97."""
    one = {"name": "default", "bind": "tcp://127.0.0.1:5557", "replay": "tcp://127.0.0.1:5557"}
    refused("events.audiences.0.replay: is the same address", events={"audiences": [one]})
    refused("admin.listen: is the same address", admin={"listen": "127.0.0.1:5558"})
    tier_file(
        events={"audiences": [{"name": "a", "bind": "tcp://127.0.0.1:0", "replay": "tcp://127.0.0.1:0"}]}
    )


def test_an_audience_cannot_take_kvtierds_own_socket():
    one = {"name": "default", "bind": "ipc:///run/kvtierd/engine.sock"}
    refused("own socket", events={"audiences": [one]})


def audiences(*several):
    return {"audiences": [{"name": f"a{index}", **one} for index, one in enumerate(several)]}


def test_there_may_be_many_audiences_each_with_a_name_and_addresses_of_its_own():
    refused("at least 1 item", events={"audiences": []})
    two = [{"bind": f"tcp://127.0.0.1:{port}", "replay": None} for port in (1, 2)]
    assert len(tier_file(events=audiences(*two)).events.audiences) == 2
    refused("already named 'a0'", events=audiences(two[0], {**two[1], "name": "a0"}))
    refused("audiences.1.bind: is the same address as events.audiences.0.bind", events=audiences({}, {}))


def test_the_ports_of_all_ranks_are_looked_at_before_any_bind():
    """L94, L97: 5557 and 5559 with four ranks."""
    one = {"bind": "tcp://127.0.0.1:5557", "replay": "tcp://127.0.0.1:5559", "rank_ports": 4}
    refused("audiences.0.replay: is the same address as events.audiences.0.bind", events=audiences(one))
    tier_file(events=audiences({**one, "replay": "tcp://127.0.0.1:5561"}))
    refused("not so many ports", events=audiences({**one, "replay": "tcp://127.0.0.1:65534"}))
    refused("and its port", events=audiences({**one, "replay": "ipc:///run/replay.sock"}))
    refused("needs rank_ports", events=audiences({"topic": "kv@{dp_rank}"}))


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_a_preset_sets_what_is_not_written_and_what_is_written_wins(preset):
    events = {"model": "m", **audiences({"preset": preset})}
    got = tier_file(events=events).events.audiences[0]
    assert got.form == ("array" if preset == "aibrix" else "map")
    assert got.removals is (preset != "aibrix")
    assert got.topic == ("kv@{pod_ip}:8000@{model}" if preset == "llm-d" else "")
    written = tier_file(events={**events, **audiences({"preset": preset, "topic": "kv@a@b"})})
    assert written.events.audiences[0].topic == "kv@a@b"
    refused("Input should be", events=audiences({"preset": "sglang"}))


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ({"bind": "tcp://127.0.0.1:1", "connect": "tcp://127.0.0.1:2"}, "either bind or connect"),
        ({"bind": None}, "either bind or connect"),
        ({"connect": "tcp://*:5557", "tokens": True}, "the router's own host"),
        ({"connect": "tcp://127.0.0.1:0"}, "the router's own host"),
        ({"connect": "tcp://router:5557"}, "write tokens: true"),
        ({"topic": "kv@{pod}@m"}, "{pod} is no placeholder; there are {pod_name}, {pod_ip}"),
        ({"topic": "kv@{"}, "write {{ for a brace"),
        ({"topic": "kv@{pod_ip!r}"}, "plain name"),
        ({"form": "json"}, "'map' or 'array'"),
        ({"media": []}, "at least 1"),
        ({"media": ["DISK"]}, "STORAGE"),
        ({"max_events": 5000}, "4096"),
    ],
)
def test_settings_of_an_audience_that_cannot_work_say_what_to_write(written, says):
    refused(re.escape(says), events=audiences(written))


def test_an_audience_connects_where_the_router_binds():
    got = tier_file(events=audiences({"connect": "tcp://127.0.0.1:5557"})).events.audiences[0]
    assert (got.bind, got.connect) == (None, "tcp://127.0.0.1:5557")
    tier_file(events=audiences({"connect": "tcp://127.0.0.1:5557", "replay": None}, {}))


def test_topics_are_filled_in_from_the_pods_own_variables():
    audience = Audience(name="a", topic="kv@{pod_ip}@{model}/{namespace}.{pod_name}", preset="llm-d")
    pod = {"POD_IP": "10.0.0.1", "POD_NAMESPACE": "ns", "POD_NAME": "p-0"}
    assert render_topic(audience, "org/m", pod) == "kv@10.0.0.1@org/m/ns.p-0"
    with pytest.raises(ValueError, match="variable POD_IP, which is not set"):
        render_topic(audience, "m", {})
    with pytest.raises(ValueError, match=r"events\.model"):
        render_topic(audience, None, pod)
    with pytest.raises(ValueError, match="exactly two @"):
        render_topic(audience, "m@v2", pod)


def test_settings_without_effect_are_refused():
    """L90: accepted and ignored is the worst."""
    refused("only with backing: file", pool={"bytes": "1GiB", "path": "/dev/shm/pool"})
    refused("only with backing: memfd", pool={"bytes": "1GiB", "backing": "file", "huge_pages": True})


def test_a_runtime_dir_too_long_for_a_socket_is_refused():
    refused("too long", runtime_dir="/" + "x" * 100)


def test_a_tier_file_is_frozen():
    got = tier_file()
    with pytest.raises(ValidationError, match="frozen"):
        got.pool.bytes = 1
