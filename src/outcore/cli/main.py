"""``outcore COMMAND``: finds the command, and turns errors into one line and an exit status.

Exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import atexit
import importlib
import logging
import os
import pkgutil
import shutil
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import groupby

from ..errors import BudgetError, OutcoreError, UsageError, by_flags
from ..machine.gpus import leave_one
from ..machine.settings import Setting, setting, settled
from ..text import meant, shortened
from ..version import __version__
from .commands import RANKS, Command, commands, parser_of, rank_module
from .output import Result, failed, log_from, open_streams, spinner, streams
from .parser import ArgumentParser

WIDEST = 110
"""Characters of a line of help at most."""

FOR_ALL = (
    "What is settled for all of them: OUTCORE_MEMORY, OUTCORE_MODEL, OUTCORE_CACHE and OUTCORE_MONITOR (off: nobody "
    "can watch with outcore monitor), or memory, model, cache and monitor in outcore/config.toml of your folder for "
    "such files (~/.config), or the file that OUTCORE_CONFIG names."
)


def usage() -> str:
    width, columns = max(map(len, commands())), min(WIDEST, shutil.get_terminal_size().columns)
    below = " " * (width + 4)
    lines = ["usage: outcore COMMAND [OPTIONS]", "", "Run language models larger than memory, on MLX."]
    for kind, those in groupby(commands().items(), lambda item: item[1].kind):
        lines += ["", f"{kind}:"]
        for name, command in those:
            head = f"  {name:{width}}  "
            lines.append(textwrap.fill(command.help, columns, initial_indent=head, subsequent_indent=below))
    lines += ["", "outcore help COMMAND shows the options of one.", "", textwrap.fill(FOR_ALL, columns)]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None, *, alone: bool = False) -> int:
    """Run one command; returns the exit status. Nothing that a user can give ends in a traceback, unless
    ``OUTCORE_DEBUG`` is set.

    Args:
        alone: the process does nothing else.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    open_streams()
    if args[:1] == ["help"]:
        # As git has it: `outcore help info` is `outcore info --help`.
        args = ["--help"] if args[1:2] in ([], ["help"]) else [args[1], "--help"]
    name = f"outcore {args[0]}" if args and args[0] in commands() else "outcore"
    # Flags may be shortened; no other begins so.
    result = Result(sys.stdout, any(len(word) > 2 and "--json".startswith(word) for word in args))
    try:
        try:
            status = _run(args[0], args[1:], result, alone) if name != "outcore" else _without_command(args)
            result.write()
        except SystemExit:
            status = 0  # how argparse ends with its help; what is wrong is an error of ours
        sys.stdout.flush()
        return status
    except KeyboardInterrupt as e:
        # Python remembers an interrupt that passed through an extension's own PyRun_String, and would end by the
        # signal instead of with a status; running any code from a string makes it forget (pythonrun.c).
        exec("")
        return failed(name, e, result)
    except BaseException as e:
        if not isinstance(e, Exception) and type(e).__name__ != "PanicException":
            raise
        return failed(name, e, result)


