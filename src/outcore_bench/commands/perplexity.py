"""``outcore perplexity``: how well a model foretells a text. Definition, flags and figures of ``mlx_lm.perplexity``."""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import redirect_stdout
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.perplexity import eval_ppl

from outcore.checkpoint.checkpoint import open_checkpoint
from outcore.checkpoint.tokenizer import load_tokenizer
from outcore.checks import whole
from outcore.cli.arguments import loading_options, model_name
from outcore.cli.engine import ProgressBar, engine_record, model_folder, print_summary, watched
from outcore.engine.session import Session
from outcore.errors import UsageError
from outcore.machine.allocator import peak_held
from outcore.text import printable

from .. import fingerprint
from ..perplexity import PYTHON_TEXT, load_for_batches, read_data
from ..report.inputs import PERPLEXITY_SCHEMA, Perplexities, PerplexityRow


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    whole("--batch-size", args.batch_size)
    for flag, number in (("--sequence-length", args.sequence_length), ("--num-samples", args.num_samples)):
        whole(flag, number, least=-(2**31))
    if not 0 <= args.seed < 2**32:
        raise UsageError(f"--seed {args.seed}: from 0 to 2**32 - 1")
    np.random.seed(args.seed)
    mx.random.seed(args.seed)
    folder = model_folder(args)
    tokenizer = load_tokenizer(folder, {"trust_remote_code": args.trust_remote_code})
    # What mlx-lm prints on the way is progress.
    with redirect_stdout(sys.stderr):
        data = read_data(tokenizer, args.data_path, args.num_samples, args.sequence_length)
    samples, length = data.shape
    loading = loading_options(args)
    with ProgressBar() as bar:
        model, config = load_for_batches(folder, min(args.batch_size, samples), length, progress=bar, **loading)
        bar.clear()
        with watched(model, args) as session:
            began = time.perf_counter()
            with redirect_stdout(sys.stderr):
                figure = eval_ppl(model, data, batch_size=args.batch_size)
            found = _found(args, data, figure, time.perf_counter() - began)
            if session.streaming is not None:
                session.streaming.drain()
            _print(found)
            batches = f"{found['batches']} batch{'es' * (found['batches'] != 1)} of {args.batch_size}"
            print_summary([f"Data: {found['data']}, {batches}"], session)
            args.result.record = found | engine_record(session) | _document(args, found, folder, config, session)


def _found(args: argparse.Namespace, data: mx.array, figure: tuple[float, float], seconds: float) -> dict[str, Any]:
    """The figure and what it is of."""
    samples, length = data.shape
    evaluated = samples * (length - 1)  # of each sequence all tokens but the first
    return {
        "perplexity": figure[0],
        "perplexity_error": figure[1],
        "seconds": round(seconds, 4),
        "model": args.model,
        "data": args.data_path or PYTHON_TEXT,
        "tokens_per_second": round(evaluated / seconds, 4) if seconds else None,
        "samples": samples,
        "sequence_length": length,
        "tokens": samples * length,
        "evaluated_tokens": evaluated,
        "batch_size": args.batch_size,
        "batches": -(-samples // args.batch_size),
    }


def _print(found: dict[str, Any]) -> None:
    """The figures, as mlx-lm prints them."""
    for line in (
        f"Model: {found['model']}",
        f"Perplexity: {found['perplexity']:.3f} ± {found['perplexity_error']:.3f}",
        f"Evaluation time: {found['seconds']:.2f} seconds",
        f"Peak memory: {peak_held() / 1e9:.2f} GB",
        f"Tokens per second: {found['tokens_per_second'] or 0:.0f}",
        "",
        "Dataset statistics:",
        f"  Total samples: {found['samples']}",
        f"  Total tokens: {found['tokens']}",
    ):
        print(printable(line))


def _document(
    args: argparse.Namespace, found: dict[str, Any], folder: Path, config: dict[str, Any], session: Session
) -> dict[str, Any]:
    """What ``outcore report`` shows. Its speeds and peaks are of generating, so those of whole batches are left out."""
    quantization, streams = config.get("quantization"), session.plan.streams
    row = PerplexityRow(
        model=model_name(args.model),
        bits=quantization.get("bits") if isinstance(quantization, dict) else None,
        dtype=args.dtype or config.get("dtype") or config.get("torch_dtype"),
        ppl_error=found["perplexity_error"],
        weight_bytes=open_checkpoint(folder).nbytes,
        **{"streamed_ppl" if streams else "ppl": found["perplexity"]},
    )
    created = datetime.now(UTC).isoformat(timespec="seconds")
    return {"schema": PERPLEXITY_SCHEMA} | asdict(Perplexities(created, asdict(fingerprint.machine(folder)), (row,)))
