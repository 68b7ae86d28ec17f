"""Checks words: identifiers that are gone from the code, and words that are gone from prose.

Prose is README.md, CONTRIBUTING.md and docs/*.md without code; docstrings, comments and texts of ``src``. What to write
instead: docs/design.md (Words).
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
IDENTIFIERS = {"Target", "Turns", "Chooser", "Hops", "Beside", "Experience", "Ask"}
WORDS = re.compile(r"\b(sweeps?|rehears\w*|plain ways?|choosers?)\b", re.IGNORECASE)
ALLOWED = {"sweeps", "per_sweep", "sweeps_per_s", "sweep_s", "in_sweep", "tokens_per_sweep"}
FENCED = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)
FIELD = re.compile(rf"^ *({'|'.join(ALLOWED)}):", re.MULTILINE)
CODE = re.compile(r"``?[^`\n]+``?|^(?:    |\t)[^\n]*$", re.MULTILINE)


def python(text: str) -> Iterator[tuple[int, str]]:
    """Comments and strings with a space in them (docstrings, help texts, messages), by line."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value not in ALLOWED:
            yield node.lineno, FIELD.sub("", re.sub(r"``?[^`\n]+``?", "", node.value))


def names(text: str) -> Iterator[tuple[int, str]]:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return ((t.start[0], t.string) for t in tokens if t.type == tokenize.NAME)


def findings() -> str:
    """Returns what is wrong, one a line."""
    wrong: list[str] = []
    for folder in ("src", "tests", "benchmarks", "dev"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            text, where = file.read_text(encoding="utf-8"), file.relative_to(ROOT)
            wrong += [f"{where}:{line}: the name {n}" for line, n in names(text) if n in IDENTIFIERS]
            if folder == "src":
                wrong += [f"{where}:{line}: {m[0]}" for line, said in python(text) for m in WORDS.finditer(said)]
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))):
        prose = page.read_text(encoding="utf-8")
        for code in (FENCED, CODE):
            prose = code.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), prose)
        for line, said in enumerate(prose.splitlines(), start=1):
            wrong += [f"{page.relative_to(ROOT)}:{line}: {m[0]}" for m in WORDS.finditer(said)]
    return "\n".join(wrong)


if __name__ == "__main__":
    sys.exit(findings() or None)
