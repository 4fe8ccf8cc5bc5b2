"""The error tree: one class an errno, builtin classes too, pickle and wire."""

from __future__ import annotations

import errno
import io
import pickle
from pathlib import Path

import msgspec
import pytest

from ffs import errors
from ffs.proto.common import ErrorReply, error_reply, to_error

CLASSES = sorted(set(errors.CLASS_OF_ERRNO.values()), key=lambda cls: cls.__name__)


@pytest.mark.parametrize("cls", CLASSES)
def test_round_trips(cls: type[errors.FfsError]) -> None:
    error = cls("why, and the way out", "/a/b", "/c")
    assert isinstance(error, OSError)
    assert error.errno == cls.code
    assert (error.message, error.filename, error.filename2) == ("why, and the way out", "/a/b", "/c")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is cls
    assert str(again) == str(error)
    wire = msgspec.msgpack.decode(msgspec.msgpack.encode(error_reply(error)), type=ErrorReply)
    sent = to_error(wire)
    assert type(sent) is cls
    assert str(sent) == str(error)
    assert type(errors.error_of(-cls.code)) is cls


@pytest.mark.parametrize(
    ("cls", "builtin"),
    [
        (errors.NotFound, FileNotFoundError),
        (errors.Exists, FileExistsError),
        (errors.IsADirectory, IsADirectoryError),
        (errors.NotADirectory, NotADirectoryError),
        (errors.AccessDenied, PermissionError),
        (errors.NotPermitted, PermissionError),
        (errors.DeadlineExceeded, TimeoutError),
        (errors.Unreachable, ConnectionError),
        (errors.Overloaded, BlockingIOError),
        (errors.InvalidArgument, ValueError),
        (errors.Unsupported, io.UnsupportedOperation),
    ],
)
def test_builtin_classes(cls: type[errors.FfsError], builtin: type[Exception]) -> None:
    with pytest.raises(builtin):
        raise cls("x", "/f")


def test_builtin_classes_agree() -> None:
    """Where Python maps an errno to a class, ours is a subclass of it."""
    for number, cls in errors.CLASS_OF_ERRNO.items():
        python = type(OSError(number, "x"))
        assert issubclass(cls, python), f"{cls.__name__} should be a {python.__name__}"


def test_unknown_errno_is_kept() -> None:
    error = errors.error_of(errno.EL2HLT, "odd")
    assert type(error) is errors.FfsError
    assert error.errno == errno.EL2HLT
    assert pickle.loads(pickle.dumps(error)).errno == errno.EL2HLT
    assert to_error(error_reply(error)).errno == errno.EL2HLT


def test_from_os_error() -> None:
    with pytest.raises(FileNotFoundError) as caught:
        Path("/nonexistent/file").read_bytes()
    ours = errors.from_os_error(caught.value)
    assert type(ours) is errors.NotFound
    assert ours.filename == "/nonexistent/file"
    assert errors.from_os_error(ours) is ours


def test_details_of_data_replies() -> None:
    assert type(errors.error_of_status(errno.EAGAIN, 1)) is errors.StaleRouting
    assert type(errors.error_of_status(errno.EAGAIN, 12)) is errors.Overloaded
    assert type(errors.error_of_status(errno.ENOSPC, 0)) is errors.NoSpace
    assert type(errors.error_of_status(errno.ENOSPC, 9999)) is errors.NoSpace


def test_names_that_are_no_text() -> None:
    error = errors.NotFound(None, b"/\xff\xfe")
    assert to_error(error_reply(error)).filename == "/\udcff\udcfe"


def test_default_message() -> None:
    assert str(errors.NotFound(None, "/x")) == "[Errno 2] No such file or directory: '/x'"
