"""Numbers in README.md and docs/*.md that cannot go stale: each is written from a committed result, and checked.

    python dev/numbers.py            # lists stale numbers and numbers that no result stands behind; exit status 1
    python dev/numbers.py --write    # brings what is shown up to date

A page holds plain numbers. What they are made of stands in docs/tables.toml, under the name that the page gives:

    <!-- table: speed -->                               a Markdown table, or a fenced block, that follows
    It took <!-- n: first_start -->58<!-- /n --> s.     one number in a sentence

In docs/tables.toml a text holds fields ``{file: expression format}``: a name from ``[files]``, where in that result,
and how to write it, as in Python's ``format``; ``expressions.py`` has what an expression may be.

Numbers with a decimal point, and integers before a unit of time, rate or share, must be of these, but in code. What
is no measurement ends its line with ``<!-- not measured -->``; alone on a line, that speaks for the paragraph or table
that follows. Versions (``Python 3.11``, ``1.2.3``) are known.
"""

import argparse
import json
import re
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expressions import NumberError, evaluate

ROOT = Path(__file__).resolve().parents[1]

TABLES = "docs/tables.toml"
RESULTS = "benchmarks/results"
"""Where a file of ``[files]`` lies, from the repository's root."""

FIELD = re.compile(r"\{(?P<file>[\w-]+):\s*(?P<title>[^{}]+)\}")
TABLE = re.compile(r"[ \t]*<!-- table: (?P<name>[^>]*?) -->[ \t]*\n?")
VALUE = re.compile(r"<!-- n: (?P<name>[^>]*?) -->(?P<text>.*?)<!-- /n -->")
ANY_LINK = re.compile(r"!?\[[^\[\]]*\]\([^()]*(?:\([^()]*\)[^()]*)*\)|<https?://[^>]*>|https?://\S+")
FENCE = re.compile(r"(\s*)(```+|~~~+)")
NOT_MEASURED = re.compile(r"<!-- not measured(?::[^>]*)? -->")
UNITS = r"s|ms|µs|min|seconds?|minutes?|GB/s|MB/s|GiB/s|tok/s|tokens/s|tokens per second|J|W|×|x|%"
MEASURED = re.compile(rf"(?<![\w.,/-])(?:\d[\d,]*\.\d+(?![\w.]*\d)|\d[\d,]*\s?(?:{UNITS})(?![\w/]))")
VERSION = re.compile(
    r"\b(?:Python|MLX|mlx|mlx-lm|macOS|Linux|CUDA|Metal|Qwen|Llama|Gemma|Apache|[Vv]ersions?)[ -]?v?\d+(?:\.\d+)*\b"
    r"|(?<![\w.])v?\d+\.\d+\.\d+\b"
)


# ---- definitions --------------------------------------------------------------------------------------------------


