"""docs/commands.md: what ``--help`` of every command says, so that the page cannot drift from the flags.

python dev/reference.py            # says where the page differs; exit status 1
python dev/reference.py --write    # writes it
"""

import argparse
import contextlib
import difflib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = "docs/commands.md"
WIDTH = 100

HEAD = """# Commands

What `outcore --help` and `outcore COMMAND --help` say. This page is written by `python dev/reference.py --write`, and
`scripts/check` fails where it differs. Examples are in [usage.md](usage.md).

"""


def page() -> str:
    """The page, from the parsers of this Python."""
    # argparse asks for the width of the terminal when it formats; colours would be control characters here.
    os.environ["COLUMNS"], os.environ["NO_COLOR"] = str(WIDTH), "1"
    # Else this folder's numbers.py is found for the standard library's.
    sys.path[:] = [p for p in sys.path if Path(p).resolve() != Path(__file__).resolve().parent]
    from outcore.cli.commands import commands, parser_of

    parts = [HEAD, "- ", "\n- ".join(f"[`outcore {name}`](#outcore-{name})" for name in sorted(commands())), "\n\n"]
    parts.append(f"```text\n{_help([])}```\n")
    for name in sorted(commands()):
        parts.append(f"\n## outcore {name}\n\n```text\n{_tidy(parser_of(name, everything=True).format_help())}```\n")
    return "".join(parts)


def _help(command: Sequence[str]) -> str:
    from outcore.cli.main import main as outcore

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = outcore([*command, "--help"])
    if status:
        raise SystemExit(f"outcore {' '.join(command)} --help: exit status {status}")
    return _tidy(out.getvalue())


def _tidy(text: str) -> str:
    return "".join(f"{line.rstrip()}\n" for line in text.strip("\n").splitlines())


def main(argv: Sequence[str] | None = None) -> int:
    """Check, or write; returns the exit status."""
    parser = argparse.ArgumentParser(description="docs/commands.md, from the help of every command.")
    parser.add_argument("--write", action="store_true", help="Write the page.")
    args = parser.parse_args(argv)
    path, wanted = ROOT / PAGE, page()
    if args.write:
        path.write_text(wanted, encoding="utf-8")
        return 0
    there = path.read_text(encoding="utf-8") if path.exists() else ""
    # Versions of argparse break usage lines at other places.
    if there.split() == wanted.split():
        return 0
    if sys.version_info >= (3, 13):
        print(f"{PAGE} is not checked: argparse writes options otherwise from Python 3.13 on")
        return 0
    lines = difflib.unified_diff(there.splitlines(), wanted.splitlines(), PAGE, "--help", lineterm="", n=0)
    for line in list(lines)[:40]:
        print(line)
    print(f"{PAGE} is not what --help says: python dev/reference.py --write")
    return 1


if __name__ == "__main__":
    sys.exit(main())
