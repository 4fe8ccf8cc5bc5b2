"""Runs a module of this build as one that reports the next version: `next_version.py MODULE ARGUMENT...`.

It speaks protocol versions N and N+1 on control and data connections, or only N+1 with
FFS_ONLY_NEXT_VERSION in the environment. The formats are those of this build: what is tested is that two
builds agree on a version and go on, process by process.
"""

from __future__ import annotations

import importlib
import os
import sys

import ffs.proto.common

NEXT = ffs.proto.common.PROTOCOL_MAX + 1
LEAST = NEXT if "FFS_ONLY_NEXT_VERSION" in os.environ else ffs.proto.common.PROTOCOL_MIN


def main() -> int:
    # Before anything that takes these by name is imported.
    ffs.proto.common.PROTOCOL_MIN = LEAST  # type: ignore[misc]
    ffs.proto.common.PROTOCOL_MAX = NEXT  # type: ignore[misc]
    ffs.__version__ = "0.0.0+next"
    from ffs._native.lib import set_protocol_versions

    set_protocol_versions(LEAST, NEXT)
    module = importlib.import_module(sys.argv[1])
    code: int = module.main(sys.argv[2:])
    return code


if __name__ == "__main__":
    sys.exit(main())
