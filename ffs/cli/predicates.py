"""What `ffs find` asks of an entry. Pure (docs/guides/command_line.md, Finding)."""

from __future__ import annotations

import re
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ffs.cli.globs import name_regex
from ffs.errors import InvalidArgument

_UNITS = {"": 512, "b": 512, "c": 1, "w": 2, "k": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_TYPES: dict[str, Callable[[int], bool]] = {
    "f": stat.S_ISREG,
    "d": stat.S_ISDIR,
    "l": stat.S_ISLNK,
    "k": lambda mode: not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)),
}
_DAY_NS = 86400 * 10**9
_MINUTE_NS = 60 * 10**9


@dataclass(frozen=True, slots=True)
class Number:
    """'+N' more than, '-N' less than, 'N' exactly, in units that sizes are rounded up to, as of
    find."""

    sign: str
    value: int

    def fits(self, value: int) -> bool:
        if self.sign == "+":
            return value > self.value
        return value < self.value if self.sign == "-" else value == self.value


def parse_number(text: str, what: str) -> Number:
    """For -mtime, -mmin, -links. InvalidArgument."""
    match = re.fullmatch(r"([+-]?)(\d+)", text)
    if match is None:
        raise InvalidArgument(f"{what} {text!r}: write N, +N (more) or -N (less)")
    return Number(match[1], int(match[2]))


def parse_size(text: str) -> tuple[Number, int]:
    """For -size: (how many units, bytes of a unit). InvalidArgument."""
    match = re.fullmatch(r"([+-]?)(\d+)([cwbkMGT]?)", text)
    if match is None:
        raise InvalidArgument(
            f"-size {text!r}: write N with c (bytes), k, M, G or T, +N (more) or -N (less), e.g. +100M"
        )
    return Number(match[1], int(match[2])), _UNITS[match[3]]


def parse_types(text: str) -> tuple[str, ...]:
    """For -type: 'f', 'd', 'l', 'k' (KV space), or several as 'f,l'. InvalidArgument."""
    kinds = tuple(text.split(","))
    for kind in kinds:
        if kind not in _TYPES:
            raise InvalidArgument(f"-type {text!r}: give f (file), d (directory), l (symlink), k (KV space)")
    return kinds


@dataclass(frozen=True, slots=True)
class Age:
    """How long ago something changed. Days are counted whole, as find's -mtime has it; a number of minutes
    without a sign is the minute that ends then."""

    number: Number
    unit_ns: int
    whole: bool

    def fits(self, age_ns: int) -> bool:
        if self.whole:
            return self.number.fits(age_ns // self.unit_ns)
        if self.number.sign:
            border = self.number.value * self.unit_ns
            return age_ns > border if self.number.sign == "+" else age_ns < border
        return self.number.fits(-(-age_ns // self.unit_ns))


def parse_age(text: str, *, days: bool) -> Age:
    """For -mtime (days) and -mmin. InvalidArgument."""
    number = parse_number(text, "-mtime" if days else "-mmin")
    return Age(number, _DAY_NS if days else _MINUTE_NS, days)


@dataclass(slots=True)
class Query:
    """What an entry has to be; all of it. Empty: everything."""

    names: list[re.Pattern[str]] = field(default_factory=list)
    paths: list[re.Pattern[str]] = field(default_factory=list)
    types: tuple[str, ...] = ()
    sizes: list[tuple[Number, int]] = field(default_factory=list)
    ages: list[Age] = field(default_factory=list)
    newer_ns: int | None = None
    empty: bool = False
    perm: tuple[str, int] | None = None
    uid: int | None = None
    gid: int | None = None
    links: Number | None = None
    now_ns: int = 0

    def fits(self, path: str, info: Any) -> bool:
        """Whether the entry at `path`, with its lstat, is one. A directory of the store has as its length the
        number of its entries."""
        mode, name = info.st_mode, path.rstrip("/").rpartition("/")[2]
        return (
            all(regex.match(name) for regex in self.names)
            and all(regex.match(path) for regex in self.paths)
            and (not self.types or any(_TYPES[kind](mode) for kind in self.types))
            and all(number.fits(-(-info.st_size // unit)) for number, unit in self.sizes)
            and all(age.fits(self.now_ns - info.st_mtime_ns) for age in self.ages)
            and (self.newer_ns is None or info.st_mtime_ns > self.newer_ns)
            and (not self.empty or (info.st_size == 0 and (stat.S_ISREG(mode) or stat.S_ISDIR(mode))))
            and (self.perm is None or _fits_perm(self.perm, stat.S_IMODE(mode)))
            and (self.uid is None or info.st_uid == self.uid)
            and (self.gid is None or info.st_gid == self.gid)
            and (self.links is None or self.links.fits(info.st_nlink))
        )


def _fits_perm(perm: tuple[str, int], mode: int) -> bool:
    sign, bits = perm
    if sign == "-":
        return mode & bits == bits
    if sign == "/":
        return bits == 0 or bool(mode & bits)
    return mode == bits


def parse_perm(text: str) -> tuple[str, int]:
    """For -perm: '644' exactly, '-022' all of these bits, '/022' any of them. InvalidArgument."""
    match = re.fullmatch(r"([-/]?)([0-7]{1,4})", text)
    if match is None:
        raise InvalidArgument(f"-perm {text!r}: give an octal mode, -MODE (all bits) or /MODE (any)")
    return match[1], int(match[2], 8)


def path_pattern(pattern: str) -> re.Pattern[str]:
    """For -path: of the whole path, and * matches '/' too, as of find."""
    return re.compile(name_regex(pattern).pattern.replace("[^/]", "(?s:.)").replace("(?!/)", ""), re.DOTALL)
