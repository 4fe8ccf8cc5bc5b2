"""How a process says that it serves: a line on stdout, and a file for programs."""

from __future__ import annotations

import json
import os
from typing import Any


def announce_ready(program: str, address: str, ready_file: str, facts: dict[str, Any]) -> None:
    """Prints `PROGRAM ready at ADDRESS`; writes one JSON object to ready_file ("": none), whole or
    not at all. Blocking, short. Raises OSError when the file can't be written."""
    if ready_file:
        temporary = f"{ready_file}.{os.getpid()}.tmp"
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump({"pid": os.getpid(), "address": address, **facts}, file)
            file.write("\n")
        os.replace(temporary, ready_file)
    print(f"{program} ready at {address}", flush=True)
