"""``outcore doctor``: whether what Outcore relies on holds on this machine; a line each, and a page for a report."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from .. import __version__
from ..checkpoint.find_model import resolve_model
from .console import PlainConsole
from .engine import progress_bar
from .machine_checks import examine
from .patient import Finding

VERDICTS = {True: "ok", False: "FAILED", None: "note"}


def run(args: argparse.Namespace) -> int:
    """Run the command; its exit status, 1 where a check failed."""
    model = resolve_model(args.model, args.revision) if args.model is not None else None
    facts: dict[str, Any] = {}
    began = time.perf_counter()
    with progress_bar() as bar:
        findings = examine(model, bar.count, facts)
    seconds = time.perf_counter() - began
    _show(findings)
    console = PlainConsole(highlight=False, soft_wrap=True)
    console.print()
    console.print(report(findings, seconds))
    failed = [f.name for f in findings if f.ok is False]
    console.print()
    if failed:
        console.print(f"{len(failed)} of {len(findings)} checks failed: {', '.join(failed)}. What to do stands above.")
    else:
        console.print(f"All {len(findings)} checks passed: nothing to do.")
    args.result.record = {"findings": [asdict(f) for f in findings], "failed": failed, "seconds": seconds} | facts
    return 1 if failed else 0


def _show(findings: Sequence[Finding]) -> None:
    console = PlainConsole(highlight=False, soft_wrap=True)
    for f in findings:
        console.print(f"{VERDICTS[f.ok]:6} {f.name}: {f.found}")
        if f.advice:
            console.print(f"       → {f.advice}")


def report(findings: Sequence[Finding], seconds: float) -> str:
    """A page to paste into a report, in Markdown."""
    lines = [
        f"Outcore {__version__}, doctor, {seconds:.0f} s",
        "",
        "| check | verdict | found |",
        "| --- | --- | --- |",
    ]
    for f in findings:
        text = f.found + (f" → {f.advice}" if f.advice else "")
        lines.append(f"| {f.name} | {VERDICTS[f.ok]} | {text.replace('|', chr(92) + '|')} |")
    return "\n".join(lines)
