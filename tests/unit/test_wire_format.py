"""The frames of docs/wire_format.md, decoded by an independent reader.

`tests/golden/wire/<frame>.hex` holds one frame each: a line a field (`name type value: bytes`), in
order. wire_layouts.py knows the layouts from the prose only; native/test/net_golden.cc builds the same
frames from wire.h and compares bytes. After a deliberate change of the format run

    python tests/unit/test_wire_format.py --write

and read the difference before committing it.
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest
from wire_examples import PAYLOAD, build, render
from wire_layouts import HEADER, LAYOUTS, VARIABLE, crc32c, decode_field, encode_field, size_of

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden" / "wire"
DOC = ROOT / "docs" / "wire_format.md"


def read_golden(name: str) -> tuple[bytes, list[tuple[str, str, str]]]:
    raw = b""
    lines = []
    for line in (GOLDEN / f"{name}.hex").read_text().splitlines():
        label, _, data = line.rpartition(": ")
        field, kind, shown = label.split(" ")
        raw += bytes.fromhex(data)
        lines.append((field, kind, shown))
    return raw, lines


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_golden_frame_decodes_to_its_values(name: str) -> None:
    raw, lines = read_golden(name)
    type_number, fixed = LAYOUTS[name]
    header = dict(zip([f for f, _ in HEADER], struct.unpack_from("<IBBHIIIIQ", raw), strict=True))
    assert header["magic"] == 0x31534646
    assert header["type"] == type_number
    assert header["fixed_bytes"] == sum(size_of(k) for _, k in fixed)
    head_end = 32 + header["fixed_bytes"] + header["var_bytes"]
    assert len(raw) == head_end + header["payload_bytes"]
    zeroed = raw[:20] + bytes(4) + raw[24:head_end]
    assert crc32c(zeroed) == header["frame_crc"]

    at = 0
    layout = [(f"header.{f}", k) for f, k in HEADER] + fixed + VARIABLE.get(name, [])
    for (field, kind), (named, named_kind, shown) in zip(layout, lines, strict=False):
        assert (field, kind) == (named, named_kind)
        value = decode_field(kind, raw[at : at + size_of(kind)])
        assert (f"0x{value}" if isinstance(value, str) else str(value)) == shown, field
        at += size_of(kind)
    assert raw[at:] == PAYLOAD.get(name, b"")


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_golden_frame_is_what_the_examples_say(name: str) -> None:
    assert (GOLDEN / f"{name}.hex").read_text() == render(build(name))


def test_every_golden_file_has_a_layout() -> None:
    assert {path.stem for path in GOLDEN.glob("*.hex")} == set(LAYOUTS)


def example_block(name: str) -> str:
    """The worked example of docs/wire_format.md: fields of the golden file that aren't zero."""
    offset = 0
    lines = []
    for field, kind, value in build(name):
        raw = encode_field(kind, value)
        if any(raw):
            shown = raw.hex() if len(raw) <= 24 else raw[:24].hex() + "..."
            lines.append(
                f"{offset:4d}  {shown:<48}  {field} = {value if isinstance(value, int) else 'bytes'}"
            )
        offset += len(raw)
    return "```\n" + "\n".join(lines) + "\n```"


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_the_page_shows_the_golden_example(name: str) -> None:
    assert f"<!-- example: {name} -->\n{example_block(name)}" in DOC.read_text()


def write() -> None:
    import re

    GOLDEN.mkdir(parents=True, exist_ok=True)
    for name in LAYOUTS:
        (GOLDEN / f"{name}.hex").write_text(render(build(name)))
    text = DOC.read_text()
    for name in LAYOUTS:
        text = re.sub(
            rf"<!-- example: {name} -->\n(```\n.*?\n```)?",
            lambda _, n=name: f"<!-- example: {n} -->\n{example_block(n)}",  # type: ignore[misc]
            text,
            flags=re.S,
        )
    DOC.write_text(text)


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        write()
    else:
        sys.exit("usage: test_wire_format.py --write")
