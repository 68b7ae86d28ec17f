"""``outcore perplexity``: how well a model foretells a text. Definition, flags and figures of ``mlx_lm.perplexity``."""

from __future__ import annotations

import argparse
import sys
import time
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
from .arguments import engine_options
from .engine import engine_record, peak_memory_bytes, print_summary, progress_bar

PYTHON_TEXT = "pydoc_data.topics"


def run(args: argparse.Namespace) -> None:
    """Run the command."""
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
            print_summary(
                [f"Data: {args.data_path or PYTHON_TEXT}, {batches} batch{'es' * (batches != 1)} of {args.batch_size}"],
                session,
            )
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
            args.result.record = record | engine_record(session)
