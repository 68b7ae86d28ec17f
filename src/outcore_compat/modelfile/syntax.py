"""Parses a Modelfile into instructions with their values and line numbers.

The syntax is that of Ollama's own parser: a line is an instruction and its value; ``#`` at the beginning of a line
starts a comment; a value that begins with ``\"`` or ``\"\"\"`` goes on until a line ends with the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from outcore.errors import UsageError
from outcore.text import meant, shortened

# Instructions that cannot be applied, and why.
UNSUPPORTED = {
    "renderer": "code that is built into Ollama; leave it out, and the model's own chat template is used",
    "parser": "code that is built into Ollama; leave it out",
    "template": "the model's own chat template is used; leave it out",
    "requires": "a version of Ollama, which this is not; leave it out",
}

INSTRUCTIONS = (
    "from", "parameter", "system", "message", "adapter", "license", "draft", *UNSUPPORTED,
)  # fmt: skip

# Instructions of two words or more.
EXAMPLES = {"parameter": "PARAMETER temperature 0.7", "message": "MESSAGE user Why is the sky blue?"}

ROLES = ("system", "user", "assistant")

# Control characters, by which a binary file is recognized.
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


class LineError(UsageError):
    """An error in a line of a Modelfile; the message begins with its number, from 1."""

    def __init__(self, line: int, text: str) -> None:
        super().__init__(f"line {line}: {text}")
        self.line = line


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        name: in lower case.
        argument: the name of a ``parameter``, in lower case, or the role of a ``message``; else empty.
        value: without its quotation marks.
        line: where the instruction begins, from 1.
    """

    name: str
    argument: str
    value: str
    line: int

    def refused(self, why: str) -> LineError:
        called = " ".join([self.name.upper(), *[self.argument] * (self.name == "parameter")])
        return LineError(self.line, f"{called}: {why}")


def decoded(data: bytes) -> str:
    """Decodes a Modelfile's UTF-8 text, with ``\\n`` as line ends. Raises ``LineError`` if it is not text."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise LineError(data.count(b"\n", 0, e.start) + 1, f"not UTF-8 text at byte {e.start}") from e
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if found := CONTROL.search(text):
        line = text.count("\n", 0, found.start()) + 1
        raise LineError(line, f"not text: it holds the control character {ord(found[0])}")
    return text


def parse(text: str) -> Iterator[Instruction]:
    """Yields the instructions of a Modelfile in order. Raises ``LineError``."""
    lines = text.split("\n")
    at = 0
    while at < len(lines):
        number, line = at + 1, lines[at].strip(" \t")
        at += 1
        if not line or line.startswith("#"):
            continue
        word, rest = _cut(line)
        name, argument = word.lower(), ""
        if name not in INSTRUCTIONS:
            known = meant(name, INSTRUCTIONS) or "; there are " + ", ".join(n.upper() for n in INSTRUCTIONS)
            raise LineError(number, f"unknown instruction {shortened(word)}{known}")
        if name in EXAMPLES:
            argument, rest = _cut(rest)
            if not rest:
                raise LineError(number, f"{name.upper()} takes two words or more, such as {EXAMPLES[name]}")
            argument = argument.lower() if name == "parameter" else argument
        if name == "message" and argument not in ROLES:
            raise LineError(
                number, f"MESSAGE {shortened(argument)}: the role is {', '.join(ROLES[:-1])} or {ROLES[-1]}"
            )
        value, at = _value(rest, lines, at)
        found = Instruction(name, argument, value, number)
        if not rest:
            raise found.refused('it has no value; write "" for an empty one')
        yield found


def _cut(line: str) -> tuple[str, str]:
    word, *rest = re.split(r"[ \t]+", line, maxsplit=1)
    return word, rest[0] if rest else ""


def _value(rest: str, lines: list[str], at: int) -> tuple[str, int]:
    """Returns the value whose first line is ``rest``, and the index of the line after it. Raises ``LineError`` if its
    quotation marks are not closed."""
    mark = next((mark for mark in ('"""', '"') if rest.startswith(mark)), "")
    if not mark:
        return rest, at
    begun, parts, last = at, [rest], rest.rstrip()
    closed = len(last) >= 2 * len(mark) and last.endswith(mark)
    while not closed:
        if at == len(lines):
            raise LineError(begun, f"the text that begins with {mark} is never closed: no later line ends with {mark}")
        parts.append(lines[at])
        closed = lines[at].rstrip().endswith(mark)
        at += 1
    return "\n".join(parts).rstrip()[len(mark) : -len(mark)], at
