"""Errors that there is nobody to raise to: of a file that was dropped, or left to the end of the process.

They are told as of an exception in __del__, by sys.unraisablehook. docs/client.md, Writing behind.
"""

from __future__ import annotations


class _Told:
    """Python itself makes what its hook takes: nobody else can."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __del__(self) -> None:
        raise self._error


def tell(error: BaseException) -> None:
    """Give `error` to sys.unraisablehook: by default, it is printed with its traceback."""
    _Told(error)
