"""Streams the models of mlx-lm's own programs: replaces mlx-lm's functions wherever they have been imported.

    from outcore_compat.mlx_lm import apply_patch, remove_patch

    apply_patch(memory="4GB")
    import mlx_lm
    model, tokenizer = mlx_lm.load("mlx-community/Qwen3.5-9B-MLX-6bit")  # any program, unchanged
    remove_patch()

Or, without a changed line: ``python -m outcore.integrations.mlx_lm --memory 4GB -m mlx_lm.chat ...``.
"""

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

from .patched_calls import PAIRS
from .settings import PatchSettings, applied, applied_lock
from .swapped_names import SwappedNames

__all__ = ["Patch", "apply_patch", "remove_patch"]

_names = SwappedNames(PAIRS, except_in="outcore")


class Patch:
    """An applied patch. ``remove``, or the end of its ``with`` block, ends it."""

    def __init__(self, settings: PatchSettings) -> None:
        self._settings = settings
        with applied_lock:
            applied.append(settings)
            _names.put()

    def remove(self) -> None:
        """Ends this patch. Restores mlx-lm if there is no other. Safe to call twice."""
        with applied_lock:
            if self._settings in applied:
                applied.remove(self._settings)
                _give_back()

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def apply_patch(**options: Any) -> Patch:
    """Has ``mlx_lm.load`` stream models that are larger than memory, and mlx-lm's functions run them.

    Every name in a loaded module that is mlx-lm's ``load``, ``generate``, ``stream_generate``, ``batch_generate`` or
    ``BatchGenerator`` becomes Outcore's; programs that are imported later get these, too. Models
    that are already loaded stay as they are; those loaded under the patch stay streamed after it ends.

    Patches nest: the last one counts until it is removed.

    Args:
        options: fields of ``outcore.LoadOptions`` for every model that is loaded; all models share ``memory``.

    Returns:
        The patch, whose ``remove`` ends this patch alone; it is also a context manager.

    Raises:
        UsageError: an option is invalid.
    """
    return Patch(PatchSettings(LoadOptions(**options)))


def remove_patch() -> None:
    """Ends all patches: restores every name, also in modules that were imported meanwhile. Safe to call twice."""
    with applied_lock:
        if applied:
            applied.clear()
            _give_back()


def _give_back() -> None:
    if not applied:
        _names.give_back()


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
    named, *rest = program[1:] if program[0] == "-m" else program
    if ".".join([Path(named).name, *rest[: named.endswith("mlx_lm")]]) == "mlx_lm.server":
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
