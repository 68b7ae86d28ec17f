"""``outcore bench``: speed and memory of a model, ours at each budget beside mlx-lm's and the plain way's."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ..bench.document import Document
from ..bench.jobs import CACHES, Settings
from ..bench.modes import AUTO, MODES
from ..bench.runner import Runner, shown_command
from ..bench.table import WIDTH, show
from ..errors import OutcoreError, UsageError
from ..model.checkpoint import resolve_model
from ..options import IO_MODES
from ..sizes import parse_size
from ..system.device import COMPUTE_DTYPES
from .engine import plain_console, progress_bar
from .parser import Parser


def setup_arg_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    parser = Parser(
        prog="outcore bench",
        description="Measure a model's speed and memory, each row in a process of its own: "
        + "; ".join(f"{m.name}, {m.what}" for m in MODES.values())
        + ".",
    )
    parser.add_argument("model", help="A local folder, or a model of the Hugging Face Hub.")
    parser.add_argument("--revision", help="A branch, tag or commit on the Hub.")
    parser.add_argument("--trust-remote-code", action="store_true", help="Run code that comes with the model.")
    rows = parser.add_argument_group("rows (lists are separated by commas)")
    rows.add_argument(
        "--memory", default="", metavar="SIZES", help=f"A row for each budget, such as 2GB,50%%; {AUTO}: what is free."
    )
    rows.add_argument(
        "--resident",
        default="",
        metavar="LIST",
        help="A row for each number or share of layers kept in memory, such as 0,25%%,100%%. Default, without "
        "--memory: 0%%,50%%,100%%.",
    )
    rows.add_argument("--modes", default="", metavar="LIST", help=f"Default: {','.join(MODES)}.")
    rows.add_argument("--io", default=AUTO, metavar="LIST", help=f"Ways to read: {', '.join(IO_MODES)}.")
    rows.add_argument(
        "--batch", "--batch-size", "-b", default="1", metavar="LIST", help="Sequences decoded together. Default: 1."
    )
    run = parser.add_argument_group("each run")
    length = run.add_mutually_exclusive_group()
    length.add_argument("--tokens", type=int, default=16, help="Decoded and timed. Default: %(default)s.")
    length.add_argument(
        "--generation-tokens",
        "-g",
        type=int,
        metavar="N",
        help="The same as mlx_lm.benchmark counts them: with the first one, which the prompt's time includes.",
    )
    run.add_argument("--prompt-tokens", "-p", type=int, default=32, help="Default: %(default)s.")
    run.add_argument("--repeats", "--num-trials", "-n", type=int, default=3, help="Default: %(default)s.")
    run.add_argument("--warmup", type=int, default=1, help="Runs before, not counted. Default: %(default)s.")
    run.add_argument(
        "--delay", type=int, default=0, metavar="S", help="Seconds to wait before each repeat. Default: 0."
    )
    run.add_argument("--prefill-step-size", type=int, help="Prompt tokens at a time. Default: 2048, or what fits.")
    run.add_argument("--quantize-activations", "-qa", action="store_true", help="Where the quantization allows it.")
    run.add_argument("--pipeline", action="store_true", help=argparse.SUPPRESS)
    run.add_argument(
        "--cache",
        default="cold",
        help=f"Page cache, where reads go through it: {' or '.join(CACHES)}. Cold: files are dropped from it before "
        "each token. Default: %(default)s.",
    )
    run.add_argument("--dtype", help=f"Compute in {', '.join(COMPUTE_DTYPES)}. Default: as the checkpoint says.")
    run.add_argument("--cpu-streams", type=int, metavar="N", help="CPU device: cores that a linear layer uses.")
    run.add_argument("--slots", type=int, metavar="N", help="Layers in the ring, at least 2. Default: 3, or 2.")
    run.add_argument("--threads", type=int, metavar="N", help="Reads in flight at once. Default: 4, or 8.")
    run.add_argument("--limit", metavar="SIZE", help="Run rows in a control group of that limit (Linux, as root).")
    run.add_argument("--limit-modes", default="", metavar="LIST", help="Modes that --limit is for. Default: all.")
    run.add_argument("--timeline", action="store_true", help="Keep the reads and computations of one decoded token.")
    parser.add_argument("--output", "-o", type=Path, metavar="FILE", help="Write the JSON document there.")
    parser.add_argument("--json", action="store_true", help="End standard output with one line of JSON.")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command.

    Raises:
        OutcoreError: nothing could be measured.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    args = setup_arg_parser().parse_args(argv)
    chosen = settings(args)
    output: Path | None = args.output
    if output is not None and not output.absolute().parent.is_dir():
        raise UsageError(f"--output {output}: no such folder")
    given = Path(args.model)
    # A model of the Hub is known by its name, one on this machine by its folder's.
    name = given.resolve().name if given.exists() else args.model
    names = {args.model: name} | ({str(output): output.name} if output is not None else {})
    with progress_bar() as bar:
        runner = Runner(
            resolve_model(args.model, args.revision),
            name,
            chosen,
            shlex.join(["outcore", "bench", *shown_command(argv, names)]),
            progress=bar.count,
            on_row=_writer(output),
        )
        document = runner.run()
    show(document, plain_console(width=None if sys.stdout.isatty() else WIDTH))
    if args.json:
        print(document.json())
    if all(row.error is not None for row in document.rows):
        raise OutcoreError(f"no row could be measured: {document.rows[0].label}: {document.rows[0].error}")


def settings(args: argparse.Namespace) -> Settings:
    """The flags, checked.

    Raises:
        UsageError: one of them cannot be used.
    """
    try:
        batch = tuple(int(n) for n in _list(args.batch))
    except ValueError:
        raise UsageError(f"--batch {args.batch}: give whole numbers, separated by commas") from None
    if args.pipeline:
        raise UsageError("--pipeline: is for several machines, and outcore bench measures one; leave it out")
    generated: int | None = args.generation_tokens
    if generated is not None and generated < 2:
        raise UsageError(f"--generation-tokens {generated}: at least 2, as decoding is timed from the second one on")
    return Settings(
        modes=_list(args.modes),
        memory=_list(args.memory),
        resident=_list(args.resident),
        io=_list(args.io) or (AUTO,),
        cache=args.cache,
        batch=batch or (1,),
        tokens=args.tokens if generated is None else generated - 1,
        prompt_tokens=args.prompt_tokens,
        repeats=args.repeats,
        warmup=args.warmup,
        delay=args.delay,
        prefill_step_size=args.prefill_step_size,
        quantize_activations=args.quantize_activations,
        trust_remote_code=args.trust_remote_code,
        dtype=args.dtype,
        cpu_streams=args.cpu_streams,
        slots=args.slots,
        threads=args.threads,
        limit=parse_size(args.limit, flag="--limit") if args.limit is not None else None,
        limit_modes=_list(args.limit_modes),
        timeline=args.timeline,
    )


def _list(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def _writer(output: Path | None) -> Callable[[Document], None]:
    """Writes the document after each row, so that a run that is cut off has not been for nothing."""

    def write(document: Document) -> None:
        if output is not None:
            try:
                document.write(output)
            except OSError as e:
                raise OutcoreError(f"--output {output}: cannot be written: {e.strerror}") from e

    return write
