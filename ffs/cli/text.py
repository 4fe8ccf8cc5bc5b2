"""Words for people: sizes, rates, tables. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ffs.errors import InvalidArgument

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_FACTORS = {
    "": 1,
    "b": 1,
    "k": 1 << 10,
    "kib": 1 << 10,
    "m": 1 << 20,
    "mib": 1 << 20,
    "g": 1 << 30,
    "gib": 1 << 30,
    "t": 1 << 40,
    "tib": 1 << 40,
    "p": 1 << 50,
    "pib": 1 << 50,
    "eib": 1 << 60,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}


def format_bytes(count: float) -> str:
    """1536 -> '1.5 KiB'. Whole numbers below 1 KiB."""
    if count < 1024:
        return f"{count:.0f} B"
    value = float(count)
    unit = 0
    while value >= 1023.95 and unit < len(_BINARY) - 1:
        value /= 1024
        unit += 1
    return f"{value:.1f} {_BINARY[unit]}"


def parse_bytes(text: str) -> int:
    """'4GiB', '512m', '1000' -> bytes. k, m, g, t and KiB... are powers of 1024; kB, MB... of 1000."""
    cleaned = text.strip().lower().replace("_", "")
    digits = cleaned.rstrip("abcdefghijklmnopqrstuvwxyz ").rstrip()
    factor = _FACTORS.get(cleaned[len(digits) :].strip())
    try:
        value = float(digits) if "." in digits else int(digits)
    except ValueError:
        value = -1
    if factor is None or value < 0:
        raise InvalidArgument(f"{text!r} isn't a size: write it as 512MiB, 4GiB or a number of bytes")
    return int(value * factor)


_THOUSANDS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9}


def parse_count(text: str) -> int:
    """'1000', '50k', '1.5M' -> a number of things, by thousands. InvalidArgument."""
    cleaned = text.strip().lower().replace("_", "").replace(",", "")
    digits = cleaned.rstrip("abcdefghijklmnopqrstuvwxyz ")
    factor = _THOUSANDS.get(cleaned[len(digits) :].strip())
    if factor is None or not re.fullmatch(r"[0-9]+(\.[0-9]+)?", digits):
        raise InvalidArgument(f"{text!r} isn't a number: write it as 1000000, 50k or 1.5M")
    return round(float(digits) * factor) if "." in digits else int(digits) * factor


_DURATIONS = {"ms": 0.001, "s": 1, "": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def parse_duration(text: str) -> float:
    """'30s', '12h', '1.5d', '90' -> seconds. InvalidArgument."""
    cleaned = text.strip().lower()
    digits = cleaned.rstrip("abcdefghijklmnopqrstuvwxyz ")
    factor = _DURATIONS.get(cleaned[len(digits) :].strip())
    if factor is None or not re.fullmatch(r"[0-9]+(\.[0-9]+)?", digits):
        raise InvalidArgument(f"{text!r} isn't a time: write it as 30s, 15m, 12h or 7d")
    return float(digits) * factor


def format_duration(seconds: float) -> str:
    """43200 -> '12h': in the largest unit that divides it."""
    for unit in ("d", "h", "m"):
        factor = _DURATIONS[unit]
        if seconds >= factor and seconds % factor == 0:
            return f"{seconds / factor:.0f}{unit}"
    return f"{seconds:.0f}s" if seconds == round(seconds) else f"{seconds:.3f}s"


def format_rate(count: float, seconds: float) -> str:
    """Bytes over seconds as 'x.xx GB/s' (decimal, as devices are named)."""
    if seconds <= 0:
        return "-"
    rate = count / seconds
    for unit, size in (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if rate >= size:
            return f"{rate / size:.2f} {unit}"
    return f"{rate:.0f} B/s"


def format_seconds(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Columns padded to their widest cell; those numbered in `right` are set to the right."""
    cells = [list(head), *[list(row) for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        out = (cell.rjust(widths[i]) if i in right else cell.ljust(widths[i]) for i, cell in enumerate(row))
        return "  ".join(out).rstrip()

    return "\n".join(line(row) for row in cells)


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
