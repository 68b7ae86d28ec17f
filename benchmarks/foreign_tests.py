"""Runs tests of other projects, from a checkout on a developer's machine, against Outcore; none of them is kept here.

    python benchmarks/foreign_tests.py mlx-lm ../mlx-lm --model outcore/demo_model [--file test_server.py]
    python benchmarks/foreign_tests.py mlx-lm ../mlx-lm --model MODEL --file test_generate.py --dtype float32
    python benchmarks/foreign_tests.py mlx-flash ../mlx-flash

mlx-lm      its tests twice, as it is and patched (``apply_patch``), so that the model is streamed; which tests pass
            has to be the same but for ``NAMED``, and every name has to be what it was when the patch is removed. Its
            tests name models of the Hub: the folder stands in for all of them. Where the installed mlx-lm asks more of
            a model provider than the tests' own has, both runs add it.
mlx-flash   those of its tests that are about its settings, with ``outcore_compat.lmstudio`` in place of its
            package; what cannot pass is listed with the reason.

Each test's outcome is printed; the exit status is 1 where one differs, or fails for no reason that is known.
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

REASONS = {
    "test_flash_peak_ram_below_2gb": "its fixture's tokenizer knows no word: an empty prompt is refused here",
    "test_stream_generate_uses_flash_path": "FlashLLM: there is no wrapper here, a streamed model is its own class",
}
"""Tests of mlx-flash's that cannot pass, and why."""

NAMED = {
    "BatchGenerator: cannot run a streamed model": "BatchGenerator is refused",
    "test_generate_with_processor": "a logits processor is not called for a token after the last",
    "test_stream_generate_speculative": "Outcore decides while it generates which tokens are drafted",
    "test_batching_stays_enabled": "its server serves one request after another",
}
"""Tests of mlx-lm's, by name or outcome, that differ with a streamed model as docs/integrations.md says."""

FILES = {"mlx-lm": ["test_server.py"], "mlx-flash": ["test_config.py", "test_integration.py"]}


def run(checkout: Path, files: list[str], settings: Mapping[str, object]) -> dict[str, str]:
    """The outcome of each test, run in a process of its own with ``foreign_plugin`` set up like this."""
    here = Path(__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        paths = [str(here), str(here.parent / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {"PYTHONPATH": os.pathsep.join(paths), "FOREIGN": json.dumps(settings)}
        environment["HF_HUB_CACHE"] = str(_hub_cache(Path(folder)))
        words = ["-q", "-p", "foreign_plugin", "-p", "no:cacheprovider", "--import-mode=importlib", "-c", os.devnull]
        tests = [str((checkout / "tests" / name).resolve()) for name in files]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *words, "--rootdir", folder, f"--junitxml={report}", *tests],
            cwd=folder,
            env=os.environ | environment,
            capture_output=True,
            text=True,
        )
        if not report.exists() or done.returncode not in (0, 1):
            raise SystemExit(done.stdout[-4000:] + done.stderr[-4000:])
        print(done.stdout[-2000:])
        return {
            f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}": _outcome(case)
            for case in ElementTree.parse(report).iter("testcase")
        }


def _hub_cache(folder: Path) -> Path:
    """One of the Hub with a model in it, of which only the names of files are looked at."""
    snapshot = folder / "hub" / "models--owner--name" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    for name in ("config.json", "model.safetensors.index.json", "tokenizer_config.json"):
        (snapshot / name).write_text("{}", encoding="utf-8")
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40, encoding="utf-8")
    return folder / "hub"


def _outcome(case: ElementTree.Element) -> str:
    for kind in ("failure", "error", "skipped"):
        if (found := case.find(kind)) is not None:
            return f"{kind}: {(found.get('message') or '').splitlines()[0][:90]}" if found.get("message") else kind
    return "passed"


def mlx_lm(args: argparse.Namespace) -> bool:
    """Whether as many pass patched as unpatched."""
    model = str(Path(args.model).resolve())
    plain = run(args.checkout, args.file, {"suite": "mlx-lm", "model": model})
    settings = {"memory": args.memory, "dtype": args.dtype}
    patched = run(args.checkout, args.file, {"suite": "mlx-lm", "model": model} | settings)
    table = Table("test", "mlx-lm", f"patched, {args.memory}")
    for name in sorted({*plain, *patched}):
        table.add_row(name, plain.get(name, "-"), patched.get(name, "-"))
    Console(width=200).print(table)
    differ = {n for n in {*plain, *patched} if (plain.get(n) == "passed") != (patched.get(n) == "passed")}
    named = {n for n in differ for words in NAMED if words in f"{n} {patched.get(n)}"}
    passed = [sum(outcome == "passed" for outcome in found.values()) for found in (plain, patched)]
    print(f"{passed[0]} of {len(plain)} pass, {passed[1]} patched")
    print(f"other outcomes: {len(differ)}, of which {len(named)} are named; not named: {sorted(differ - named)}")
    return differ == named


def mlx_flash(args: argparse.Namespace) -> bool:
    """Whether all pass but those for which there is a reason."""
    found = run(args.checkout, args.file, {"suite": "mlx-flash"})
    table = Table("test", "outcome", "why")
    for name, outcome in sorted(found.items()):
        table.add_row(name, outcome, "" if outcome == "passed" else REASONS.get(name.rpartition("::")[2], "?"))
    Console(width=200).print(table)
    print(f"{sum(o == 'passed' for o in found.values())} of {len(found)} pass")
    return all(o == "passed" or n.rpartition("::")[2] in REASONS for n, o in found.items())


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("suite", choices=FILES)
    p.add_argument("checkout", type=Path, help="a checkout of that project")
    p.add_argument("--model", help="a folder with a model that has a chat template, for mlx-lm's tests")
    p.add_argument("--memory", default="65MB", help="what it is streamed within (default: %(default)s)")
    p.add_argument(
        "--dtype", help="what it is computed in: float32 for test_generate.py, which sets that (default: its own)"
    )
    p.add_argument("--file", action="append", help="one of its tests, more than once for several")
    args = p.parse_args()
    args.file = args.file or FILES[args.suite]
    if args.suite == "mlx-lm" and args.model is None:
        p.error("--model: mlx-lm's tests need one")
    sys.exit(0 if (mlx_lm if args.suite == "mlx-lm" else mlx_flash)(args) else 1)


if __name__ == "__main__":
    main()
