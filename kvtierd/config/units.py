"""Sizes and durations as people write them, and back.

A size is bytes: ``8GiB``, ``64MiB``, ``64MB`` (decimal: 64,000,000) or a bare integer. A duration is seconds
and always carries its unit: ``5s``, ``500ms``, ``2m``, ``1h``.
"""

from __future__ import annotations

import re

_SIZE_UNITS = {
    "B": 1,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
    "PiB": 1 << 50,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "PB": 10**15,
}
_DURATION_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
SIZE_PATTERN = r"^[0-9]+ ?(B|[KMGTP]i?B)$"
DURATION_PATTERN = r"^[0-9]+(\.[0-9]+)?(ms|s|m|h)$"
_MAX_BYTES = 1 << 62


def parse_size(value: object) -> int:
    """Return the bytes that ``value`` means: a string with a unit, or a positive integer.

    Raises:
        ValueError: it is anything else (a boolean, a float, a number in a string, zero), or absurdly large.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif isinstance(value, str) and re.match(SIZE_PATTERN, value, re.ASCII):
        digits = re.match(r"[0-9]+", value)
        assert digits is not None
        size = int(digits.group()) * _SIZE_UNITS[value[digits.end() :].strip()]
    else:
        raise ValueError("write a size as 8GiB, 64MiB, 64MB (decimal) or a whole number of bytes")
    if not 0 < size < _MAX_BYTES:
        raise ValueError("a size must be more than zero and less than 4EiB")
    return size


def format_size(size: int) -> str:
    """Return ``size`` exactly, in the largest binary unit that divides it (what :func:`parse_size` reads)."""
    for unit in ("PiB", "TiB", "GiB", "MiB", "KiB"):
        if size and size % _SIZE_UNITS[unit] == 0:
            return f"{size // _SIZE_UNITS[unit]}{unit}"
    return f"{size}B"


def human_size(size: float) -> str:
    """Return ``size`` rounded for people: ``1.5 GiB``."""
    for unit in ("PiB", "TiB", "GiB", "MiB", "KiB"):
        if size >= _SIZE_UNITS[unit]:
            return f"{size / _SIZE_UNITS[unit]:.1f} {unit}"
    return f"{size:.0f} B"


def parse_duration(value: object) -> float:
    """Return the seconds that ``value`` means.

    Raises:
        ValueError: it is not a positive number with a unit.
    """
    match = re.match(DURATION_PATTERN, value, re.ASCII) if isinstance(value, str) else None
    if match is None:
        raise ValueError("write a duration with its unit: 5s, 500ms, 2m or 1h")
    unit = match.group(2)
    seconds = float(match.string[: match.start(2)]) * _DURATION_UNITS[unit]
    if not 0 < seconds <= 365 * 86400:
        raise ValueError("a duration must be more than zero and at most a year")
    return seconds


def format_duration(seconds: float) -> str:
    """Return ``seconds`` in whole units where it is exact; :func:`parse_duration` reads it back."""
    for unit, factor in _DURATION_UNITS.items():
        count = seconds / factor
        if count >= 1 and abs(count - round(count)) < 1e-6:
            return f"{round(count)}{unit}"
    return f"{seconds * 1000:.6f}ms"
