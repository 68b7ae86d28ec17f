"""``python -m outcore_bench.child KIND ARGUMENTS``: one measurement in a process of its own, for `runner` alone.

``ARGUMENTS`` is a JSON object; the last line of standard output is another. A failure is the last line of standard
error.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from outcore.errors import OutcoreError

from .disk import disk_rate
from .jobs import BenchJob
from .measure import measure


def main(kind: str, text: str) -> int:
    """Take one measurement; returns the exit status."""
    arguments = json.loads(text)
    try:
        if kind == "row":
            result = measure(BenchJob.of(arguments)).record()
        else:
            result = asdict(disk_rate([Path(file) for file in arguments.pop("files")], **arguments))
    except OutcoreError as e:
        print(e, file=sys.stderr)
        return 1
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
