"""``outcore COMMAND``: finds the command, and turns errors into one line and an exit status.

Exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from .. import __version__
from ..errors import UsageError
from ..text import shortened
from .failures import ended, failed, open_streams, tell

COMMANDS = {
    "batch": "answer a file of requests, many in each sweep over the weights",
    "bench": "speed and memory at each budget, beside mlx-lm and the plain way",
    "cache": "what packed copies, drafts and calibrations take: ls, rm, clear",
    "cache-prompt": "compute a prompt once, into a file that generate goes on from; mlx_lm.cache_prompt, streamed",
    "calibrate": "measure this machine: its disk, and how long a model's layers take",
    "chat": "converse with a model; earlier turns are kept, not computed again",
    "demo": "run the embedded model under a budget smaller than its weights, and check it against the resident one",
    "doctor": "check in 20 seconds whether what Outcore relies on holds on this machine",
    "generate": "answer a prompt",
    "info": "layers, sizes, and what would be resident at a given --memory; loads nothing",
    "list": "models in the Hub's cache, and what each would need here",
    "matrix": "speed over budgets, ways of reading, slots and threads: the best point, and where it falls off",
    "pack": "copy a model into the aligned layout that reads fastest",
    "plan": "what to keep in memory at a budget, how fast that will be, and speed against memory",
    "report": "one page, and Markdown, from result files of outcore bench",
    "perplexity": "how well a model foretells a text; mlx-lm's definition",
}


def usage() -> str:
    """The text of ``outcore --help``."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {what}" for name, what in COMMANDS.items()]
    return "\n".join(
        [
            "usage: outcore COMMAND [OPTIONS]",
            "",
            "Run language models larger than memory, on MLX.",
            "",
            *lines,
            "",
            "outcore COMMAND --help shows the options of one.",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. Nothing that a user can give ends in a traceback, unless
    ``OUTCORE_DEBUG`` is set."""
    args = list(sys.argv[1:] if argv is None else argv)
    open_streams()
    command = args[0] if args and args[0] in COMMANDS else None
    name = f"outcore {command}" if command is not None else "outcore"
    try:
        status = _run(command, args[1:]) if command is not None else _without_command(args)
        sys.stdout.flush()
        return status
    except SystemExit as e:
        # How argparse ends: with its help, or with what was wrong.
        return ended(name, args, e)
    except KeyboardInterrupt:
        tell("")
        tell(f"{name}: interrupted")
        # Python remembers an interrupt that passed through an extension's own PyRun_String, and would end by the
        # signal instead of with a status; running any code from a string makes it forget (pythonrun.c).
        exec("")
        return 130
    except BaseException as e:
        if not isinstance(e, Exception) and type(e).__name__ != "PanicException":
            raise
        return failed(name, args, e)


def _without_command(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help"):
        print(usage(), file=sys.stdout if args else sys.stderr)
        return 0 if args else 2
    if args[0] in ("-V", "--version"):
        print(f"outcore {__version__}")
        return 0
    raise UsageError(f"no command {shortened(args[0])!r}; choose from {', '.join(COMMANDS)}")


def _run(name: str, args: list[str]) -> int:
    with _uninterrupted():
        command = importlib.import_module(f".{name.replace('-', '_')}", __package__)
    if "mlx.core" in sys.modules:
        with _uninterrupted():
            _look_for_compiler()
    status: int | None = command.main(args)
    return status or 0


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
    sys.exit(main())
