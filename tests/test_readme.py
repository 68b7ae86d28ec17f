"""README.md: short, its links lead somewhere, and on the package index too; docs/commands.md is what --help says."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import outcore
from outcore.cli.commands import commands

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\((?!https?://|mailto:)([^()\s]+)\)")
PAGES = [p for pages in ("*.md", "docs/*.md", "dev/**/*.md", "tests/**/*.md") for p in sorted(ROOT.glob(pages))]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def speeds() -> list[list[str]]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in re.findall(r"^\|.*\|$", text, re.MULTILINE)]
    return rows[: next(n for n, row in enumerate(rows) if row[0] == "`outcore …`")]


def test_the_readmes_table_of_speeds_is_no_wider_than_a_phone() -> None:
    rows = speeds()
    # Cells are broken at spaces; about 8 points a letter and 26 around each cell, of 360.
    widest = [
        max(len(word) for row in rows for word in row[n].split() if "---" not in word) for n in range(len(rows[0]))
    ]
    assert 8 * sum(widest) + 26 * len(widest) <= 360


def test_the_readmes_table_of_speeds_has_no_gaps_and_begins_with_the_greatest_gain() -> None:
    head, _, *rows = speeds()
    assert all(all(row) for row in [head, *rows])
    gains = [float(row[2]) / float(row[3].split()[0]) for row in rows]
    assert gains[0] == max(gains)


def _anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_to_what_is_there(page: Path) -> None:
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in _anchors(target), link


def test_links_on_the_package_index_have_an_address_or_are_words() -> None:
    text = "See [a](docs/a.md#b), [b](https://h/b) and [c](#d). ![p](p.png)\n\n    x = [y](z)\n\n```\n[y](z)\n```\n"
    code = text[text.index("\n\n    x") :]
    index = runpy.run_path(str(ROOT / "setup.py"))["for_index"]
    assert index(text, "") == "See a, [b](https://h/b) and [c](#d). " + code
    assert index(text, "https://h/o/").startswith(
        "See [a](https://h/o/docs/a.md#b), [b](https://h/b) and [c](#d). ![p](https://h/o/p.png?raw=true)"
    )
    assert index(text, "https://h/o/").endswith(code)


def test_the_picture_of_a_run_shows_the_progress_line_above_what_stays_and_needs_nothing_from_elsewhere() -> None:
    record = runpy.run_path(str(ROOT / "dev" / "record.py"))
    bar = "\x1b[?25l\r\x1b[2K⠸ prompt ━╺━ 1 of 3\r\x1b[2K⠹ prompt ━━╺ 2 of 3\r\x1b[2K\x1b[?25h\r"
    written = (
        "⠋ starting\r\x1b[2K⠙ starting\r\n\r\x1b[1A\x1b[2K" + bar + "\x1b[1mAn\x1b[0m answer\r\n\r\nMemory: 1 MB\r\n"
    )
    shown = record["lines"](written)
    assert shown == ["⠹ prompt ━━╺ 2 of 3", "\x1b[1mAn\x1b[0m answer", "", "Memory: 1 MB"]
    committed = (ROOT / record["PICTURE"]).read_text(encoding="utf-8")
    for drawn in (committed, record["picture"](record["COMMAND"], shown, 80)):
        text = re.sub(r"<[^>]*>", "", drawn).replace("&#160;", " ")
        assert "$ outcore generate demo-model/" in text and " prompt ━" in text and "\nMemory: " in text
        assert not re.findall(r"url\([^#]|href|@import|<script", drawn)
    assert len(committed) < 40_000 and record["PICTURE"] in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_package_carries_no_relative_link() -> None:
    said = runpy.run_path(str(ROOT / "setup.py"))["description"]()
    assert said.startswith("# Outcore") and not [link for link in LINK.findall(said) if not link.startswith("#")]


def test_the_page_of_python_names_all_that_is_exported() -> None:
    text = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    assert [n for n in outcore.__all__ if f"`{n}" not in text and not n.startswith("__")] == []


def test_the_readme_names_every_command() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    listed = {
        name for row in re.findall(r"^\| (`.*?`) \|", text, re.MULTILINE) for name in re.findall(r"`([a-z-]+)`", row)
    }
    assert set(commands()) <= listed


def test_the_reference_of_commands_is_what_help_says() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "dev" / "reference.py")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
