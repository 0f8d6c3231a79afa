"""What a bench found: figures beside what the machine can do, as a table, JSON, a comparison or a chart."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

from kvtierd.cli.common import table

FORMAT = 1
_BAR, _ROW, _LABEL, _WIDTH = 14, 44, 250, 900


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value, and that of a bare machine doing the same in the same run (0: there is none).

    ``more_is_better``: rates, not times. Values are medians unless the name says otherwise.
    """

    name: str
    value: float
    unit: str
    bare: float = 0.0
    more_is_better: bool = False

    @property
    def ratio(self) -> float | None:
        """The value in units of the bare one."""
        return self.value / self.bare if self.bare else None


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add the options that say where figures go."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--compare", metavar="OLD", type=Path, help="an earlier run's JSON to compare with")
    parser.add_argument("--plot", metavar="SVG", type=Path, help="write a chart of the ratios, or values")


def show(
    args: argparse.Namespace,
    bench: str,
    figures: Sequence[Figure],
    *,
    report: Iterable[str] | None = None,
    details: object = None,
) -> None:
    """Print figures as the options of :func:`add_output` say.

    ``report``: lines that say more than the table, where nothing is compared with; ``details``: more for the
    JSON (plain values).

    Raises:
        ConfigError: the file to compare with is no such file.
    """
    old = _old(args.compare, bench) if args.compare is not None else {}
    if args.plot is not None:
        args.plot.write_text(chart(f"kvtierd bench {bench}", figures, old), "utf-8")
    if args.json:
        rows = [asdict(figure) | {"ratio": figure.ratio} | _change(figure, old) for figure in figures]
        more = {} if details is None else {"details": details}
        print(json.dumps({"format": FORMAT, "bench": bench, "figures": rows} | more))
    else:
        print("\n".join(lines(figures, old) if old or report is None else report))


def _old(path: Path, bench: str) -> dict[str, float]:
    from kvtierd.errors import ConfigError

    try:
        body: dict[str, Any] = json.loads(path.read_text("utf-8"))
        if (body["format"], body["bench"]) != (FORMAT, bench):
            raise ValueError(f"it is of bench {body['bench']!r}, format {body['format']}")
        return {row["name"]: float(row["value"]) for row in body["figures"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: not a result of kvtierd bench {bench} --json: {error}") from error


def _change(figure: Figure, old: dict[str, float]) -> dict[str, float]:
    before = old.get(figure.name)
    return {} if not before else {"before": before, "change": figure.value / before}


def lines(figures: Sequence[Figure], old: dict[str, float]) -> Iterator[str]:
    """Yield a table; with an earlier run, what changed since then."""
    rows = []
    for figure in figures:
        row = {
            "what": figure.name,
            "kvtierd": f"{figure.value:,.4g} {figure.unit}",
            "bare": f"{figure.bare:,.4g} {figure.unit}" if figure.bare else "-",
            "ratio": _times(figure.ratio),
        }
        if old:
            change = _change(figure, old)
            row |= {"before": f"{change['before']:,.4g}" if change else "-"}
            row |= {"change": _times(change.get("change"))}
        rows.append(row)
    yield from table(rows, right=("kvtierd", "bare", "ratio", "before", "change"))


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def chart(title: str, figures: Sequence[Figure], old: dict[str, float]) -> str:
    """Return an SVG with two bars a figure: kvtierd's and the bare machine's (or the earlier run's)."""
    height = 40 + _ROW * len(figures)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}"'
        ' font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="10" y="22" font-size="15">{escape(title)}</text>',
    ]
    for number, figure in enumerate(figures):
        other = old.get(figure.name, figure.bare)
        most = max(figure.value, other) or 1.0
        top = 40 + _ROW * number
        parts.append(f'<text x="10" y="{top + 18}">{escape(figure.name)}</text>')
        bars = ((figure.value, "#2b6cb0"), (other, "#a0aec0"))
        for at, (value, color) in enumerate(bars):
            if value:
                parts += _bar(top + at * (_BAR + 2), value / most, f"{value:,.4g} {figure.unit}", color)
    return "\n".join([*parts, "</svg>", ""])


def _bar(top: int, share: float, text: str, color: str) -> Iterable[str]:
    width = max(1, round(share * (_WIDTH - _LABEL - 130)))
    yield f'<rect x="{_LABEL}" y="{top}" width="{width}" height="{_BAR}" fill="{color}"/>'
    yield f'<text x="{_LABEL + width + 6}" y="{top + _BAR - 3}">{escape(text)}</text>'
