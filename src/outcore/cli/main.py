"""``outcore COMMAND``: finds the command, and turns errors into one line and an exit status.

Exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import atexit
import importlib
import logging
import os
import shutil
import signal
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

from outcore_compat.modelfile import flags as modelfile

from .. import __version__
from ..errors import BudgetError, UsageError
from ..machine.gpus import leave_one
from ..machine.settings import Setting, setting, settled
from ..text import meant, shortened
from .failures import failed, helped, open_streams, tell, told
from .no_tokenizers import leave_out
from .output import Result, log_from, streams
from .parser import ArgumentParser
from .ranks import as_rank, find_own_model
from .spinner import spinner

COMMANDS = {
    "batch": "answer a file of requests, many in each sweep over the weights",
    "bench": "speed and memory at each budget, beside mlx-lm and the plain way",
    "cache": "what packed copies, drafts and calibrations take: ls, rm, clear",
    "cache-prompt": "compute a prompt once, into a file that generate goes on from; mlx_lm.cache_prompt, streamed",
    "calibrate": "measure this machine: its disk, and how long a model's layers take",
    "chat": "converse with a model; earlier turns are kept, not computed again",
    "completion": "what lets a shell complete commands and flags",
    "demo": "run the demo model under a budget smaller than its weights, and check it against the resident one",
    "doctor": "check in 20 seconds whether what Outcore relies on holds on this machine",
    "generate": "answer a prompt",
    "info": "layers, sizes, and what would be resident at a given --memory; loads nothing",
    "launch": "run a command on several machines, each with a share of the model's layers",
    "list": "models in the Hub's cache, and what each would need here",
    "matrix": "speed over budgets, ways of reading, slots and threads: the best point, and where it falls off",
    "monitor": "what your running Outcore processes do, as they do it",
    "pack": "copy a model into the aligned layout that reads fastest",
    "plan": "what to keep in memory at a budget, how fast that will be, and speed against memory",
    "report": "one page, and Markdown, from result files of outcore bench",
    "perplexity": "how well a model foretells a text; mlx-lm's definition",
    "serve": "answer clients of OpenAI's, Anthropic's and Ollama's APIs",
}

BENCH = ("bench", "matrix", "perplexity", "report")

ELSEWHERE = {
    "run": "outcore generate answers a prompt, outcore chat converses",
    "server": "outcore serve answers clients of OpenAI's, Anthropic's and Ollama's APIs",
    "pull": "outcore generate --model owner/name fetches a model when it is first used",
    "rm": "outcore cache rm removes what Outcore keeps; models are the Hub's (hf cache)",
    "ls": "outcore list shows models, outcore cache ls what Outcore keeps",
}
"""Commands of others, and what does that here."""


WIDEST = 110
"""Characters of a line of help at most."""


def usage() -> str:
    """The text of ``outcore --help``."""
    width = max(map(len, COMMANDS))
    columns = min(WIDEST, shutil.get_terminal_size().columns)
    below = " " * (width + 4)
    lines = [
        textwrap.fill(what, columns, initial_indent=f"  {name:{width}}  ", subsequent_indent=below)
        for name, what in COMMANDS.items()
    ]
    for_all = (
        "What is settled for all of them: OUTCORE_MEMORY, OUTCORE_MODEL, OUTCORE_CACHE and OUTCORE_MONITOR (off: "
        "nobody can watch with outcore monitor), or memory, model, cache and monitor in outcore/config.toml of your "
        "folder for such files (~/.config), or the file that OUTCORE_CONFIG names."
    )
    return "\n".join(
        [
            "usage: outcore COMMAND [OPTIONS]",
            "",
            "Run language models larger than memory, on MLX.",
            "",
            *lines,
            "",
            "outcore help COMMAND shows the options of one.",
            "",
            textwrap.fill(for_all, columns),
        ]
    )


def parser_of(command: str) -> ArgumentParser:
    """The parser of a command's flags; made without importing what it works with."""
    package = "outcore_bench" if command in BENCH else __package__
    parser: ArgumentParser = importlib.import_module(f"{package}.flags.{_module(command)}").setup_arg_parser()
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. Nothing that a user can give ends in a traceback, unless
    ``OUTCORE_DEBUG`` is set."""
    args = list(sys.argv[1:] if argv is None else argv)
    open_streams()
    if args[:1] == ["help"]:
        # As git has it: `outcore help info` is `outcore info --help`.
        args = ["--help"] if args[1:2] == ["help"] else [*args[1:2], "--help"]
    command = args[0] if args and args[0] in COMMANDS else None
    name = f"outcore {command}" if command is not None else "outcore"
    # Flags may be shortened; no other begins so.
    result = Result(sys.stdout, any(len(word) > 2 and "--json".startswith(word) for word in args))
    try:
        status = _run(command, args[1:], result) if command is not None else _without_command(args)
        result.write()
        sys.stdout.flush()
        return status
    except SystemExit:
        # How argparse ends with its help; what is wrong is an error of ours.
        return helped(name, result)
    except KeyboardInterrupt:
        tell("")
        tell(f"{name}: interrupted")
        # Python remembers an interrupt that passed through an extension's own PyRun_String, and would end by the
        # signal instead of with a status; running any code from a string makes it forget (pythonrun.c).
        exec("")
        return told(name, result, "interrupted", "KeyboardInterrupt", 130)
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
    known = [*COMMANDS, "help", "--help", "--version"]
    if args[0] in ELSEWHERE:
        raise UsageError(f"no command {args[0]!r}: {ELSEWHERE[args[0]]}; outcore --help lists what there is")
    raise UsageError(f"no {kind} {shortened(args[0])!r}{meant(args[0], known)}; outcore --help lists what there is")


def _run(name: str, words: list[str], result: Result) -> int:
    parser = parser_of(name)
    args = parser.parse_args(words)
    # What tells of no JSON prints nothing but its answer.
    as_json, quiet = getattr(args, "json", False), getattr(args, "quiet", False)
    # What ranks say of what went wrong passes through their launcher, which has them be quiet by themselves.
    silent = quiet and name != "launch"
    args.result, result.wanted = result, as_json
    args.command = name
    if name != "launch" and "mlx.core" not in sys.modules:  # a launcher gives each rank one of them
        leave_one(os.environ)
    find_own_model(args)
    log_from(getattr(args, "log_level", None))
    by_modelfile = modelfile.settle(parser, args)
    memory = _settle(parser, args) or by_modelfile.get("memory")
    with as_rank(parser, args, result) as speaks, streams(as_json, silent or not speaks, sys.stderr):
        with spinner("starting") if speaks and not quiet else nullcontext():
            with _uninterrupted():
                command = _work(name)
            # What came meanwhile is heard here: one that waits would be forgotten by `system()`.
            if "mlx.core" in sys.modules:
                with _uninterrupted():
                    _look_for_compiler()
                # What a command says of its peak is its own: another one may have run in this process.
                importlib.import_module("..machine.allocator", __package__).reset_peak()
        with _named(memory), modelfile.named(by_modelfile):
            status: int | None = command.run(args)
    return status or 0


@contextmanager
def _named(memory: Setting | None) -> Iterator[None]:
    """A budget that is refused is told with where it comes from, if that is no flag."""
    try:
        yield
    except BudgetError as e:
        if memory is not None:
            e.args = (
                f"{e}; that budget, {shortened(memory.value)}, is from {memory.source}; give --memory to use another",
            )
        raise


def _work(command: str) -> Any:
    package = "outcore_bench.commands" if command in BENCH else __package__
    return importlib.import_module(f"{package}.{_module(command)}")


def _module(command: str) -> str:
    return command.replace("-", "_")


def _settle(parser: ArgumentParser, args: argparse.Namespace) -> Setting | None:
    """Fill in what was not given and is settled for every command; the budget, if it is settled.

    Raises:
        UsageError: it cannot be used, or there is no model.
    """
    setting("monitor")
    settled()  # what is wrong in the file is told by every command, not by some
    # A device's memory is not this machine's, nor is a published device's speed that of a model of ours.
    elsewhere = getattr(args, "device", None) is not None
    budget = parser.prog == "outcore list" or any(group.title == "engine" for group in parser._action_groups)
    memory = setting("memory") if budget and not elsewhere and args.memory is None else None
    if memory is not None:
        args.memory = _taken("memory", memory)
    # What goes on from a prompt cache says of which model it is.
    named = parser.prog == "outcore generate" and args.prompt_cache_file is not None
    if parser.needs_model and not elsewhere and not named and args.model is None:
        if (found := setting("model")) is None:
            parser.error("give a model: --model NAME, or OUTCORE_MODEL, or the configuration file")
        args.model = _taken("model", found)
        args.argv += ["--model", args.model]  # which results name as the command that they were made by
    return memory


def _taken(key: str, found: Setting) -> str:
    logging.getLogger("outcore").info("%s %s, from %s", key, found.value, found.source)
    return found.value


@contextmanager
def _uninterrupted() -> Iterator[None]:
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
    """The console script."""
    if sys.argv[1:2] in (["info"], ["list"]):
        leave_out()
    status = main()
    if sys.argv[1:2] == ["serve"] and status in (0, 130):
        # All is closed; Python would look at every object once more, for seconds on a busy machine.
        atexit._run_exitfuncs()
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
