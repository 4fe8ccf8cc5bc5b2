"""Nothing in the project names the place where it was made, and formats are pinned where they stand."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def tracked() -> list[Path]:
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in names.splitlines() if (ROOT / name).is_file()]


def test_no_absolute_home_paths() -> None:
    """A path of somebody's machine in a tracked file would break on the next one."""
    home = re.compile(r"/(?:home/(?!me/)|root/|Users/|work/)[A-Za-z0-9_.-]+")
    for path in tracked():
        if path == Path(__file__) or path.suffix in {".hex", ".bin", ".png"}:
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            assert not home.search(line), f"{path.relative_to(ROOT)}:{number}: {line.strip()}"


def test_formatting_marks() -> None:
    """No tabs (Makefile aside), no trailing blanks, a newline at the end."""
    for path in tracked():
        if path.suffix not in {".py", ".cc", ".h", ".md", ".toml", ".cmake", ".txt"}:
            continue
        text = path.read_text()
        where = path.relative_to(ROOT)
        assert "\t" not in text, f"{where} has a tab"
        assert not re.search(r"[ \t]+$", text, re.MULTILINE), f"{where} has trailing blanks"
        assert not text or text.endswith("\n"), f"{where} doesn't end with a newline"


def test_wire_and_disk_structs_are_pinned() -> None:
    """Every struct of wire.h has a static_assert of its size."""
    text = (ROOT / "native/include/ffs/wire.h").read_text()
    structs = set(re.findall(r"^struct (\w+) \{", text, re.MULTILINE))
    pinned = set(re.findall(r"static_assert\(sizeof\((\w+)\) ==", text))
    assert structs
    assert structs <= pinned, f"not pinned: {sorted(structs - pinned)}"


def sections(page: Path) -> set[str]:
    """What a page's parts are called: headings, words that begin a paragraph, first cells of tables."""
    text = page.read_text()
    names = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    names += re.findall(r"(?:^|\n|[-.] )\*{1,2}([^*\n]+?)[.:]?\*{1,2}", text)
    names += re.findall(r"^\| *([^|]+?) *\|", text, re.MULTILINE)
    return {part.strip() for name in names for part in (name, *name.split(", "))} - {""}


def test_sections_that_code_names_exist() -> None:
    """`docs/PAGE.md, Section`: who follows it finds it."""
    pages = {path.relative_to(ROOT).as_posix(): sections(path) for path in (ROOT / "docs").rglob("*.md")}
    missing = []
    for path in tracked():
        if path.suffix not in {".py", ".cc", ".h"} or path == Path(__file__):
            continue
        text = re.sub(r"\n[ \t]*(?://|#|\*)?[ \t]*", " ", path.read_text())
        for page, section in re.findall(r"(docs/[\w/]+\.md)(?:, ([A-Z][\w' -]*\w))?", text):
            known = pages.get(page)
            if known is None or (section and not any(re.match(rf"{re.escape(n)}\b", section) for n in known)):
                missing.append(f"{path.relative_to(ROOT)}: {page}, {section}")
    assert not missing, "\n".join(missing)
