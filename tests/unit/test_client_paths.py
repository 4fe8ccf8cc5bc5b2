"""Paths and addresses: what is taken, and what is refused with which words."""

from __future__ import annotations

import errno
import os
from pathlib import PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffs import errors
from ffs.client.address import resolve_address
from ffs.client.paths import check_path, decode_text, join, split, wire_path


def test_what_is_taken() -> None:
    assert check_path("/a/b") == "/a/b"
    assert check_path(PurePosixPath("/a/b")) == "/a/b"
    assert wire_path("/é") == b"/\xc3\xa9"
    assert wire_path("/" + "n" * 255) == b"/" + b"n" * 255


@pytest.mark.parametrize(
    ("path", "code", "words"),
    [
        ("", errno.ENOENT, "empty"),
        ("a", errno.EINVAL, "isn't absolute"),
        ("./a", errno.EINVAL, "isn't absolute"),
        ("/a\0b", errno.EINVAL, "NUL"),
        ("/a/" + "n" * 256, errno.ENAMETOOLONG, "256 bytes, the most is 255"),
        ("/a/" + "é" * 128 + "/b", errno.ENAMETOOLONG, "256 bytes, the most is 255"),
        ("/" + "n/" * 2048, errno.ENAMETOOLONG, "4097 bytes, the most is 4096"),
        ("/\ud800", errno.EINVAL, "UTF-8"),
    ],
)
def test_what_is_refused(path: str, code: int, words: str) -> None:
    with pytest.raises(OSError, match=words) as caught:
        check_path(path)
    assert caught.value.errno == code
    assert caught.value.filename == path


@pytest.mark.parametrize("path", [b"/a", 7, None])
def test_what_is_no_path(path: object) -> None:
    with pytest.raises(TypeError):
        check_path(path)  # type: ignore[arg-type]


@given(st.binary(min_size=1, max_size=255).filter(lambda name: not {0, 47} & set(name)))
def test_any_name_survives_the_wire(name: bytes) -> None:
    text = "/" + os.fsdecode(name)
    assert wire_path(text) == b"/" + name
    assert decode_text(b"/" + name) == text


def test_join_and_split() -> None:
    assert join("/", "a") == "/a"
    assert join("/a", "b") == "/a/b"
    assert split("/a/b/") == ("/a", "b")
    assert split("/a") == ("/", "a")
    assert split("/") == ("/", "")


CLUSTER = bytes(range(16))


def test_addresses() -> None:
    assert resolve_address("h:1").servers == (("h", 1),)
    both = resolve_address(f"ffs://h:1,[::1]:2?cluster={CLUSTER.hex()}")
    assert both.servers == (("h", 1), ("::1", 2))
    assert both.cluster == CLUSTER
    assert resolve_address(str(both)) == both


def test_address_of_the_environment() -> None:
    assert resolve_address(None, {"FFS_CLUSTER": "h:1"}).servers == (("h", 1),)
    for environment in ({}, {"FFS_CLUSTER": ""}):
        with pytest.raises(errors.InvalidArgument, match="FFS_CLUSTER"):
            resolve_address(None, environment)


@pytest.mark.parametrize(
    "address",
    ["", "h", "h:", ":1", "h:x", "h:0", "h:65536", "h:1,", "::1:2", "h:1?cluster=00", "h:1?x=1", "ffs://"],
)
def test_bad_addresses(address: str) -> None:
    with pytest.raises(errors.InvalidArgument, match="address"):
        resolve_address(address)


def test_an_address_is_a_str() -> None:
    with pytest.raises(TypeError, match="address"):
        resolve_address(("h", 1))  # type: ignore[arg-type]
