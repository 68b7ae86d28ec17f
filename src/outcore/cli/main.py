"""``outcore COMMAND``: runs a command and turns an error into one line and an exit status.

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
from typing import TYPE_CHECKING

from ..errors import BudgetError, OutcoreError, UsageError, by_flags
from ..machine.gpus import leave_one
from ..packages import modules
from ..text import meant, shortened
from ..version import __version__
from .commands import CORE, HUB, RANKS, ArgumentParser, Command, commands, parser_of, rank_module
from .flags import check_numbers
from .output import Result, failed, log_from, open_streams, spinner, streams
from .piped import whole_prompt

if TYPE_CHECKING:
    from ..machine.settings import Setting

WIDEST = 110

FOR_ALL = (
    "Defaults for all commands: set OUTCORE_MEMORY, OUTCORE_MODEL, OUTCORE_CACHE and OUTCORE_MONITOR (off hides "
    "processes from outcore monitor), or memory, model, cache and monitor in ~/.config/outcore/config.toml (or the "
    "file that OUTCORE_CONFIG names), whose table [models] gives models short names."
)


def usage() -> str:
    width, columns = max(map(len, commands())), min(WIDEST, shutil.get_terminal_size().columns)
    below = " " * (width + 4)
    lines = ["usage: outcore COMMAND [OPTIONS]", "", "Run language models larger than memory, on MLX."]
    for kind, group in groupby(commands().items(), lambda item: item[1].kind):
        lines += ["", f"{kind}:"]
        for name, command in group:
            head = f"  {name:{width}}  "
            lines.append(textwrap.fill(command.help, columns, initial_indent=head, subsequent_indent=below))
    lines += ["", "outcore help COMMAND shows a command's options.", "", textwrap.fill(FOR_ALL, columns)]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None, *, alone: bool = False) -> int:
    """Runs one command and returns the exit status. No input ends in a traceback, unless ``OUTCORE_DEBUG`` is set.

    Args:
        alone: the process runs nothing else.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    open_streams()
    if args[:1] == ["help"]:
        # As in git: `outcore help info` is `outcore info --help`.
        args = ["--help"] if args[1:2] in ([], ["help"]) else [args[1], "--help"]
    name = f"outcore {args[0]}" if args and args[0] in commands() else "outcore"
    # --json may be abbreviated; no other flag begins with --j.
    result = Result(sys.stdout, any(len(word) > 2 and "--json".startswith(word) for word in args))
    try:
        try:
            status = _run(args[0], args[1:], result, alone) if name != "outcore" else _without_command(args)
            result.write()
        except SystemExit:
            status = 0  # argparse printed its help; wrong usage raises UsageError
        sys.stdout.flush()
        return status
    except KeyboardInterrupt as e:
        # After an interrupt inside an extension's PyRun_String, Python would exit by the signal instead of with a
        # status. Running any code from a string resets that (pythonrun.c).
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
    known = [name for name in (*commands(), "help", "--help", "--version") if name.startswith("-") == (kind == "flag")]
    for package in modules("commands").values():
        if instead := getattr(package, "INSTEAD", {}).get(args[0]):
            raise UsageError(f"no command {args[0]!r}; {instead}")
    raise UsageError(f"no {kind} {shortened(args[0])!r}{meant(args[0], known)}; outcore --help lists the commands")


def _run(name: str, words: list[str], result: Result, alone: bool) -> int:
    command, parser = commands()[name], parser_of(name, everything="--help-all" in words)
    args = parser.parse_args(words)
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
    # Ranks write errors to the launcher's own standard error.
    with rank as speaks, streams(as_json, (quiet and not command.launcher) or not speaks, sys.stderr):
        if name in CORE:
            with _with_sources(filled):
                _check(args)
        # Importing MLX takes a second, the first time much longer. Threads that it starts must not receive Ctrl-C.
        with uninterrupted(), spinner("starting") if speaks and not quiet else nullcontext():
            if alone and command.alone is not None:
                pkgutil.resolve_name(command.alone)()
            run = _work(command, parser.run)
        # A Ctrl-C that came meanwhile took effect above: `system()` would discard a pending one.
        if "mlx.core" in sys.modules:
            with uninterrupted():
                _find_compiler()
            # Another command may have run in this process before.
            importlib.import_module("..machine.allocator", __package__).reset_peak()
        with _with_sources(filled), by_flags(parser._option_string_actions):
            return run(args) or 0