class Definitions:
    """What docs/tables.toml says, read against the results of the repository ``root``.

    Attributes:
        used: names that a page asked for.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.used: set[str] = set()
        path = root / TABLES
        try:
            said = tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        except (OSError, ValueError) as e:
            raise NumberError(f"{TABLES}: {e}") from e
        if unknown := said.keys() - {"files", "values", "tables"}:
            raise NumberError(f"{TABLES}: [{min(unknown)}]: there are files, values and tables")
        self.files: dict[str, str] = said.get("files", {})
        self.values: dict[str, str] = said.get("values", {})
        self.tables: dict[str, dict[str, Any]] = said.get("tables", {})
        self._read: dict[str, Any] = {}

    def value(self, name: str) -> str:
        """The text between ``<!-- n: name -->`` and ``<!-- /n -->``."""
        self.used.add(name)
        if name not in self.values:
            raise NumberError(f"no value {name!r} in {TABLES}")
        return self._filled(self.values[name])

    def table(self, name: str) -> str:
        """The lines behind ``<!-- table: name -->``."""
        self.used.add(name)
        if name not in self.tables:
            raise NumberError(f"no table {name!r} in {TABLES}")
        table = self.tables[name]
        if "text" in table:
            lines = self._path(table["text"]).read_text(encoding="utf-8").strip("\n").splitlines()
            return "".join(f"{line.rstrip()}\n" for line in ("```text", *lines, "```"))
        columns, align = table["columns"], table.get("align", "l" * len(table["columns"]))
        rows = [[self._filled(cell) for cell in row] for row in table["rows"]]
        if wrong := [row for row in rows if len(row) != len(columns)]:
            raise NumberError(f"{name}: {len(wrong[0])} cells under {len(columns)} columns: {wrong[0]}")
        lines = [columns, ["---:" if a == "r" else "---" for a in align], *rows]
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)

    def unused(self) -> list[str]:
        """Names that no page asked for, and files that no text names."""
        texts = json.dumps([self.values, self.tables])
        return sorted(({*self.values, *self.tables} - self.used) | {f for f in self.files if f"{{{f}:" not in texts})

    def _filled(self, text: str) -> str:
        return FIELD.sub(lambda m: evaluate(m["title"], self._data(m["file"])), text)

    def _data(self, name: str) -> Any:
        if name not in self._read:
            if name not in self.files:
                raise NumberError(f"no file {name!r} in {TABLES}")
            path = self._path(self.files[name])
            try:
                self._read[name] = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError) as e:
                raise NumberError(f"{path.name} cannot be read: {getattr(e, 'strerror', None) or e}") from e
        return self._read[name]

    def _path(self, name: str) -> Path:
        pattern = name if "**" in name else f"{RESULTS}/{name}"
        found = sorted(self.root.glob(pattern))
        if len(found) != 1:
            raise NumberError(f"{name} cannot be read: {len(found)} files are {pattern}")
        return found[0]


# ---- pages ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """Something wrong in a page. ``fix``: where in its text, and what belongs there, if that is known."""

    line: int
    message: str
    fix: tuple[int, int, str] | None = None


def check(text: str, definitions: Definitions) -> list[Finding]:
    """What is stale or has no result behind it in a page."""
    prose, findings = _without_tables(text, definitions)
    prose = _without_code(prose)

    def value(match: re.Match[str]) -> str:
        line = prose.count("\n", 0, match.start()) + 1
        if not prose[prose.rfind("\n", 0, match.start()) + 1 : match.start()].strip():
            findings.append(Finding(line, f"{match['name']} begins its line: Markdown ends a paragraph there"))
        try:
            right = definitions.value(match["name"])
            if match["text"] != right:
                fix = (*match.span("text"), right)
                findings.append(Finding(line, f"{match['text']} should be {right}: {match['name']}", fix))
        except NumberError as e:
            findings.append(Finding(line, f"{match['name']}: {e}"))
        return _blank(match[0])

    rest = VALUE.sub(value, prose)
    return sorted(findings + _unmarked(rest), key=lambda f: f.line)


def _without_tables(text: str, definitions: Definitions) -> tuple[str, list[Finding]]:
    """The page with its generated blocks blanked out, character by character; and those that are not up to date."""
    findings, out, at = [], text, 0
    while match := TABLE.search(out, at):
        begin = at = match.end()
        line = out.count("\n", 0, match.start()) + 1
        end = _end_of_block(out, begin)
        try:
            right = definitions.table(match["name"])
            if out[begin:end] != right:
                what = f"the block is not {match['name']} of {TABLES}"
                findings.append(Finding(line, what, (begin, end, right)))
        except (NumberError, OSError, KeyError) as e:
            findings.append(Finding(line, f"{match['name']}: {e}"))
        out = out[: match.start()] + _blank(out[match.start() : end]) + out[end:]
    return out, findings


def _end_of_block(text: str, begin: int) -> int:
    """Where the fenced block or the table ends that begins there; ``begin`` if there is neither."""
    end, fence = begin, ""
    for line in text[begin:].splitlines(keepends=True):
        match = FENCE.match(line)
        if fence:
            end += len(line)
            if line.strip() == fence:
                return end
        elif end == begin and match:
            fence, end = match[2], end + len(line)
        elif line.startswith("|"):
            end += len(line)
        else:
            return end
    return end


def _without_code(text: str) -> str:
    """The page with its code blanked out, character by character."""
    fence, blank_before, indented = "", True, False
    out = []
    for line in text.splitlines(keepends=True):
        match = FENCE.match(line)
        if fence:
            out.append(_blank(line))
            if match and match[2].startswith(fence) and line.strip() == match[2]:
                fence = ""
            continue
        if match:
            fence = match[2]
            out.append(_blank(line))
            continue
        indented = bool(line.strip()) and line.startswith(("    ", "\t")) and (blank_before or indented)
        blank_before = not line.strip() or (blank_before and indented)
        out.append(_blank(line) if indented else re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", lambda m: _blank(m[0]), line))
    return "".join(out)


def _blank(text: str) -> str:
    return re.sub(r"[^\n]", " ", text)


def _unmarked(prose: str) -> list[Finding]:
    findings, excused = [], False
    for number, line in enumerate(prose.splitlines(), start=1):
        if not line.strip():
            excused = False
        if NOT_MEASURED.search(line):
            excused = excused or not NOT_MEASURED.sub("", line).strip()
            continue
        if excused:
            continue
        for known in (ANY_LINK, re.compile(r"<!--.*?-->"), VERSION):
            line = known.sub(lambda m: " " * len(m[0]), line)
        for match in MEASURED.finditer(line):
            why = "has no result behind it: take it from docs/tables.toml, or end the line with <!-- not measured -->"
            findings.append(Finding(number, f"{match[0]} {why}"))
    return findings


def pages(root: Path) -> list[Path]:
    """README.md and docs/*.md."""
    return [p for p in (root / "README.md", *sorted((root / "docs").glob("*.md"))) if p.exists()]


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Check, or bring up to date; returns the exit status."""
    parser = argparse.ArgumentParser(description="Numbers in README.md and docs/*.md, held against committed results.")
    parser.add_argument("--write", action="store_true", help="Bring shown numbers and blocks up to date.")
    parser.add_argument("pages", nargs="*", type=Path, help="Pages to look at. Default: README.md and docs/*.md.")
    args = parser.parse_args(argv)
    try:
        definitions = Definitions(root)
    except NumberError as e:
        print(e)
        return 1
    wrong = 0
    for page in args.pages or pages(root):
        text = page.read_text(encoding="utf-8")
        findings = check(text, definitions)
        fixes = [f.fix for f in findings if f.fix is not None] if args.write else []
        for begin, end, right in sorted(fixes, reverse=True):
            text = text[:begin] + right + text[end:]
        if fixes:
            page.write_text(text, encoding="utf-8")
        for finding in findings:
            name = page.relative_to(root) if page.is_relative_to(root) else page
            fixed = finding.fix is not None and args.write
            print(f"{name}:{finding.line}: {'written: ' if fixed else ''}{finding.message}")
            wrong += not fixed
    if not args.pages:
        for name in definitions.unused():
            print(f"{TABLES}: {name} is shown nowhere")
            wrong += 1
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
