"""``outcore perplexity``: a model's perplexity, with the flags, data and numbers of ``mlx_lm.perplexity``.

``mlx_lm.perplexity.eval_ppl`` computes each batch in one forward pass without caches, and keeps the logits of all
tokens. The plan reserves memory for these. The perplexity equals the resident model's to the last digit.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from contextlib import redirect_stdout
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.perplexity import eval_ppl, load_data

from outcore.checkpoint.checkpoint import open_checkpoint
from outcore.checkpoint.tokenizer import load_tokenizer
from outcore.checks import not_endless, whole
from outcore.cli.engine import ProgressBar, engine_record, model_folder, print_summary, watched
from outcore.cli.flags import loading_options, model_name
from outcore.decode.loader import load_model
from outcore.engine.session import Session
from outcore.errors import BudgetError, UsageError
from outcore.machine.allocator import peak_held
from outcore.text import counted, one_line, printable

from .disk import machine
from .document import PERPLEXITY_SCHEMA, Perplexities, PerplexityRow


def run(args: argparse.Namespace) -> None:
    whole("--batch-size", args.batch_size)
    for flag, number in (("--sequence-length", args.sequence_length), ("--num-samples", args.num_samples)):
        whole(flag, number, least=-(2**31))
    if not 0 <= args.seed < 2**32:
        raise UsageError(f"--seed {args.seed}: give a number from 0 to 2**32 - 1")
    np.random.seed(args.seed)
    mx.random.seed(args.seed)
    folder = model_folder(args)
    tokenizer = load_tokenizer(folder, {"trust_remote_code": args.trust_remote_code})
    # mlx-lm prints its progress on standard output.
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
            batches = counted(found["batches"], "batch")
            print_summary([f"Data: {found['data']}, {batches} of {args.batch_size}"], session)
            args.result.record = found | engine_record(session) | _document(args, found, folder, config, session)


def _found(args: argparse.Namespace, data: mx.array, figure: tuple[float, float], seconds: float) -> dict[str, Any]:
    samples, length = data.shape
    evaluated = samples * (length - 1)  # all tokens of a sequence but the first
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
    """Returns the perplexity as ``outcore report`` reads it, without speeds and peaks."""
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
    return {"schema": PERPLEXITY_SCHEMA} | asdict(Perplexities(created, asdict(machine(folder)), (row,)))


PYTHON_TEXT = "pydoc_data.topics"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_ENDINGS = {".txt", ".text", ".md", ".rst", ".py", ".json", ".jsonl", ".csv", ".log", ".html", ".xml"}


def default_text() -> str:
    try:
        from pydoc_data.topics import topics
    except ImportError as e:
        raise UsageError("this Python has no pydoc_data, the default text; give a text with --data-path FILE") from e
    return "\n\n".join(topics[name] for name in sorted(topics))


def read_data(tokenizer: Any, data_path: str | None, num_samples: int, sequence_length: int) -> mx.array:
    """Returns token ids of shape (samples, sequence_length), int32.

    A text is cut into successive sequences, and the rest is dropped. A data set's documents are shuffled by mlx-lm.

    Args:
        data_path: a text file, a data set of the Hub (through mlx-lm's ``load_data``), or None for ``default_text``.
        num_samples: most sequences; -1 for all.
    """
    if sequence_length < 2:
        raise UsageError(f"--sequence-length {sequence_length}: give at least 2, to predict one token from another")
    if num_samples == 0 or num_samples < -1:
        raise UsageError(f"--num-samples {num_samples}: give at least 1, or -1 for all")
    path = Path(data_path or "")
    # A path that does not look like a name on the Hub is taken for a file.
    if data_path is not None and not path.is_file() and _HUB_NAME.fullmatch(data_path) and path.suffix not in _ENDINGS:
        return _hub_data(tokenizer, data_path, num_samples, sequence_length)
    try:
        text = default_text() if data_path is None else not_endless("--data-path", path).read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise UsageError(f"--data-path {data_path}: not UTF-8 at byte {e.start}; give a text in UTF-8") from e
    except OSError as e:
        raise UsageError(f"--data-path {data_path}: {e.strerror or e}") from e
    return cut(tokenizer, text, num_samples, sequence_length, data_path or PYTHON_TEXT)


def cut(tokenizer: Any, text: str, num_samples: int, sequence_length: int, name: str) -> mx.array:
    """Cuts a text into sequences. ``name``: the text's name in the error if it is too short for one."""
    ids = tokenizer.encode(text, verbose=False)  # no warning that the text is longer than the context
    samples = len(ids) // sequence_length
    if samples == 0:
        raise UsageError(
            f"{name}: has {len(ids)} tokens, fewer than one sequence of {sequence_length}; give a longer text or a "
            "smaller --sequence-length"
        )
    samples = min(samples, num_samples) if num_samples > 0 else samples
    return mx.array(ids[: samples * sequence_length]).reshape(samples, sequence_length)


def _hub_data(tokenizer: Any, name: str, num_samples: int, sequence_length: int) -> mx.array:
    try:
        return load_data(tokenizer, name, num_samples=num_samples, sequence_length=sequence_length)
    except ImportError as e:
        why = "no such file; for a data set of the Hub, run pip install datasets"
        raise UsageError(f"--data-path {name}: {why}") from e
    except IndexError as e:  # mlx-lm read past the last document; with -1 it always does
        wanted = f"{num_samples} sequences" if num_samples > 0 else "all its sequences"
        why = f"too few tokens for {wanted} of {sequence_length}; give a smaller --num-samples"
        raise UsageError(f"--data-path {name}: {why}") from e
    except Exception as e:  # the datasets package and its backends may raise anything
        raise UsageError(f"--data-path {name}: cannot load the data set: {one_line(e)}") from e


def load_for_batches(
    folder: str | Path, batch_size: int, sequence_length: int, **options: Any
) -> tuple[nn.Module, dict[str, Any]]:
    """Loads a model with memory reserved for the activations and logits of whole batches."""
    fixed: dict[str, Any] = dict.fromkeys(("context", "prompt", "prefill_step_size"), sequence_length)
    try:
        return load_model(folder, **fixed, batch=batch_size, draft="none", **options)
    except BudgetError as e:
        if e.smallest is None:
            raise
        what = f"batches of {batch_size} sequences of {sequence_length} tokens: {e}"
        raise BudgetError(f"{what}; or give a smaller --batch-size or --sequence-length", e.smallest) from e