def _check(args: argparse.Namespace) -> None:
    """Refuses, before MLX is imported, what needs no model to be refused."""
    check_numbers(args)
    # A prompt cache knows its model, and is compared with the one that is given.
    alone = args.ranks is None and getattr(args, "prompt_cache_file", None) is None
    if alone and isinstance(getattr(args, "model", None), str):
        from ..checkpoint.find_model import local_folder
        from ..machine.settings import short_names

        local_folder(short_names().get(args.model, args.model))
    if args.command == "generate":
        piped = args.ranks is None and "-" not in (getattr(args, "image", None) or ())
        args.prompt = whole_prompt(args.prompt, alone=piped)


@contextmanager
def _with_sources(filled: Mapping[str, Setting]) -> Iterator[None]:
    """Adds to an error about a value that was not given as a flag where the value came from.

    Args:
        filled: settings by the flag's name in the parsed arguments.
    """
    try:
        yield
    except OutcoreError as e:
        text = str(e)
        for name, found in filled.items():
            flag = "--" + name.replace("_", "-")
            if name == "memory" and isinstance(e, BudgetError):
                text += f"; the budget of {shortened(found.value)} is from {found.source}; override it with --memory"
            elif f"{flag} " in text or (name == "model" and found.value in text):
                text += f"; {flag} is from {found.source}"
        e.args = (text, *e.args[1:])
        raise


def _work(command: Command, run: str) -> Callable[[argparse.Namespace], int | None]:
    try:
        return pkgutil.resolve_name(run)
    except ModuleNotFoundError as e:
        if command.extra is None or (e.name or "").startswith("outcore"):
            raise
        raise UsageError(f"this command needs {e.name}: pip install 'outcore[{command.extra}]'") from e


def _settle(command: Command, parser: ArgumentParser, args: argparse.Namespace) -> dict[str, Setting]:
    from ..machine.settings import setting, settled, short_names

    setting("monitor")
    settled(), short_names()  # every command reports a file that cannot be used, also one that needs no setting
    if getattr(args, "device", None) is not None:
        return {}  # the settings are about this machine
    log, found = logging.getLogger("outcore"), {}
    if getattr(args, "memory", "") is None and (memory := setting("memory")) is not None:
        found["memory"], args.memory = memory, memory.value
        log.info("memory %s, from %s", memory.value, memory.source)
    # A prompt cache names its model itself.
    named = getattr(args, "models_named", None) or (args.command == "generate" and args.prompt_cache_file is not None)
    if command.needs_model and not named and getattr(args, "model", "") is None:
        if (model := setting("model")) is None:
            what = "give --model NAME (outcore list shows those that are here), or set OUTCORE_MODEL"
            parser.error(f"no model: {what}, or model in the configuration file, such as {parser.prog} {HUB}")
        args.model = [model.value] if hasattr(args, "models_named") else model.value
        args.argv += ["--model", model.value]  # for results, which quote their command line
        log.info("model %s, from %s", model.value, model.source)
    return found


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delays Ctrl-C to the end of the block: MLX's modules, interrupted during import, swallow it or stay broken.

    Threads that start in the block, NumPy's and MLX's, never receive the signal.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _find_compiler() -> None:
    """Makes MLX look for a C++ compiler now, which it does once, by ``system()``.

    That call ignores Ctrl-C in the whole process; a Ctrl-C that every thread blocks stays pending instead (Linux:
    kernel/signal.c, sig_ignored).
    """
    import mlx.core as mx

    mx.compile(lambda x: x)(mx.zeros(()))


def entry() -> None:
    status = main(alone=True)
    if sys.argv[1:2] == ["serve"] and status in (0, 130):
        # Everything is closed; Python's own shutdown visits every object, for seconds on a busy machine.
        atexit._run_exitfuncs()
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
