"""docs/generate.svg: README's picture, a terminal in which ``outcore generate`` ran.

    python dev/record.py    # runs COMMAND on a pseudo-terminal, in the repository's root, and writes PICTURE

The progress line, which the answer replaces, is kept above it. Text stays text, and nothing is loaded from elsewhere.
"""

import fcntl
import io
import os
import pty
import re
import shlex
import struct
import sys
import termios
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
PICTURE = "docs/generate.svg"
COMMAND = ["outcore", "generate", "demo-model/outcore_demo_model", "--memory", "14MB", "-p", "def read_lines(path):"]
COLUMNS = 114
"""The summary's longest line fits."""

MOVES = re.compile(r"\x1b\[[?\d;]*[A-Za-ln-z]")
"""Control sequences other than colours (``m``)."""
SPINNER = re.compile(r"[\u2800-\u28ff]")


def recorded(command: list[str], columns: int) -> str:
    """What the command writes to a terminal; raises SystemExit if it fails."""
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(ROOT)
        os.environ |= {"TERM": "xterm-256color", "COLUMNS": str(columns), "PATH": f"{Path(sys.executable).parent}:/bin"}
        os.execvp(command[0], command)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    written = b""
    try:
        while more := os.read(terminal, 65536):
            written += more
    except OSError:
        pass  # Linux's end of a terminal
    text = written.decode()
    if status := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        raise SystemExit(f"{shlex.join(command)}: exit status {status}\n{text}")
    return text


def lines(written: str) -> list[str]:
    """The terminal's lines at the end, below the last progress line with a bar."""
    bar, stay = "", []
    for line in written.removesuffix("\n").split("\n"):
        frames = [MOVES.sub("", frame) for frame in line.split("\r")]
        bar = next((f for f in reversed(frames) if "━" in f), bar)
        last = next((f for f in reversed(frames) if f), "")
        if not SPINNER.search(last):
            stay.append(last)
    return [bar, *stay]


def picture(command: list[str], shown: list[str], columns: int) -> str:
    """An SVG of a terminal with the command and what it showed."""
    console = Console(record=True, width=columns, file=io.StringIO(), force_terminal=True)
    console.print(Text.assemble(("$ ", "green"), (shlex.join(command), "bold")), soft_wrap=True)
    for line in shown:
        console.print(Text.from_ansi(line), soft_wrap=True)
    plain = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    plain = plain.replace("Fira Code, monospace", "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace")
    return console.export_svg(title=" ".join(command[:2]), code_format=plain, unique_id="t")


if __name__ == "__main__":
    (ROOT / PICTURE).write_text(picture(COMMAND, lines(recorded(COMMAND, COLUMNS)), COLUMNS), encoding="utf-8")
    print(PICTURE)
