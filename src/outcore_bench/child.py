"""``python -m outcore_bench.child KIND ARGUMENTS``: one measurement in a process of its own, for `runner` alone.

``ARGUMENTS`` is a JSON object; the last line of standard output is another. A failure is the last line of standard
error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from outcore.errors import OutcoreError

from .disk import disk_rate
from .jobs import BenchJob
from .measure import measure


def _row(arguments: dict[str, Any]) -> dict[str, Any]:
    return measure(BenchJob.of(arguments)).record()


def _disk(arguments: dict[str, Any]) -> dict[str, Any]:
    files = [Path(file) for file in arguments.pop("files")]
    return asdict(disk_rate(files, **arguments))


KINDS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {"row": _row, "disk": _disk}


def main(argv: list[str]) -> int:
    """Take one measurement; returns the exit status."""
    kind, arguments = argv
    try:
        result = KINDS[kind](json.loads(arguments))
    except OutcoreError as e:
        print(e, file=sys.stderr)
        return 1
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
