"""`ffs bench io --plot`: ratio by size, one panel for each device and transport, as SVG or as an HTML page
around it. Pure but for write_plot."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from ffs.cli.benchmark.report import Result
from ffs.errors import InvalidArgument

WIDTH, HEIGHT = 380, 250  # of a panel
LEFT, TOP, RIGHT, BOTTOM = 46, 34, 14, 40  # around its field
COLUMNS = 2
LEGEND = 190
FULL = 1.2  # ratio at the upper edge, at least
COLOURS = {1: "#1b6ca8", 16: "#c25b12", 128: "#3b7d3b"}  # by queue depth
OTHER_COLOUR = "#6a4c93"
SIZES = {4096: "4 KiB", 65536: "64 KiB", 1 << 20: "1 MiB", 4 << 20: "4 MiB"}


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one line: (bytes of a request, ratio, goal or None), by size."""

    op: str
    depth: int
    replicas: int
    checksum: bool
    points: tuple[tuple[int, float, float | None], ...]

    @property
    def label(self) -> str:
        copies = "" if self.replicas == 1 else f", {self.replicas} copies"
        return f"{self.op} QD{self.depth}{copies}" + ("" if self.checksum else ", no checksums")

    @property
    def colour(self) -> str:
        return COLOURS.get(self.depth, OTHER_COLOUR)

    @property
    def shift(self) -> float:
        """To the right, so that goals of reads and writes don't cover each other."""
        return 0 if self.op != "write" else 8 + 5 * (self.replicas > 1)

    @property
    def dashes(self) -> str:
        """Reads are whole lines, writes broken ones; three copies and no checksums make the gaps wider."""
        if self.op == "read" and self.replicas == 1 and self.checksum:
            return ""
        return f"{6 if self.op == 'write' else 2} {2 + self.replicas + (0 if self.checksum else 3)}"


def check_name(path: Path) -> None:
    """InvalidArgument unless it is one of the kinds that write_plot makes."""
    if path.suffix not in (".svg", ".html"):
        raise InvalidArgument(f"--plot {path}: give a name that ends with .svg or .html")


def write_plot(path: Path, results: Sequence[Result]) -> None:
    """Replaces the file. Blocking."""
    drawing = svg(results)
    if path.suffix == ".html":
        drawing = (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>ffs bench io</title>'
            f'</head>\n<body style="margin:0;background:#fff">\n{drawing}</body></html>\n'
        )
    path.write_text(drawing)


def panels(results: Sequence[Result]) -> dict[tuple[str, str], list[Series]]:
    """The lines by (device, transport), in the order in which they were measured."""
    found: dict[tuple[str, str], dict[tuple[str, int, int, bool], list[tuple[int, float, float | None]]]] = {}
    for result in results:
        more = result.more
        if more.get("op") not in ("read", "write", "latency"):
            continue
        place = (str(more["device"]), str(more["transport"]))
        line = (str(more["op"]), _int(more["qd"]), _int(more["replicas"]), bool(more["checksum"]))
        goal = result.goal if result.goal_of == "ratio" else None
        found.setdefault(place, {}).setdefault(line, []).append(
            (_int(more["size_bytes"]), result.ratio, goal)
        )
    return {
        place: [Series(*line, tuple(sorted(points))) for line, points in lines.items()]
        for place, lines in found.items()
    }


def _int(value: object) -> int:
    if not isinstance(value, int):
        raise TypeError(f"{value!r} isn't a number of a case")
    return value


def svg(results: Sequence[Result]) -> str:
    """The drawing. A ring around a point: below its goal, which the bar at its side shows."""
    by_place = panels(results)
    rows = max(1, math.ceil(len(by_place) / COLUMNS))
    columns = min(COLUMNS, max(1, len(by_place)))
    width, height = columns * WIDTH + LEGEND, rows * HEIGHT + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="sans-serif" font-size="11" fill="#222">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        '<text x="12" y="19" font-size="14">ffs bench io: ratio to the floor, by bytes of a request</text>',
    ]
    for number, (place, lines) in enumerate(by_place.items()):
        x, y = number % COLUMNS * WIDTH, number // COLUMNS * HEIGHT + 30
        parts += _panel(x, y, f"{place[0]}, {place[1]}", lines)
    parts += _legend(columns * WIDTH + 8, 60, by_place)
    return "\n".join([*parts, "</svg>", ""])


