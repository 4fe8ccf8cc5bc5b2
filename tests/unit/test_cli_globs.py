"""Patterns of the command line, held against bash; names, excludes, predicates against find; modes against
chmod."""

from __future__ import annotations

import os
import random
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffs.cli import globs, predicates
from ffs.cli.modes import parse_mode_argument, parse_owner
from ffs.cli.parsing import join_signed
from ffs.errors import InvalidArgument

NAMES = [
    "a",
    "ab",
    "b.bin",
    "c.bin",
    ".hidden",
    "d/e.bin",
    "d/.h/x",
    "d/f/g.bin",
    "d/f/[x]",
    "x y",
    "d2/e.bin",
    "A",
    "a-z",
    "]",
    "star*",
    "back\\slash",
    "é",
    "d/f/h/i/deep",
]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("globs")
    for name in NAMES:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    (root / "link").symlink_to("d")
    (root / "lost").symlink_to("nowhere")
    return root


def listing(path: str) -> Iterator[tuple[str, bool, bool]]:
    for entry in os.scandir(path):
        yield entry.name, entry.is_dir(), entry.is_symlink()


def by_bash(root: Path, pattern: str) -> list[str]:
    setting = 'shopt -s nullglob globstar; cd "$1"; LC_ALL=C.UTF-8'
    script = f'{setting}; for f in {pattern}; do printf "%s\\0" "$f"; done'
    run = subprocess.run(["bash", "-c", script, "-", str(root)], capture_output=True, text=True, check=True)
    return sorted(path.rstrip("/") for path in run.stdout.split("\0")[:-1])


@pytest.mark.parametrize(
    "pattern",
    [
        "*",
        "?",
        "??",
        "*.bin",
        "[ab]*",
        "[!a]",
        "[^a]",
        "[a-c].bin",
        ".*den",
        "*/",
        "d/*",
        "d*/e.bin",
        "**",
        "**/*.bin",
        "d/**",
        "d/**/*.bin",
        "**/f/*",
        "*/f/**/deep",
        "[]]",
        "[]a]",
        "d/f/\\[*",
        "x\\ *",
        "link/*",
        "l*",
        "a[-]z",
        "*[*]",
        "d/.h/*",
        "d/*/x",
        "?[!/]",
        "[z-a]",
        "**/.h/x",
        "b*n*",
    ],
)
def test_patterns_match_what_they_match_in_bash(tree: Path, pattern: str) -> None:
    base = globs.escape(str(tree))
    found = globs.expand(f"{base}/{pattern}", listing, os.path.lexists)
    inside = sorted(path.removeprefix(f"{tree}/").rstrip("/") for path in found if path != str(tree))
    assert inside == by_bash(tree, pattern)


@given(st.text(alphabet="ab[]*?\\!-^.x/", max_size=8), st.text(alphabet="ab[]*?\\!-^.x", max_size=5))
def test_no_pattern_breaks_the_translation(pattern: str, name: str) -> None:
    globs.name_regex(pattern).match(name)
    globs.path_regex(pattern).match(name)
    assert globs.name_regex(globs.escape(name)).match(name)
    assert globs.unescape(globs.escape(name)) == name
    assert not globs.has_magic(globs.escape(name))


@pytest.mark.parametrize(
    ("patterns", "path", "is_directory", "out"),
    [
        (["*.log"], "a/b/x.log", False, True),
        (["*.log"], "a/b/x.logs", False, False),
        (["a/*.log"], "a/x.log", False, True),
        (["a/*.log"], "b/a/x.log", False, False),
        (["/x"], "x", False, True),
        (["/x"], "a/x", False, False),
        (["**/x"], "a/b/x", False, True),
        (["a/**/x"], "a/x", False, True),
        (["tmp/"], "a/tmp", True, True),
        (["tmp/"], "a/tmp", False, False),
        ([".*"], "a/.h", False, True),
        ([""], "a", False, False),
    ],
)
def test_excludes(patterns: list[str], path: str, is_directory: bool, out: bool) -> None:
    assert globs.Excludes(patterns).match(path, is_directory) is out


