"""Who else may read a secret's file: refused by servers, warned of by clients."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest

from ffs.cli import main
from ffs.cli.devcluster.secret import choose_secret, no_credentials
from ffs.errors import InvalidArgument, NotFound, NotPermitted, Unauthenticated
from ffs.proto.auth import KEY_BYTES, TOKEN_ID_BYTES, Token
from ffs.rpc.secret_file import (
    ExposedSecretWarning,
    environment_credential,
    exposure,
    read_secret,
    read_token,
)

SECRET = b"a secret of some length"
TOKEN = Token(b"i" * TOKEN_ID_BYTES, b"k" * KEY_BYTES)


@pytest.mark.parametrize(
    ("mode", "owner", "who"),
    [
        (0o100600, 1000, ""),
        (0o100400, 1000, ""),
        (0o100700, 1000, ""),
        (0o100640, 1000, "its group"),
        (0o100620, 1000, "its group"),
        (0o100640, 0, ""),  # root gave it to our group
        (0o100644, 0, "everybody"),
        (0o100644, 1000, "everybody"),
        (0o100602, 1000, "everybody"),
    ],
)
def test_whose_access_counts(mode: int, owner: int, who: str) -> None:
    assert exposure(mode, owner, 1000) == who


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(b" " + SECRET + b"\n")
    path.chmod(0o600)
    return path


def test_a_private_secret_is_read(secret: Path) -> None:
    assert read_secret(str(secret)) == SECRET  # a warning would be an error here
    assert read_secret(str(secret), refuse_exposed=True) == SECRET


def test_an_exposed_secret_is_refused_or_warned_of(secret: Path) -> None:
    secret.chmod(0o644)
    with pytest.raises(NotPermitted, match=f"everybody may read.*0644.*chmod 600 {secret}"):
        read_secret(str(secret), refuse_exposed=True)
    with pytest.warns(ExposedSecretWarning, match=f"{secret}: everybody may read the cluster secret"):
        assert read_secret(str(secret)) == SECRET
    secret.chmod(0o622)
    with pytest.warns(ExposedSecretWarning, match="everybody may write"):
        read_secret(str(secret))


def test_what_comes_through_a_pipe_has_no_mode(secret: Path) -> None:
    read, write = os.pipe()
    os.write(write, SECRET)
    os.close(write)
    assert read_secret(f"/proc/self/fd/{read}", refuse_exposed=True) == SECRET
    os.close(read)


def test_a_short_secret(secret: Path) -> None:
    secret.write_bytes(b"short\n")
    with pytest.raises(Unauthenticated, match="at least 16 bytes"):
        read_secret(str(secret))
    with pytest.raises(FileNotFoundError):
        read_secret(f"{secret}-none")


def test_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secret: Path) -> None:
    path = tmp_path / "token"
    path.write_text(TOKEN.text() + "\n")
    path.chmod(0o600)
    assert read_token(str(path)) == TOKEN
    path.chmod(0o640)
    with pytest.warns(ExposedSecretWarning, match="its group may read the token"):
        read_token(str(path))
    monkeypatch.delenv("FFS_TOKEN_FILE", raising=False)
    monkeypatch.delenv("FFS_CLUSTER_SECRET_FILE", raising=False)
    assert environment_credential() is None
    monkeypatch.setenv("FFS_CLUSTER_SECRET_FILE", str(secret))
    assert environment_credential() == SECRET
    path.chmod(0o600)
    monkeypatch.setenv("FFS_TOKEN_FILE", str(path))
    assert environment_credential() == TOKEN
    with no_credentials():
        assert environment_credential() is None
    assert environment_credential() == TOKEN
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidArgument, match="ffs user token"):
        environment_credential()


def test_the_command_warns_once_and_in_one_line(
    secret: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    secret.chmod(0o644)
    monkeypatch.setenv("FFS_CLUSTER_SECRET_FILE", str(secret))
    monkeypatch.delenv("FFS_TOKEN_FILE", raising=False)
    before = warnings.showwarning
    assert main(["--cluster=127.0.0.1:1", "cp", "ffs:/x", "ffs://127.0.0.1:2/y"]) == 1
    assert main(["--cluster=127.0.0.1:1", "ls"]) == 3
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if "warning" in line] == [
        f"ffs: warning: {secret}: everybody may read the cluster secret here (mode 0644): chmod 600 {secret}"
    ]
    assert warnings.showwarning is before


def test_which_secret_up_takes(secret: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other, known = tmp_path / "other", tmp_path / "known"
    for path in (other, known):
        path.write_bytes(SECRET)
        path.chmod(0o600)
    monkeypatch.delenv("FFS_CLUSTER_SECRET_FILE", raising=False)
    assert choose_secret(None, "") == ""
    assert choose_secret(None, str(known)) == str(known)
    monkeypatch.setenv("FFS_CLUSTER_SECRET_FILE", str(secret))
    assert choose_secret(None, str(known)) == str(secret)
    monkeypatch.chdir(tmp_path)
    assert choose_secret("other", str(known)) == str(other)
    other.chmod(0o604)
    with pytest.raises(NotPermitted, match="chmod 600"):
        choose_secret("other", "")
    secret.unlink()
    with pytest.raises(
        NotFound, match=r"that FFS_CLUSTER_SECRET_FILE names isn't there: make one with .*head"
    ):
        choose_secret(None, "")