def _panel(x: int, y: int, title: str, lines: Sequence[Series]) -> list[str]:
    left, right = x + LEFT, x + WIDTH - RIGHT
    top, bottom = y + TOP, y + HEIGHT - BOTTOM
    highest = max([FULL, *(ratio for line in lines for _, ratio, _ in line.points)])
    limit = math.ceil(min(highest, 3.0) * 5) / 5
    sizes = list(SIZES)

    def across(size: int, shift: float = 0) -> float:
        low, high = math.log2(sizes[0]), math.log2(sizes[-1])
        return left + 16 + shift + (math.log2(size) - low) / (high - low) * (right - left - 34)

    def up(ratio: float) -> float:
        return bottom - min(ratio, limit) / limit * (bottom - top)

    parts = [f'<text x="{left}" y="{top - 10}" font-size="12" font-weight="bold">{escape(title)}</text>']
    for tick in range(round(limit * 5) + 1):
        ratio = tick / 5
        at = up(ratio)
        stroke = "#888" if ratio in (0, 1) else "#ddd"
        parts.append(f'<line x1="{left}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}" stroke="{stroke}"/>')
        parts.append(f'<text x="{left - 6}" y="{at + 4:.1f}" text-anchor="end">{ratio:g}</text>')
    for size, words in SIZES.items():
        parts.append(f'<text x="{across(size):.1f}" y="{bottom + 16}" text-anchor="middle">{words}</text>')
    for line in lines:
        dashes = f' stroke-dasharray="{line.dashes}"' if line.dashes else ""
        path = " ".join(f"{across(size, line.shift):.1f},{up(ratio):.1f}" for size, ratio, _ in line.points)
        if len(line.points) > 1:
            parts.append(
                f'<polyline points="{path}" fill="none" stroke="{line.colour}" stroke-width="1.8"{dashes}/>'
            )
        for size, ratio, goal in line.points:
            parts += _point(
                across(size, line.shift),
                up(ratio),
                line,
                size,
                ratio,
                goal,
                None if goal is None else up(goal),
            )
    return parts


def _point(
    x: float, y: float, line: Series, size: int, ratio: float, goal: float | None, goal_y: float | None
) -> list[str]:
    words = f"{line.label}, {SIZES[size]}: {ratio:.3f}" + ("" if goal is None else f" (goal {goal:g})")
    filled = line.colour if line.checksum else "#fff"
    parts = [
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.4" fill="{filled}" stroke="{line.colour}" '
        f'stroke-width="1.4"><title>{escape(words)}</title></circle>'
    ]
    if goal is not None and goal_y is not None:
        parts.append(
            f'<line x1="{x - 9:.1f}" x2="{x + 9:.1f}" y1="{goal_y:.1f}" y2="{goal_y:.1f}" '
            f'stroke="{line.colour}" stroke-width="3" opacity="0.55"/>'
        )
        if ratio < goal:
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="7" fill="none" stroke="#b00020" stroke-width="1.4"/>'
            )
    return parts


def _legend(x: int, y: int, by_place: dict[tuple[str, str], list[Series]]) -> list[str]:
    seen = {line.label: line for line in itertools.chain.from_iterable(by_place.values())}
    parts = []
    for number, line in enumerate(seen.values()):
        at = y + number * 18
        dashes = f' stroke-dasharray="{line.dashes}"' if line.dashes else ""
        parts += [
            f'<line x1="{x}" x2="{x + 24}" y1="{at}" y2="{at}" stroke="{line.colour}" '
            f'stroke-width="1.8"{dashes}/>',
            f'<text x="{x + 30}" y="{at + 4}">{escape(line.label)}</text>',
        ]
    end = y + len(seen) * 18 + 8
    return [
        *parts,
        f'<line x1="{x + 3}" x2="{x + 21}" y1="{end}" y2="{end}" stroke="#222" stroke-width="3" '
        f'opacity="0.55"/><text x="{x + 30}" y="{end + 4}">a goal</text>',
        f'<circle cx="{x + 12}" cy="{end + 18}" r="7" fill="none" stroke="#b00020" stroke-width="1.4"/>'
        f'<text x="{x + 30}" y="{end + 22}">below its goal</text>',
    ]
