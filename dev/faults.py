"""Planted faults: whether the tests find each of the faults in dev/faults/faults.toml.

    python dev/faults.py                        # plants one after the other; exit status 1 where one is not found
    python dev/faults.py slot-given-back-early  # this one alone
    python dev/faults.py --check                # only whether each can still be planted
    python dev/faults.py --sound                # the tests named there, on code without faults: all must pass

A fault is planted in a temporary copy of src, and the tests named for it run against that copy (PYTHONPATH).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FAULTS = ROOT / "dev" / "faults" / "faults.toml"
MOST_S = 600
"""Seconds after which tests that do not end have found a fault."""


class FaultError(Exception):
    """A fault that cannot be planted, or tests that cannot be run."""


def planted(fault: dict[str, Any], src: Path) -> None:
    """Write a fault into a copy of src.

    Raises:
        FaultError: the text that it replaces is not there exactly once.
    """
    for edit in fault["edits"]:
        path = src / edit["file"]
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if (count := text.count(edit["old"])) != 1:
            raise FaultError(f"{edit['file']} has its text {count} times: plant it anew by its description")
        path.write_text(text.replace(edit["old"], edit["new"]), encoding="utf-8")
        compile(path.read_text(encoding="utf-8"), str(path), "exec")


def tested(src: Path, tests: Sequence[str]) -> str | None:
    """The first test that fails against this src; None: all pass.

    Raises:
        FaultError: pytest could not run them.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    env = os.environ | {"PYTHONPATH": str(src)}
    try:
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=MOST_S)
    except subprocess.TimeoutExpired:
        return f"no end after {MOST_S} s"
    if done.returncode == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    if done.returncode < 0:
        return f"ended by signal {-done.returncode}"
    if done.returncode != 1 or failed is None:
        raise FaultError(f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
    return failed[1]


def main() -> int:
    parser = argparse.ArgumentParser(description="Whether the tests find planted faults.")
    parser.add_argument("names", nargs="*", help="faults; all of them if none is named")
    parser.add_argument("--check", action="store_true", help="only whether they can be planted")
    parser.add_argument("--sound", action="store_true", help="run their tests on code without faults")
    parser.add_argument("--json", type=Path, help="write what was found to this file")
    args = parser.parse_args()
    faults = tomllib.loads(FAULTS.read_text(encoding="utf-8"))["faults"]
    if unknown := set(args.names) - {f["name"] for f in faults}:
        parser.error(f"no fault {min(unknown)!r}")
    faults = [f for f in faults if not args.names or f["name"] in args.names]
    if args.sound:
        found = tested(ROOT / "src", sorted({test for f in faults for test in f["tests"]}))
        print(found or "all pass")
        return int(found is not None)
    results: list[dict[str, Any]] = []
    for fault in faults:
        began, result = time.monotonic(), {"name": fault["name"], "promise": fault["promise"]}
        with tempfile.TemporaryDirectory(prefix="outcore-fault-") as folder:
            src = Path(folder) / "src"
            shutil.copytree(ROOT / "src", src, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
            try:
                planted(fault, src)
                by = None if args.check else tested(src, fault["tests"])
                result |= {"found": by is not None, "by": by, "seconds": round(time.monotonic() - began, 1)}
            except FaultError as e:
                result |= {"found": False, "by": None, "error": str(e)}
        good = "error" not in result if args.check else result["found"]
        results.append(result | {"good": good})
        told = result.get("error") or ("can be planted" if args.check else result["by"] or "NOT FOUND")
        print(f"{fault['name']:36} {told}", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(f"{sum(r['good'] for r in results)} of {len(results)}")
    return int(not all(r["good"] for r in results))


if __name__ == "__main__":
    sys.exit(main())
