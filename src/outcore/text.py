"""Shows text from outside safely: errors on one line, long values cut, control characters escaped."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

# Characters shown of an error raised by another library.
LONGEST = 200


def one_line(error: BaseException | str) -> str:
    """Returns an error's message as one printable line; its type's name if it has none."""
    text = " ".join(str(error).split()) or type(error).__name__
    return printable(text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}...")


def shortened(value: object, most: int = 40) -> str:
    """Returns a value as one line of at most ``most`` characters."""
    text = printable(" ".join(str(value).split()))
    return text if len(text) <= most else f"{text[: most - 3]}..."


def quoted(text: str) -> str:
    """Returns text from a file as one short printable line in quotes."""
    return ascii(text if len(text) <= 120 else text[:117] + "...")


def printable(text: str) -> str:
    """Escapes characters that are invisible or move a terminal's cursor."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in text)


def shown(text: str) -> str:
    """Escapes as ``printable`` does, but keeps line ends, tabs and Unicode spaces."""
    return "".join(c if c in "\n\t" or (c.isspace() and c > "\x9f") else printable(c) for c in text)


def unmoved(text: str) -> str:
    """Escapes control characters in a model's output, except line ends and tabs, and keeps all letters and pictures."""
    return _CONTROLS.sub(lambda c: c[0].encode("unicode_escape").decode(), text)


def half_character(text: str) -> int | None:
    """Returns the index of the first unpaired surrogate, which tokenizers refuse; None if the text is whole.

    JSON escapes and command-line arguments that are not UTF-8 can contain one.
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


# Below this likeness (0 to 1) a known word is not suggested: ``temperature`` is like ``experts`` by 0.56.
LIKENESS = 0.72


def meant(word: str, known: Iterable[str]) -> str:
    """Returns " (did you mean X?)", or an empty string: X is the only known word that the given one begins with or is
    the beginning of, else the closest one."""
    names = {name.lstrip("-"): name for name in known}
    bare = word.lstrip("-").replace("_", "-")
    longer = [n for n in names if len(n) > 2 and bare.startswith(n)]
    begun = longer or [n for n in names if len(bare) > 2 and n.startswith(bare)]
    close = begun if len(begun) == 1 else difflib.get_close_matches(word.lstrip("-"), names, 1, LIKENESS)
    return f" (did you mean {names[close[0]]}?)" if close else ""
