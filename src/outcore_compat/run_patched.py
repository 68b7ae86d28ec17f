"""``python -m outcore.integrations.mlx_lm``: runs any program that uses mlx-lm with its models streamed."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outcore.errors import OutcoreError, UsageError, by_flags, flag_of
from outcore.options import IO_MODES, PRIORITIES, LoadOptions

from .mlx_lm import Patch, remove_patch
from .settings import PatchSettings

USAGE = "python -m outcore.integrations.mlx_lm [options] (-m MODULE | SCRIPT) [its arguments]"

NUMBERS = ("resident", "slots", "context", "prompt", "prefill_step_size", "cpu_streams", "batch", "threads")


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="outcore.integrations.mlx_lm",
        usage=USAGE,
        description="Runs a program with mlx-lm patched: models that are larger than the memory that it may use are "
        "streamed. Options that are not given are chosen; outcore.LoadOptions describes them.",
        epilog="Example: python -m outcore.integrations.mlx_lm --memory 4GB -m mlx_lm.chat --model owner/name",
        allow_abbrev=False,
    )
    p.add_argument("--memory", metavar="SIZE", help="bytes that its models may use together, such as 4GB or 50%%")
    for name in NUMBERS:
        p.add_argument(flag_of(name), dest=name, type=int, metavar="N")
    p.add_argument("--io", choices=IO_MODES)
    p.add_argument("--priority", choices=tuple(PRIORITIES))
    p.add_argument("--dtype", metavar="DTYPE", help="float32, bfloat16 or float16")
    p.add_argument("--draft", metavar="DRAFT", help="auto, none, ngram, self, self:BITS, or a model")
    return p


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the program as ``python`` would. Ends the process if there is none, or if a model cannot be loaded."""
    words = list(sys.argv[1:] if argv is None else argv)
    own, program = _parted(words)
    p = parser()
    given = vars(p.parse_args(own))
    if not program or program == ["-m"]:
        p.error("name a program: -m MODULE, or a script")
    if "mlx_lm.server" in program[:2] or program[:3] == ["-m", "mlx_lm", "server"]:
        p.error("mlx_lm.server: outcore serve takes its flags, and requests share passes there; use that")
    try:
        options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        with by_flags(p._option_string_actions), Patch(PatchSettings(LoadOptions(**options))):
            _run(program)
    except OutcoreError as e:
        remove_patch()
        print(f"error: {e}", file=sys.stderr)
        raise SystemExit(2 if isinstance(e, UsageError) else 1) from None


def _parted(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits Outcore's options, each with a value, from the program and its arguments."""
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] != "-m":
        at += 1 if "=" in words[at] or words[at] in ("-h", "--help") else 2
    return list(words[:at]), list(words[at:])


def _run(program: Sequence[str]) -> None:
    if program[0] != "-m":
        sys.argv = list(program)
        sys.path.insert(0, str(Path(program[0]).resolve().parent))
        runpy.run_path(program[0], run_name="__main__")
        return
    module, sys.argv = program[1], list(program[1:])
    if module.startswith("mlx_lm."):
        # Run as __main__, mlx_lm.generate would be a second module, whose functions are not patched.
        importlib.import_module(module).main()
        return
    runpy.run_module(module, run_name="__main__", alter_sys=True)
