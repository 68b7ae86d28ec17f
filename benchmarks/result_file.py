"""A benchmark's result: the machine, the command, and what was found, as one JSON document."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from outcore_bench.disk import machine


def shown(arguments: Sequence[str]) -> list[str]:
    """Arguments for a result: of paths their names, since where they lie is one machine's business."""
    return [Path(a).name if os.sep in a else a for a in arguments]


def shown_arguments() -> list[str]:
    """This command's arguments, for a result."""
    return shown(sys.argv[1:])


def document_of(name: str, folder: Path, **found: Any) -> dict[str, Any]:
    """What ``benchmarks/NAME.py`` found; ``folder`` is on the disk that was read."""
    return {"machine": asdict(machine(folder)), "command": [f"benchmarks/{name}.py", *shown_arguments()], **found}


def write_result(file: Path | None, name: str, folder: Path, **found: Any) -> None:
    """As ``document_of``, into the file that ``--json`` named, if it did."""
    if file is not None:
        file.write_text(json.dumps(document_of(name, folder, **found), indent=1))
