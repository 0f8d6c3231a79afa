"""How much memory this process may still take: the machine's, its cgroups' (v1 and v2) and a filesystem's.

A pool that does not fit must be refused before it is allocated: later the kernel only knows SIGBUS or the OOM
killer.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvtierd.config.units import human_size
from kvtierd.errors import PoolError

_NO_LIMIT = 1 << 60  # cgroup v1 says "no limit" with a number near 2**63


@dataclass(frozen=True, slots=True)
class Room:
    """What one limit leaves: ``available`` bytes; ``limit`` says which limit, for people."""

    limit: str
    available: int


def memory_rooms(root: Path = Path("/")) -> Iterator[Room]:
    """Yield what each limit on this process's memory leaves. ``root`` is where ``proc`` and ``sys`` are."""
    available = _meminfo(root).get("MemAvailable")
    if available is not None:
        yield Room("memory of the machine (MemAvailable)", available)
    yield from _cgroup_rooms(root)


def anonymous_bytes() -> int:
    """Return what this process has resident of its own: no pool, no files; 0 where nobody says."""
    for line in _lines(Path("/proc/self/status")):
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    return 0


def huge_page_room(root: Path = Path("/")) -> tuple[int, int]:
    """Return (bytes in free huge pages, size of one) of the default size; zeros where there are none."""
    info = _meminfo(root)
    size = info.get("Hugepagesize", 0)
    return info.get("HugePages_Free", 0) * size, size


def filesystem_room(folder: Path) -> Room:
    """Return what the filesystem at ``folder`` has left for this process."""
    stat = os.statvfs(folder)
    return Room(f"filesystem at {folder}", stat.f_bavail * stat.f_frsize)


def require_room(needed: int, rooms: Iterator[Room], setting: str) -> None:
    """Check that ``needed`` bytes fit each of ``rooms``.

    Raises:
        PoolError: they do not; names needed, available, the limit and the ``setting`` to change.
    """
    tightest = min(rooms, key=lambda room: room.available, default=None)
    if tightest is not None and needed > tightest.available:
        available = max(tightest.available, 0)
        raise PoolError(
            f"{setting}: {human_size(needed)} ({needed} bytes) needed, {human_size(available)} "
            f"({available} bytes) available in the {tightest.limit}; lower {setting} or raise that limit"
        )


def _meminfo(root: Path) -> dict[str, int]:
    """Return ``/proc/meminfo``; sizes in bytes, counts as they are."""
    values = {}
    for line in _lines(root / "proc/meminfo"):
        key, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            values[key] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return values


def _cgroup_rooms(root: Path) -> Iterator[Room]:
    """Each group from this process's up to the visible root; a limit of any of them counts."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not controllers:
            mount, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        else:
            continue
        # In a container the path may be the host's while the mount shows only the container's own group.
        folder = mount / path.lstrip("/")
        for group in [folder, *folder.parents]:
            room = _group_room(group, *names)
            if room is not None:
                yield room
            if group == mount:
                break


def _group_room(group: Path, limit_name: str, usage_name: str, prefix: str) -> Room | None:
    limit, usage = _number(group / limit_name), _number(group / usage_name)
    if limit is None or usage is None or limit >= _NO_LIMIT:
        return None
    stat = dict(line.split(None, 1) for line in _lines(group / "memory.stat") if " " in line)
    # Page cache that is no shared memory is given back under pressure, as in MemAvailable.
    cache = sum(int(stat.get(f"{prefix}{kind}_file", "0")) for kind in ("active", "inactive"))
    return Room(f"cgroup's memory limit ({group / limit_name})", limit - max(usage - cache, 0))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].strip().isdigit() else None
