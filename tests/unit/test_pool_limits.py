"""What each limit leaves, read from trees like those of real machines."""

import pytest

from kvtierd.edges.memory_limits import (
    Room,
    filesystem_room,
    huge_page_room,
    memory_rooms,
    require_room,
)
from kvtierd.errors import PoolError

MIB = 1 << 20
MEMINFO = "MemTotal: 2048 kB\nMemAvailable: 1024 kB\nHugePages_Free: 3\nHugepagesize: 2048 kB\n"


@pytest.fixture
def machine(tmp_path):
    def machine(files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return machine


def available(root):
    return [room.available for room in memory_rooms(root)]


def test_the_machines_own_memory_counts(machine):
    root = machine({"proc/meminfo": MEMINFO})
    assert available(root) == [MIB]
    assert huge_page_room(root) == (6 * MIB, 2 * MIB)


def test_a_v2_group_leaves_its_limit_less_what_cannot_be_reclaimed(machine):
    group = "sys/fs/cgroup/pod/box"
    root = machine(
        {
            "proc/self/cgroup": "0::/pod/box\n",
            f"{group}/memory.max": f"{100 * MIB}\n",
            f"{group}/memory.current": f"{60 * MIB}\n",
            f"{group}/memory.stat": f"anon 1\nfile {50 * MIB}\nshmem {20 * MIB}\n"
            f"inactive_file {20 * MIB}\nactive_file {10 * MIB}\n",
        }
    )
    assert available(root) == [70 * MIB]


def test_the_limit_of_a_parent_group_counts_too(machine):
    root = machine(
        {
            "proc/self/cgroup": "0::/pod/box\n",
            "sys/fs/cgroup/pod/box/memory.max": "max\n",
            "sys/fs/cgroup/pod/box/memory.current": "1\n",
            "sys/fs/cgroup/pod/memory.max": "1000\n",
            "sys/fs/cgroup/pod/memory.current": "400\n",
        }
    )
    assert available(root) == [600]


def test_a_v1_group_is_read_by_its_own_names(machine):
    group = "sys/fs/cgroup/memory/box"
    root = machine(
        {
            "proc/self/cgroup": "9:name=systemd:/\n5:cpu,memory:/box\n0::/\n",
            f"{group}/memory.limit_in_bytes": "1000\n",
            f"{group}/memory.usage_in_bytes": "700\n",
            f"{group}/memory.stat": "inactive_file 1\ntotal_inactive_file 50\ntotal_active_file 50\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "1\n",
        }
    )
    assert available(root) == [400]


def test_a_container_sees_its_group_as_the_root_of_the_mount(machine):
    root = machine(
        {
            "proc/self/cgroup": "0::/kubepods/pod1/box\n",
            "sys/fs/cgroup/memory.max": "1000\n",
            "sys/fs/cgroup/memory.current": "0\n",
        }
    )
    assert available(root) == [1000]


def test_a_machine_that_tells_nothing_limits_nothing(tmp_path):
    assert available(tmp_path) == []
    assert huge_page_room(tmp_path) == (0, 0)
    require_room(1 << 50, memory_rooms(tmp_path), "pool.bytes")


def test_the_tightest_limit_decides_and_is_named():
    rooms = [Room("machine", 500), Room("group", 300), Room("disk", 400)]
    require_room(300, iter(rooms), "pool.bytes")
    with pytest.raises(
        PoolError, match=r"^pool\.bytes: 301 B .*needed, 300 B .*available in the group; lower pool"
    ):
        require_room(301, iter(rooms), "pool.bytes")


def test_a_limit_that_is_overdrawn_leaves_nothing():
    with pytest.raises(PoolError, match=r"\(0 bytes\) available"):
        require_room(1, iter([Room("group", -5)]), "pool.bytes")


def test_this_machine_and_its_filesystem_can_be_read(tmp_path):
    assert all(room.available > 0 for room in memory_rooms())
    assert filesystem_room(tmp_path).available > 0