# --- find ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "query"),
    [
        (["-name", "*.bin"], predicates.Query(names=[globs.name_regex("*.bin")])),
        (["-iname", "a*"], predicates.Query(names=[globs.name_regex("a*", True)])),
        (["-path", "*d*e.bin"], predicates.Query(paths=[predicates.path_pattern("*d*e.bin")])),
        (["-path", "*/[!d]*/e*"], predicates.Query(paths=[predicates.path_pattern("*/[!d]*/e*")])),
        (["-type", "d"], predicates.Query(types=predicates.parse_types("d"))),
        (["-type", "f,l"], predicates.Query(types=predicates.parse_types("f,l"))),
        (
            ["-type", "f", "-size", "-3k"],
            predicates.Query(types=("f",), sizes=[predicates.parse_size("-3k")]),
        ),
        (["-type", "f", "-size", "+0"], predicates.Query(types=("f",), sizes=[predicates.parse_size("+0")])),
        (["-type", "f", "-size", "1k"], predicates.Query(types=("f",), sizes=[predicates.parse_size("1k")])),
        (
            ["-type", "f", "-size", "511c"],
            predicates.Query(types=("f",), sizes=[predicates.parse_size("511c")]),
        ),
        (["-mtime", "-3"], predicates.Query(ages=[predicates.parse_age("-3", days=True)])),
        (["-mtime", "+3"], predicates.Query(ages=[predicates.parse_age("+3", days=True)])),
        (["-mmin", "-502"], predicates.Query(ages=[predicates.parse_age("-502", days=False)])),
        (["-mmin", "+502"], predicates.Query(ages=[predicates.parse_age("+502", days=False)])),
        (["-mtime", "1"], predicates.Query(ages=[predicates.parse_age("1", days=True)])),
        (["-mmin", "2"], predicates.Query(ages=[predicates.parse_age("2", days=False)])),
        (["-type", "f", "-empty"], predicates.Query(types=("f",), empty=True)),
        (["-perm", "-222"], predicates.Query(perm=predicates.parse_perm("-222"))),
        (["-perm", "/111"], predicates.Query(perm=predicates.parse_perm("/111"))),
        (["-perm", "640"], predicates.Query(perm=predicates.parse_perm("640"))),
        (
            ["-links", "+1", "-type", "f"],
            predicates.Query(types=("f",), links=predicates.parse_number("+1", "")),
        ),
    ],
)
def test_predicates_find_what_find_finds(tmp_path: Path, options: list[str], query: predicates.Query) -> None:
    for number, name in enumerate(NAMES):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(number * 511 % 5000))
        path.chmod((0o644, 0o640, 0o666, 0o755)[number % 4])
        age = number * 30_000 + 90
        os.utime(path, (time.time() - age, time.time() - age))
    os.link(tmp_path / "a", tmp_path / "also")
    query.now_ns = time.time_ns()
    mine = {
        os.path.join(folder, name)
        for folder, folders, files in os.walk(tmp_path)
        for name in (*folders, *files)
        if query.fits(os.path.join(folder, name), os.lstat(os.path.join(folder, name)))
    }
    run = subprocess.run(
        ["find", str(tmp_path), "-mindepth", "1", *options, "-print0"], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert mine == set(run.stdout.split("\0")[:-1])
    assert mine


@pytest.mark.parametrize("text", ["x", "4kk", "++1", "", "1.5M"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(InvalidArgument, match="size"):
        predicates.parse_size(text)


def test_values_that_begin_with_a_minus() -> None:
    assert join_signed(["find", "/", "-size", "-4k", "-name", "-x"]) == [
        "find",
        "/",
        "-size=-4k",
        "-name",
        "-x",
    ]
    assert join_signed(["head", "-n", "-3", "/a"]) == ["head", "-n-3", "/a"]
    assert join_signed(["ls", "-n", "-3"]) == ["ls", "-n", "-3"]


# --- modes ----------------------------------------------------------------------------------------------


MODES = [
    "644",
    "0755",
    "00755",
    "4755",
    "u+x",
    "go-w",
    "a=r",
    "u=rwx,g=rx,o=",
    "+x",
    "-w",
    "=r",
    "a+X",
    "u+s",
    "g+s,o-t",
    "+t",
    "g=u",
    "o=g-w",
    "u=g",
    "ug+rw,o-rwx",
    "u+r-w+x",
    "o=t",
    "a=",
    "g-s",
    "u=rws",
    "1777",
    "=",
    "ugo+X,u-x",
]


def test_modes_do_what_chmod_does(tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    script, expected = ["umask 027"], []
    for number, text in enumerate(MODES * 4):
        is_directory = number % 2 == 0 if number < 2 * len(MODES) else rng.random() < 0.5
        mode = rng.randrange(0o10000)
        path = tmp_path / f"{number}"
        path.mkdir() if is_directory else path.touch()
        path.chmod(mode)
        mode = stat.S_IMODE(path.stat().st_mode)
        expected.append((path, text, mode, parse_mode_argument(text, 0o027).apply(mode, is_directory)))
        script.append(f"chmod -- {text} {path} 2>/dev/null")
    subprocess.run(["bash", "-c", "\n".join(script)], check=False, timeout=60)
    for path, text, mode, mine in expected:
        assert oct(stat.S_IMODE(path.stat().st_mode)) == oct(mine), f"{text} of {mode:o}, {path.is_dir()}"
        path.chmod(0o700)


@pytest.mark.parametrize("text", ["", "8", "77777", "u", "u+q", "x+r", "u+r,", "u=ug"])
def test_bad_modes(text: str) -> None:
    with pytest.raises(InvalidArgument):
        parse_mode_argument(text)


def test_owners() -> None:
    assert parse_owner("root") == (0, -1)
    assert parse_owner("root:") == (0, 0)
    assert parse_owner(":7") == (-1, 7)
    assert parse_owner("12:34") == (12, 34)
    for text in ("", ":", "no-such-user", "1:no-such-group", "12:"):
        with pytest.raises(InvalidArgument):
            parse_owner(text)
