"""Runs llama.cpp's server tests, from a checkout on a developer's machine, against ``outcore serve``; none is here.

    python benchmarks/foreign_llama.py ../llama.cpp --model demo-model/outcore_demo_model

It takes ``requests`` and ``filelock``, which the tests import. The server that each test asks for is started with our
flags (``foreign_llama_plugin.py``). A test that fails is either bound to the words or the counts of tokens of
llama.cpp's own test model, or needs a model that is fetched from the Hub, which is told apart by ``BOUND``; or for one
of ``REASONS``; or it is a fault. The exit status is 1 if there are faults, or less than 90 % of those that are not
bound pass.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from foreign_llama_reasons import BOUND, REASONS
from result_file import write_result

NAMES = ("chat_completion", "completion", "compat_anthropic", "compat_oai_responses", "security", "tool_call")

LEAST = 0.9


def run(checkout: Path, names: list[str], settings: Mapping[str, object]) -> dict[str, dict[str, str]]:
    """By file and test, why it failed; empty: it passed. Slow tests, which fetch models, are not among them."""
    tests = checkout.resolve() / "tools" / "server" / "tests"
    here = Path(__file__).resolve().parent
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        paths = [str(here), str(here.parent / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            "PYTHONPATH": os.pathsep.join(paths),
            "FOREIGN": json.dumps({"tests": str(tests), **settings}),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        words = ["-q", "-p", "foreign_llama_plugin", "-p", "no:cacheprovider", "-m", "not slow", "--timeout", "180"]
        words += ["-c", "pytest.ini", "--tb=short", f"--junitxml={report}"]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *words, *(f"unit/test_{name}.py" for name in names)],
            cwd=tests,
            env=os.environ | environment,
            capture_output=True,
            text=True,
        )
        if not report.exists() or done.returncode not in (0, 1):
            raise SystemExit(done.stdout[-4000:] + done.stderr[-4000:])
        found: dict[str, dict[str, str]] = {name: {} for name in names}
        for case in ElementTree.parse(report).iter("testcase"):
            file = case.get("classname", "").rpartition(".")[2].removeprefix("test_")
            if case.find("skipped") is None:
                found[file][str(case.get("name"))] = _failure(case)
        return found


def _failure(case: ElementTree.Element) -> str:
    failure = case.find("failure") if case.find("failure") is not None else case.find("error")
    return "" if failure is None else " ".join((failure.get("message") or "it failed").split())[:160]


def reason(file: str, test: str, known: Mapping[str, str]) -> str | None:
    """Why a test cannot pass: by its file and its name, or the beginning of that and of its parameters."""
    name = f"{file}::{test}"
    return next((why for key, why in known.items() if name == key or ("[" in key and name.startswith(key))), None)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("checkout", type=Path, help="a checkout of llama.cpp")
    p.add_argument("--model", type=Path, required=True, help="a folder with a model that has a chat template")
    p.add_argument("--memory", default="40MB", help="what it is streamed within (default: %(default)s)")
    p.add_argument("--file", action="append", choices=NAMES, help="one of the files, more than once for several")
    p.add_argument("--json", type=Path, help="write the result here")
    args = p.parse_args()
    model = str(args.model.resolve())
    settings = {"model": model, "memory": args.memory, "more": ["--dtype", "float32"]}
    found = run(args.checkout, args.file or list(NAMES), settings)
    faults, counts = report(found)
    write_result(args.json, "foreign_llama", args.model, files=counts, faults=faults)
    passed, free = (sum(c[key] for c in counts.values()) for key in ("passed", "not_bound"))
    print(
        f"{passed} of {free} that are not bound to the model pass ({passed / max(free, 1):.1%}); {len(faults)} faults"
    )
    sys.exit(1 if faults or passed < LEAST * free else 0)


def report(found: Mapping[str, Mapping[str, str]]) -> tuple[list[str], dict[str, dict[str, int]]]:
    """Print what failed and why; the faults, and each file's counts."""
    table, faults, counts = Table("test", "outcome", "why"), [], {}
    for file, tests in found.items():
        count = {"tests": len(tests), "passed": 0, "bound": 0, "for_a_reason": 0, "not_bound": 0}
        for name, failure in tests.items():
            bound, why = reason(file, name, BOUND), reason(file, name, REASONS)
            # One that is bound and passes by chance says nothing.
            kind = "bound" if bound else "passed" if not failure else "for_a_reason"
            count[kind] += 1
            if failure and not bound and not why:
                faults.append(f"{file}::{name}")
            if failure:
                table.add_row(f"{file}::{name[:70]}", failure[:60], f"bound: {bound}" if bound else why or "A FAULT")
        counts[file] = count | {"not_bound": len(tests) - count["bound"]}
    Console(width=220).print(table)
    for file, count in counts.items():
        print(f"{file}: {count}")
    return faults, counts


if __name__ == "__main__":
    main()
