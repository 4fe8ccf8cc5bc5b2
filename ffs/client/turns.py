"""A request on a file's chunks that begins anew because the file changed under it. No I/O; it pauses."""

from __future__ import annotations

import time

from ffs.errors import Overloaded, StaleEpoch

MOST_TURNS = 16
"""How often one request starts again because the file changed under it."""

_FIRST_PAUSE_S = 0.005
_LONGEST_PAUSE_S = 0.2


class Turns:
    """Of one request: `doing` completes "can be ...", for errors. One thread."""

    def __init__(self, path: str, doing: str) -> None:
        self._path = path
        self._doing = doing
        self._turns = 0
        self._unmoved = 0  # of them, the last ones in which the service knew of no change

    def again(self, moved: bool) -> None:
        """Before another turn. `moved`: the service says what has changed; else a truncation or a removal is
        under way, which takes a moment: blocks up to 0.2 s. Raises Overloaded, StaleEpoch: no more turns."""
        self._turns += 1
        self._unmoved = 0 if moved else self._unmoved + 1
        if self._turns < MOST_TURNS:
            if self._unmoved:
                time.sleep(min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (self._unmoved - 1)))
            return
        if self._unmoved < MOST_TURNS // 2:
            raise Overloaded(f"the file is truncated faster than it can be {self._doing}", self._path)
        raise StaleEpoch(
            f"the file can't be {self._doing}: the servers of its chunks hold its id for removed or"
            " truncated, and the metadata service knows of neither. If this lasts, its content is lost"
            " there: remove the file, and write it anew",
            self._path,
        )
