"""The mode of `ffs.open`, parsed: pure, and with the rules of the builtin `open`.

docs/client.md, Opening.
"""

from __future__ import annotations

from dataclasses import dataclass

_ALLOWED = frozenset("rwaxbt+")


@dataclass(frozen=True, slots=True)
class Mode:
    """What a mode string asks for. Exactly one of `reading` (r), w, a, x was named."""

    reading: bool
    writing: bool
    appending: bool
    creating: bool
    exclusive: bool
    truncating: bool
    updating: bool
    text: bool

    @property
    def raw(self) -> str:
        """The mode that the raw file shows, as `io.FileIO` does: "rb", "rb+", "wb", "ab+", "xb"..."""
        if self.exclusive:
            base = "xb"
        elif self.appending:
            base = "ab"
        elif self.truncating:
            base = "rb" if self.updating else "wb"
        else:
            base = "rb"
        return base + ("+" if self.updating else "")


def parse_mode(mode: str) -> Mode:
    """Parse `mode`, or raise ValueError (TypeError if it isn't a str) as the builtin `open` would."""
    if not isinstance(mode, str):
        raise TypeError(f"mode must be a str, not {type(mode).__name__}")
    letters = set(mode)
    if letters - _ALLOWED or len(mode) > len(letters):
        raise ValueError(f"invalid mode: {mode!r}; known letters are r, w, a, x, b, t and +, each once")
    if "t" in letters and "b" in letters:
        raise ValueError(f"invalid mode: {mode!r}: text (t) and binary (b) exclude each other")
    kinds = letters & frozenset("rwax")
    if len(kinds) != 1:
        raise ValueError(f"invalid mode: {mode!r}: exactly one of r, w, a, x is needed")
    kind = next(iter(kinds))
    updating = "+" in letters
    return Mode(
        reading=kind == "r" or updating,
        writing=kind != "r" or updating,
        appending=kind == "a",
        creating=kind != "r",
        exclusive=kind == "x",
        truncating=kind == "w",
        updating=updating,
        text="b" not in letters,
    )


def check_arguments(
    mode: Mode,
    buffering: int,
    encoding: str | None,
    errors: str | None,
    newline: str | None,
    *,
    atomic: bool,
    layout: bool,
) -> None:
    """Refuse combinations that the builtin `open` refuses, and ours (`atomic`, layout options)."""
    if not mode.text:
        for name, value in (("encoding", encoding), ("errors", errors), ("newline", newline)):
            if value is not None:
                raise ValueError(f"binary mode doesn't take {name!r}; leave it out or use text mode")
    if newline not in (None, "", "\n", "\r", "\r\n"):
        raise ValueError(f"illegal newline value: {newline!r}")
    if buffering == 0 and mode.text:
        raise ValueError("text can't be unbuffered; use a binary mode with buffering=0")
    if atomic and not mode.creating:
        raise ValueError("atomic=True publishes a new file at close: it needs mode w or x")
    if atomic and mode.appending:
        raise ValueError("atomic=True starts from an empty file and can't append; use mode w or x")
    if layout and not mode.creating:
        raise ValueError(
            "layout options (chunk_size, table, stripe) are for files that are created: mode w, a, x"
        )
