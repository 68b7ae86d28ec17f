"""Text from outside, as it is shown and handed on: others' errors as one line, long values cut, whole characters."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

LONGEST = 200
"""Characters of somebody else's error that are shown."""


def one_line(error: BaseException | str) -> str:
    """What an error says, as one line of printable characters; its type where it says nothing."""
    text = " ".join(str(error).split()) or type(error).__name__
    return printable(text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}...")


def shortened(value: object, most: int = 40) -> str:
    """A value that somebody gave, as one line of at most so many characters."""
    text = printable(" ".join(str(value).split()))
    return text if len(text) <= most else f"{text[: most - 3]}..."


def quoted(text: str) -> str:
    """Text from a file as one short printable line, in quotes."""
    return ascii(text if len(text) <= 120 else text[:117] + "...")


def printable(text: str) -> str:
    """The text with what would not be seen, or would move a terminal's cursor, written as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in text)


def shown(text: str) -> str:
    """The same for a text of several lines, whose line ends, tabs and wide or narrow spaces stay."""
    return "".join(c if c in "\n\t" or (c.isspace() and c > "\x9f") else printable(c) for c in text)


def unmoved(text: str) -> str:
    """The text with control characters, but for line ends and tabs, written as escapes: nothing that a terminal obeys.

    Unlike ``shown`` it leaves all that belongs to letters and pictures: it is for what a model says.
    """
    return _CONTROLS.sub(lambda c: c[0].encode("unicode_escape").decode(), text)


def half_character(text: str) -> int | None:
    """Where the first half of a surrogate pair stands in a text, counted from 0; None: it is whole.

    JSON can escape one, and so comes what of a command line is not UTF-8. No tokenizer takes it.
    """
    try:
        text.encode()
    except UnicodeEncodeError as e:
        return e.start
    return None


def counted(number: int, what: str) -> str:
    """Returns a number and its noun: ``1 layer``, ``2 layers``, ``2 passes``."""
    ending = "es" if what.endswith(("s", "ch")) else "s"
    return f"{number} {what}{ending if number != 1 else ''}"


def meant(word: str, known: Iterable[str]) -> str:
    """Which of the known words may have been meant, to be added to a line that refuses one."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""
