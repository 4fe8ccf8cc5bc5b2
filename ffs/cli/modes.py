"""Mode arguments of chmod, octal and symbolic, and owners of chown. Pure (docs/guides/command_line.md)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ffs.client.core import read_umask
from ffs.errors import InvalidArgument

_WHO = {"u": 0o4700, "g": 0o2070, "o": 0o1007, "a": 0o7777}
_PERM = {"r": 0o444, "w": 0o222, "x": 0o111, "s": 0o6000, "t": 0o1000}
_CLAUSE = re.compile(r"([ugoa]*)((?:[-+=](?:[ugo]|[rwxXst]*))+)\Z")
_ACTION = re.compile(r"([-+=])([ugo](?![rwxXst])|[rwxXst]*)")


@dataclass(frozen=True, slots=True)
class ModeChange:
    """What a MODE argument does to mode bits."""

    octal: int | None
    octal_digits: int = 0
    clauses: tuple[tuple[int, str, str], ...] = ()  # bits of whom (0: nobody is named), operator, perms
    umask: int = 0

    def apply(self, mode: int, is_directory: bool) -> int:
        """The bits that a file with `mode` gets, as of POSIX chmod. A directory keeps set-uid and set-gid
        that an octal mode of up to four digits doesn't name, as coreutils has it."""
        mode &= 0o7777
        if self.octal is not None:
            kept = mode & 0o6000 if is_directory and self.octal_digits < 5 else 0
            return self.octal | kept
        for who, operator, perms in self.clauses:
            bits = self._bits(perms, mode, is_directory)
            # A directory's set-uid and set-gid stay unless they are named.
            kept = 0o6000 & ~(bits & (who or 0o7777)) if is_directory else 0
            bits &= (who or 0o7777 & ~self.umask) & ~kept
            if operator == "+":
                mode |= bits
            elif operator == "-":
                mode &= ~bits
            else:
                mode = mode & ((0o7777 & ~who if who else 0) | kept) | bits
        return mode

    @staticmethod
    def _bits(perms: str, mode: int, is_directory: bool) -> int:
        if perms in ("u", "g", "o"):
            three = (mode >> {"u": 6, "g": 3, "o": 0}[perms]) & 7
            return three * 0o111
        bits = 0
        for letter in perms:
            if letter == "X":
                bits |= 0o111 if is_directory or mode & 0o111 else 0
            else:
                bits |= _PERM[letter]
        return bits


def parse_mode_argument(text: str, umask: int | None = None) -> ModeChange:
    """'755', 'u+rwX,go-w', 'a=r'. `umask` None: this process's. InvalidArgument."""
    if re.fullmatch(r"[0-7]+", text):
        value = int(text, 8)
        if value > 0o7777:
            raise InvalidArgument(f"mode {text} is more than 7777")
        return ModeChange(value, len(text))
    mask = read_umask() if umask is None else umask
    clauses: list[tuple[int, str, str]] = []
    for part in text.split(","):
        match = _CLAUSE.match(part)
        if match is None:
            raise InvalidArgument(f"{text!r} isn't a mode: write it as 644, u+rw or go-w,a+X")
        who = 0
        for letter in match[1]:
            who |= _WHO[letter]
        for operator, perms in _ACTION.findall(match[2]):
            clauses.append((who, operator, perms))
    return ModeChange(None, 0, tuple(clauses), mask)


def parse_owner(text: str) -> tuple[int, int]:
    """'user', 'user:group', ':group', 'user:' (the user's own group), names or numbers; -1: not named.
    InvalidArgument."""
    import grp
    import pwd

    user, colon, group = text.partition(":")
    uid = gid = -1
    if not user and not group:
        raise InvalidArgument(f"{text!r} isn't an owner: write user, user:group or :group")
    if user:
        try:
            account = pwd.getpwnam(user)
            uid = account.pw_uid
        except KeyError:
            account = None
            uid = _number(user, "user")
        if colon and not group:
            if account is None:
                raise InvalidArgument(f"{text!r}: a number has no group of its own: write user:group")
            gid = account.pw_gid
    if group:
        try:
            gid = grp.getgrnam(group).gr_gid
        except KeyError:
            gid = _number(group, "group")
    return uid, gid


def _number(text: str, what: str) -> int:
    if not text.isdecimal() or int(text) >= 0xFFFF_FFFF:
        raise InvalidArgument(f"this machine knows no {what} {text!r}: give a number")
    return int(text)