def _without_command(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help"):
        print(usage(), file=sys.stdout if args else sys.stderr)
        return 0 if args else 2
    if args[0] in ("-V", "--version"):
        print(f"outcore {__version__}")
        return 0
    kind = "flag" if args[0].startswith("-") else "command"
    known = [*commands(), "help", "--help", "--version"]
    raise UsageError(f"no {kind} {shortened(args[0])!r}{meant(args[0], known)}; outcore --help lists what there is")


def _run(name: str, words: list[str], result: Result, alone: bool) -> int:
    command, parser = commands()[name], parser_of(name, everything="--help-all" in words)
    args = parser.parse_args(words)
    # What tells of no JSON prints nothing but its answer.
    as_json, quiet = getattr(args, "json", False), getattr(args, "quiet", False)
    args.result, result.wanted = result, as_json
    args.command = name
    if not command.launcher and "mlx.core" not in sys.modules:
        leave_one(os.environ)
    ranks = rank_module() if any(name in os.environ for name in RANKS) else None
    log_from(getattr(args, "log_level", None))
    filled = parser.fill(parser, args) if parser.fill is not None else {}
    filled |= _settle(command, parser, args)
    rank = ranks.as_rank(parser, args, result) if ranks is not None else nullcontext(True)
    # What ranks say of what went wrong passes through their launcher.
    with rank as speaks, streams(as_json, (quiet and not command.launcher) or not speaks, sys.stderr):
        # MLX takes a second to import or, for the first time, many. Threads that begin meanwhile leave Ctrl-C alone.
        with uninterrupted(), spinner("starting") if speaks and not quiet else nullcontext():
            if alone and command.alone is not None:
                pkgutil.resolve_name(command.alone)()
            run = _work(command, parser.run)
        # What came meanwhile is heard here: one that waits would be forgotten by `system()`.
        if "mlx.core" in sys.modules:
            with uninterrupted():
                _look_for_compiler()
            # What a command says of its peak is its own: another one may have run in this process.
            importlib.import_module("..machine.allocator", __package__).reset_peak()
        with _named(filled), by_flags(parser._option_string_actions):
            return run(args) or 0


@contextmanager
def _named(filled: Mapping[str, Setting]) -> Iterator[None]:
    """An error that is about what no flag said, but a setting or a file, is told with where that is from.

    Args:
        filled: names of flags, as in the parsed ones.
    """
    try:
        yield
    except OutcoreError as e:
        text = str(e)
        for name, found in filled.items():
            flag = "--" + name.replace("_", "-")
            if name == "memory" and isinstance(e, BudgetError):
                text += f"; that budget, {shortened(found.value)}, is from {found.source}; give --memory to use another"
            elif f"{flag} " in text or (name == "model" and found.value in text):
                text += f"; {flag} is from {found.source}"
        e.args = (text, *e.args[1:])
        raise


def _work(command: Command, run: str) -> Callable[[argparse.Namespace], int | None]:
    """What the command runs; refused where it needs an extra that is not installed."""
    try:
        return pkgutil.resolve_name(run)
    except ModuleNotFoundError as e:
        if command.extra is None or (e.name or "").startswith("outcore"):
            raise
        raise UsageError(f"this command needs {e.name}: pip install 'outcore[{command.extra}]'") from e


def _settle(command: Command, parser: ArgumentParser, args: argparse.Namespace) -> dict[str, Setting]:
    """Fill in what was not given and is settled for every command; the budget, if it is settled. Refused where it
    cannot be used, or there is no model."""
    setting("monitor")
    settled()  # what is wrong in the file is told by every command, not by some
    if getattr(args, "device", None) is not None:
        return {}  # its memory is not this machine's, nor is its published speed that of a model of ours
    log, found = logging.getLogger("outcore"), {}
    if getattr(args, "memory", "") is None and (memory := setting("memory")) is not None:
        found["memory"], args.memory = memory, memory.value
        log.info("memory %s, from %s", memory.value, memory.source)
    # What goes on from a prompt cache says of which model it is.
    named = getattr(args, "models_named", None) or (args.command == "generate" and args.prompt_cache_file is not None)
    if command.needs_model and not named and getattr(args, "model", "") is None:
        if (model := setting("model")) is None:
            parser.error("give a model: --model NAME, or OUTCORE_MODEL, or the configuration file")
        args.model = [model.value] if hasattr(args, "models_named") else model.value
        args.argv += ["--model", model.value]  # which results name as the command that they were made by
        log.info("model %s, from %s", model.value, model.source)
    return found


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C takes effect at the end: MLX's own modules, interrupted while they are made, swallow it or fail to be.

    Threads that begin meanwhile, NumPy's and MLX's, never take it from the main thread.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _look_for_compiler() -> None:
    """Have MLX look for a C++ compiler, which it does once. It calls ``system()``, which ignores Ctrl-C for the whole
    process meanwhile; one that every thread blocks is kept (Linux: kernel/signal.c, sig_ignored)."""
    import mlx.core as mx

    mx.compile(lambda x: x)(mx.zeros(()))


def entry() -> None:
    status = main(alone=True)
    if sys.argv[1:2] == ["serve"] and status in (0, 130):
        # All is closed; Python would look at every object once more, for seconds on a busy machine.
        atexit._run_exitfuncs()
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
