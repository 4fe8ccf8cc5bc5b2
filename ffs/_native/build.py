"""Emits the C source of the cffi module `ffs._native._ffs` from headers (run by CMake at build time).

Usage: python build.py ffs.h python_ring.h out.c

The part of a header between its two CFFI marks is plain C; comments are stripped, the rest is what cffi
declares. API mode with the limited ABI of Python 3.11: one module for 3.11 and later.
docs/ring.md, Building.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

BEGIN = "/* CFFI BEGIN */"
END = "/* CFFI END */"


def declarations(header: str) -> str:
    """The declarations of a header as cffi takes them. Raises ValueError if the marks are missing."""
    if header.count(BEGIN) != 1 or header.count(END) != 1:
        raise ValueError(f"a header must hold exactly one '{BEGIN}' and one '{END}'")
    body = header.split(BEGIN, 1)[1].split(END, 1)[0]
    body = re.sub(r"/\*.*?\*/", "", body, flags=re.DOTALL)
    body = re.sub(r"//[^\n]*", "", body)
    if re.search(r"^\s*#", body, flags=re.MULTILINE):
        raise ValueError("between the CFFI marks a header must be free of preprocessor lines")
    return re.sub(r"^static ", "", body, flags=re.MULTILINE)


def emit(abi: Path, helpers: Path, out_path: Path) -> None:
    """Writes the C source; leaves an up-to-date file alone."""
    import cffi  # at build time only

    builder = cffi.FFI()
    for header in (abi, helpers):
        builder.cdef(declarations(header.read_text(encoding="utf-8")))
    # The limited ABI is chosen by the compiler's -DPy_LIMITED_API (cmake/python_module.cmake).
    builder.set_source("ffs._native._ffs", f'#include "{helpers}"\n', py_limited_api=True)
    builder.emit_c_code(str(out_path))


def main(arguments: list[str]) -> int:
    if len(arguments) != 3:
        print("usage: build.py ffs.h python_ring.h out.c", file=sys.stderr)
        return 2
    emit(*map(Path, arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
