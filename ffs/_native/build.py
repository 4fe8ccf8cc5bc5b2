"""Emits the C source of the cffi module `ffs._native._ffs` from ffs.h (run by CMake at build time).

Usage: python build.py ffs.h out.c

The part of ffs.h between its two CFFI marks is plain C; comments are stripped, the rest is what cffi
declares. API mode with the limited ABI of Python 3.11: one module for 3.11 and later.
docs/ring.md, Building.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

BEGIN = "/* CFFI BEGIN */"
END = "/* CFFI END */"

# ffs_ring_wait, which also counts what it stored: a signal handler that raises as the call returns takes its
# result away, and the completions with it. `events` keeps what was needed in the same way.
KEPT_DECLARATIONS = """
typedef struct { uint32_t have, events; } ffs_py_kept;
int ffs_py_wait(ffs_ring *ring, ffs_cqe *out, uint32_t room, uint32_t least, int32_t timeout_ms,
                ffs_py_kept *kept);
"""
KEPT_SOURCE = """
typedef struct { uint32_t have, events; } ffs_py_kept;
static int ffs_py_wait(ffs_ring *ring, ffs_cqe *out, uint32_t room, uint32_t least, int32_t timeout_ms,
                       ffs_py_kept *kept) {
  uint32_t events = 0;
  const uint32_t have = kept->have;
  const int stored = ffs_ring_wait(ring, out + have, room - have, least > have ? least - have : 0,
                                   timeout_ms, &events);
  if (stored < 0) return stored;
  kept->have = have + (uint32_t)stored;
  kept->events = (kept->events & ~(uint32_t)FFS_WAIT_TIMEOUT) | events;
  return stored;
}
"""


def declarations(header: str) -> str:
    """The declarations of ffs.h as cffi takes them. Raises ValueError if the marks are missing."""
    if header.count(BEGIN) != 1 or header.count(END) != 1:
        raise ValueError(f"ffs.h must hold exactly one '{BEGIN}' and one '{END}'")
    body = header.split(BEGIN, 1)[1].split(END, 1)[0]
    body = re.sub(r"/\*.*?\*/", "", body, flags=re.DOTALL)
    body = re.sub(r"//[^\n]*", "", body)
    if re.search(r"^\s*#", body, flags=re.MULTILINE):
        raise ValueError("between the CFFI marks ffs.h must be free of preprocessor lines")
    return body


def emit(header_path: Path, out_path: Path) -> None:
    """Writes the C source; leaves an up-to-date file alone."""
    import cffi  # at build time only

    builder = cffi.FFI()
    builder.cdef(declarations(header_path.read_text(encoding="utf-8")) + KEPT_DECLARATIONS)
    # The limited ABI is chosen by the compiler's -DPy_LIMITED_API (cmake/python_module.cmake).
    builder.set_source("ffs._native._ffs", '#include "ffs/ffs.h"\n' + KEPT_SOURCE, py_limited_api=True)
    builder.emit_c_code(str(out_path))


def main(arguments: list[str]) -> int:
    if len(arguments) != 2:
        print("usage: build.py ffs.h out.c", file=sys.stderr)
        return 2
    emit(Path(arguments[0]), Path(arguments[1]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
