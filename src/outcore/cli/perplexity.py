"""``outcore perplexity``: how well a model foretells a text. Definition, flags and figures of ``mlx_lm.perplexity``."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stdout

import mlx.core as mx
import numpy as np
from mlx_lm.perplexity import eval_ppl

from ..bench.perplexity import load_for_batches, read_data
from ..errors import UsageError
from ..model.checkpoint import resolve_model
from ..model.tokenizer import load_tokenizer
from ..options import whole
from ..runtime.session import Session
from .engine import (
    add_engine_arguments,
    add_model_argument,
    engine_options,
    engine_record,
    peak_memory_bytes,
    print_summary,
    progress_bar,
)
from .parser import Parser

PYTHON_TEXT = "pydoc_data.topics"


def setup_arg_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    parser = Parser(prog="outcore perplexity", description="Evaluate a model's perplexity on a text or a data set.")
    add_model_argument(parser)
    parser.add_argument("--batch-size", type=int, default=8, help="Sequences that share a sweep. Default: 8.")
    parser.add_argument("--sequence-length", type=int, default=512, help="Tokens of a sequence. Default: 512.")
    parser.add_argument("--num-samples", type=int, default=256, help="Sequences at most; -1 for all. Default: 256.")
    parser.add_argument(
        "--data-path",
        help="A text file in UTF-8, or a data set of the Hugging Face Hub that mlx-lm can read (needs the datasets "
        "package; mlx_lm.perplexity takes allenai/tulu-3-sft-mixture). Default: a text that comes with Python, which "
        "differs between versions of Python.",
    )
    parser.add_argument(
        "--seed", type=int, default=123, help="Seed of the order of a data set; a text keeps its own. Default: 123."
    )
    add_engine_arguments(parser)
    parser.add_argument("--json", action="store_true", help="End standard output with one line of JSON.")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    args = setup_arg_parser().parse_args(argv)
    whole("--batch-size", args.batch_size)
    for flag, number in (("--sequence-length", args.sequence_length), ("--num-samples", args.num_samples)):
        whole(flag, number, least=-(2**31))
    if not 0 <= args.seed < 2**32:
        raise UsageError(f"--seed {args.seed}: from 0 to 2**32 - 1")
    np.random.seed(args.seed)
    mx.random.seed(args.seed)
    folder = resolve_model(args.model, args.revision)
    tokenizer = load_tokenizer(folder, {"trust_remote_code": args.trust_remote_code})
    # What mlx-lm prints on the way is progress.
    with redirect_stdout(sys.stderr):
        data = read_data(tokenizer, args.data_path, args.num_samples, args.sequence_length)
    samples, length = data.shape
    batches = -(-samples // args.batch_size)
    with progress_bar() as bar:
        model, _ = load_for_batches(
            folder,
            min(args.batch_size, samples),
            args.sequence_length,
            trust_remote_code=args.trust_remote_code,
            progress=bar,
            **engine_options(args),
        )
        bar.clear()
        session: Session = model.outcore
        with session:
            began = time.perf_counter()
            with redirect_stdout(sys.stderr):
                ppl, error = eval_ppl(model, data, batch_size=args.batch_size)
            seconds = time.perf_counter() - began
            if session.streaming is not None:
                session.streaming.drain()
            evaluated = samples * (length - 1)
            peak = peak_memory_bytes()
            for line in (
                f"Model: {args.model}",
                f"Perplexity: {ppl:.3f} ± {error:.3f}",
                f"Evaluation time: {seconds:.2f} seconds",
                f"Peak memory: {peak / 1e9:.2f} GB",
                f"Tokens per second: {evaluated / seconds:.0f}",
                "",
                "Dataset statistics:",
                f"  Total samples: {samples}",
                f"  Total tokens: {data.size}",
            ):
                print(line)
            print_summary([f"Data: {args.data_path or PYTHON_TEXT}, {batches} batches of {args.batch_size}"], session)
            if args.json:
                record = {
                    "model": args.model,
                    "data": args.data_path or PYTHON_TEXT,
                    "perplexity": ppl,
                    "perplexity_error": error,
                    "seconds": round(seconds, 4),
                    "tokens_per_second": round(evaluated / seconds, 4),
                    "samples": samples,
                    "sequence_length": length,
                    "tokens": data.size,
                    "evaluated_tokens": evaluated,
                    "batch_size": args.batch_size,
                    "batches": batches,
                }
                print(json.dumps(record | engine_record(session)))
