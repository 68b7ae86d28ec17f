"""What claims.py and under_pressure.py share: measurements in processes of their own, and a command for it.

The command ends with a table, and its last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

import outcore
from outcore.checkpoint.checkpoint import open_checkpoint
from outcore.errors import OutcoreError
from outcore_bench.disk import machine
from result_file import shown

Result = dict[str, Any]

SAME_OUTCORE = {"PYTHONPATH": str(Path(outcore.__file__).parents[1]), "PYTHONUNBUFFERED": "1"}
"""Environment of children: this Outcore, and each line of theirs at once."""
WIDTH = 140  # of the table where there is no terminal


class Failed(Exception):
    """A measurement gave no result: it was killed, or ended with an error."""


def child_command(script: str, kind: str, options: Result) -> list[str]:
    """What takes one measurement in a process of its own; ``script`` hands its arguments to ``child``."""
    return [sys.executable, script, "--child", kind, json.dumps(options)]


def child(kinds: Mapping[str, Callable[..., Result]], argv: Sequence[str]) -> int:
    """Take one measurement in this process and print it; ``argv`` is ``--child``, the kind, and its options in JSON."""
    try:
        print(json.dumps(kinds[argv[1]](**json.loads(argv[2]))))
    except OutcoreError as e:
        print(f"{type(e).__name__}: {e}", file=sys.stderr)
        return 1
    return 0


class Subject:
    """The model that is measured, and where progress is told."""

    def __init__(self, folder: Path, log: Console) -> None:
        self.folder = folder
        self.files = open_checkpoint(folder).files
        self.nbytes = sum(file.stat().st_size for file in self.files)
        self.log = log

    @property
    def record(self) -> Result:
        """Its entry in the document."""
        return {"folder": self.folder.resolve().name, "nbytes": self.nbytes}


def arg_parser(description: str, groups: Sequence[str]) -> argparse.ArgumentParser:
    """The arguments that both have; ``groups`` are what ``--only`` chooses from."""
    parser = argparse.ArgumentParser(description=f"{description}; the last line is one JSON document.")
    parser.add_argument("model", type=Path, help="local model folder")
    parser.add_argument("--only", default=",".join(groups), help="some of these, with commas (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the JSON document there too")
    return parser


def chosen(parser: argparse.ArgumentParser, args: argparse.Namespace, groups: Sequence[str]) -> list[str]:
    """What ``--only`` names."""
    only: list[str] = args.only.split(",")
    if unknown := set(only) - set(groups):
        parser.error(f"--only {','.join(sorted(unknown))}: choose from {','.join(groups)}")
    return only


def run(
    name: str,
    argv: Sequence[str],
    args: argparse.Namespace,
    measure: Callable[[Console], Result],
    show: Callable[[Result, Console], None],
) -> int:
    """Measure, show the table, print the document; returns the exit status.

    Args:
        measure: gives the document's own part; progress goes to the console that it gets.
    """
    command = f"python bench/{name}.py {shlex.join(shown(argv))}"
    document: Result = {"command": command, "machine": asdict(machine(args.model))}
    try:
        began = time.perf_counter()
        document |= measure(Console(stderr=True))
    except (OutcoreError, Failed) as e:
        print(f"{name}: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    document["wall_s"] = time.perf_counter() - began
    show(document, Console(width=None if sys.stdout.isatty() else WIDTH))
    print(json.dumps(document))
    if args.json:
        args.json.write_text(json.dumps(document, indent=2) + "\n")
    return 0
