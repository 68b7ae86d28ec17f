"""``outcore perplexity``: how well a model foretells a text. Definition, flags and figures of ``mlx_lm.perplexity``."""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.perplexity import eval_ppl

from outcore.checkpoint.checkpoint import open_checkpoint
from outcore.checkpoint.tokenizer import load_tokenizer
from outcore.checks import whole
from outcore.cli.arguments import engine_options, model_name
from outcore.cli.engine import engine_record, peak_memory_bytes, print_summary, progress_bar, watched
from outcore.cli.model_folder import model_folder
from outcore.engine.session import Session
from outcore.errors import UsageError
from outcore.text import printable

from .. import fingerprint
from ..perplexity import load_for_batches, read_data
from ..report.inputs import PERPLEXITY_SCHEMA, PerplexityRow

PYTHON_TEXT = "pydoc_data.topics"


@dataclass(frozen=True)
class Evaluation:
    """A text's perplexity.

    Attributes:
        error: its standard error.
        samples, length: sequences of so many tokens.
        batch_size: sequences at a time.
    """

    perplexity: float
    error: float
    seconds: float
    samples: int
    length: int
    batch_size: int

    @property
    def batches(self) -> int:
        return -(-self.samples // self.batch_size)

    @property
    def tokens(self) -> int:
        return self.samples * self.length

    @property
    def evaluated(self) -> int:
        """Tokens that were foretold: of each sequence all but the first."""
        return self.samples * (self.length - 1)

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "perplexity": self.perplexity,
            "perplexity_error": self.error,
            "seconds": round(self.seconds, 4),
            "tokens_per_second": round(self.evaluated / self.seconds, 4),
            "samples": self.samples,
            "sequence_length": self.length,
            "tokens": self.tokens,
            "evaluated_tokens": self.evaluated,
            "batch_size": self.batch_size,
            "batches": self.batches,
        }


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
    with progress_bar() as bar:
        model, config = load_for_batches(
            folder,
            min(args.batch_size, data.shape[0]),
            args.sequence_length,
            trust_remote_code=args.trust_remote_code,
            progress=bar,
            **engine_options(args),
        )
        bar.clear()
        with watched(model, args) as session:
            found = _evaluate(model, session, data, args.batch_size)
            for line in _figures(args.model, found):
                print(printable(line))
            text = args.data_path or PYTHON_TEXT
            batches = f"{found.batches} batch{'es' * (found.batches != 1)} of {args.batch_size}"
            print_summary([f"Data: {text}, {batches}"], session)
            record = {"model": args.model, "data": text} | found.record() | engine_record(session)
            args.result.record = record | _document(folder, _row(folder, config, args, found, session))


def _evaluate(model: nn.Module, session: Session, data: mx.array, batch_size: int) -> Evaluation:
    began = time.perf_counter()
    with redirect_stdout(sys.stderr):
        ppl, error = eval_ppl(model, data, batch_size=batch_size)
    seconds = time.perf_counter() - began
    if session.streaming is not None:
        session.streaming.drain()
    return Evaluation(ppl, error, seconds, data.shape[0], data.shape[1], batch_size)


def _figures(model: str, found: Evaluation) -> list[str]:
    """As mlx-lm prints them."""
    return [
        f"Model: {model}",
        f"Perplexity: {found.perplexity:.3f} ± {found.error:.3f}",
        f"Evaluation time: {found.seconds:.2f} seconds",
        f"Peak memory: {peak_memory_bytes() / 1e9:.2f} GB",
        f"Tokens per second: {found.evaluated / found.seconds:.0f}",
        "",
        "Dataset statistics:",
        f"  Total samples: {found.samples}",
        f"  Total tokens: {found.tokens}",
    ]


def _row(
    folder: Path, config: dict[str, Any], args: argparse.Namespace, found: Evaluation, session: Session
) -> PerplexityRow:
    """What ``outcore report`` shows. Its speeds and peaks are of generating, so those of whole batches are left out."""
    quantization = config.get("quantization")
    streams = session.plan.streams
    return PerplexityRow(
        model=model_name(args.model),
        bits=quantization.get("bits") if isinstance(quantization, dict) else None,
        dtype=args.dtype or config.get("dtype") or config.get("torch_dtype"),
        ppl=None if streams else found.perplexity,
        ppl_error=found.error,
        weight_bytes=open_checkpoint(folder).nbytes,
        streamed_ppl=found.perplexity if streams else None,
    )


def _document(folder: Path, row: PerplexityRow) -> dict[str, Any]:
    created = datetime.now(UTC).isoformat(timespec="seconds")
    return {
        "schema": PERPLEXITY_SCHEMA,
        "created": created,
        "machine": asdict(fingerprint.machine(folder)),
        "rows": [asdict(row)],
    }
