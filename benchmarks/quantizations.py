"""What quantization costs, and that streaming costs nothing: perplexity by number of bits, resident and streamed.

    python benchmarks/quantizations.py [MODEL ...] [--bits 8,6,4,3] [--data-path FILE] [--json FILE]

Every MODEL (a folder or Hub name) as it is, and quantized by ``mlx_lm.convert`` in groups of 64. Each of them is
measured twice, in processes of their own so that memory is their own: by mlx-lm, all in memory, and by Outcore with no
layer in memory. Both figures are ``mlx_lm.perplexity.eval_ppl``'s on the same tokens, and equal to the last digit or
the command fails.

Quantized models are computed in float32, and so is a mixture of experts: on the CPU, MLX multiplies quantized weights
with bfloat16 activations 9 times slower, and gathers unquantized experts in float32 only. Weight bytes are those of
the converted files, whose scales stay in bfloat16. Tokens per second and peak memory are those of decoding; evaluating
holds the logits of a whole batch besides, which say nothing of weights (``perplexity_peak_memory_bytes``).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx_lm.perplexity import eval_ppl
from rich.console import Console
from rich.table import Table

import outcore
from outcore.checkpoint.checkpoint import open_checkpoint
from outcore.checkpoint.find_model import resolve_model
from outcore.errors import OutcoreError
from outcore.machine.device import COMPUTE_DTYPES
from outcore.sizes import format_size
from outcore_bench.fingerprint import machine
from outcore_bench.perplexity import load_for_batches, read_data
from result_file import shown_arguments

SCHEMA = "outcore-perplexity/1"
ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared" / "models"
MODELS = ("py-llama-3m", "py-qwen35-28m", "py-qwen35moe-30m")
GROUP_SIZE = 64
PROMPT = "def read_lines(path):\n"

Result = dict[str, Any]


def resident(folder: str, dtype: str | None, settings: Result) -> Result:
    """mlx-lm's own: everything in memory."""
    model, tokenizer = mlx_lm.load(folder)
    if dtype is not None:
        model.set_dtype(COMPUTE_DTYPES[dtype])
    return _measure(model, tokenizer, settings, mlx_lm.stream_generate)


def streamed(folder: str, dtype: str | None, settings: Result) -> Result:
    """Outcore with no layer in memory."""
    _, tokenizer = mlx_lm.load(folder, lazy=True)
    batch, length = settings["batch_size"], settings["sequence_length"]
    model, _ = load_for_batches(folder, batch, length, resident=0, dtype=dtype)
    with model.outcore as session:
        result = _measure(model, tokenizer, settings, outcore.stream_generate)
        return result | {"sweeps": session.metrics.sweeps, "streamed_units": len(session.plan.streamed)}


def _measure(model: Any, tokenizer: Any, settings: Result, generate: Callable[..., Iterator[Any]]) -> Result:
    data = read_data(tokenizer, settings["data_path"], settings["num_samples"], settings["sequence_length"])
    tokenizer.eos_token_ids = set()
    mx.clear_cache()
    mx.reset_peak_memory()  # changing dtypes after loading held some weights twice
    tps = [r.generation_tps for r in generate(model, tokenizer, PROMPT, max_tokens=settings["decode_tokens"])][-1]
    # What MLX holds; freed memory that it keeps for reuse is left out, as mlx-lm lets it keep any amount.
    peak = mx.get_peak_memory()
    with contextlib.redirect_stdout(sys.stderr):
        ppl, error = eval_ppl(model, data, batch_size=settings["batch_size"])
    return {
        "ppl": ppl,
        "ppl_error": error,
        "tokens_per_second": tps,
        "peak_memory_bytes": peak,
        "perplexity_peak_memory_bytes": mx.get_peak_memory(),
    }


KINDS: dict[str, Callable[..., Result]] = {"resident": resident, "streamed": streamed}


def fresh(kind: str, folder: Path, dtype: str | None, settings: Result) -> Result:
    """One measurement in a process of its own.

    Raises:
        OutcoreError: it failed.
    """
    arguments = {"folder": str(folder), "dtype": dtype, "settings": settings}
    command = [sys.executable, str(Path(__file__)), "--child", kind, json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OutcoreError(f"{kind}: {(done.stderr.strip().splitlines() or [f'status {done.returncode}'])[-1]}")
    result: Result = json.loads(done.stdout.splitlines()[-1])
    return result


def rows(model: str, bits: Sequence[int], settings: Result) -> Iterator[Result]:
    """A model as it is and at each number of bits."""
    folder = resolve_model(model)
    checkpoint = open_checkpoint(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    experts = "moe" in str(config.get("model_type"))
    yield _row(folder, None, "float32" if experts else None, checkpoint.nbytes, settings, folder.name)
    for b in bits:
        with tempfile.TemporaryDirectory() as scratch:
            out = Path(scratch) / "model"
            with contextlib.redirect_stdout(sys.stderr):
                mlx_lm.convert(str(folder), str(out), quantize=True, q_bits=b, q_group_size=GROUP_SIZE)
            yield _row(out, b, "float32", open_checkpoint(out).nbytes, settings, folder.name)


def _row(folder: Path, bits: int | None, dtype: str | None, nbytes: int, settings: Result, name: str) -> Result:
    theirs, ours = (fresh(kind, folder, dtype, settings) for kind in ("resident", "streamed"))
    return {
        "model": name,
        "bits": bits,
        "dtype": dtype or "bfloat16",
        "ppl": theirs["ppl"],
        "ppl_error": theirs["ppl_error"],
        "tokens_per_second": theirs["tokens_per_second"],
        "weight_bytes": nbytes,
        "peak_memory_bytes": theirs["peak_memory_bytes"],
        "perplexity_peak_memory_bytes": theirs["perplexity_peak_memory_bytes"],
        "streamed_ppl": ours["ppl"],
        "streamed_tokens_per_second": ours["tokens_per_second"],
        "streamed_peak_memory_bytes": ours["peak_memory_bytes"],
        "streamed_perplexity_peak_memory_bytes": ours["perplexity_peak_memory_bytes"],
        "streamed_units": ours["streamed_units"],
        "equal": (theirs["ppl"], theirs["ppl_error"]) == (ours["ppl"], ours["ppl_error"]),
    }


def table(found: Sequence[Result]) -> Table:
    """All rows, resident beside streamed."""
    shown = Table("model", "bits", "computed in", "weights")
    for column in ("perplexity", "streamed", "tokens/s", "streamed", "peak", "streamed"):
        shown.add_column(column, justify="right")
    for r in found:
        shown.add_row(
            r["model"],
            str(r["bits"] or "bf16"),
            r["dtype"],
            format_size(r["weight_bytes"]),
            f"{r['ppl']:.3f} ± {r['ppl_error']:.3f}",
            "equal" if r["equal"] else f"{r['streamed_ppl']:.6f}",
            f"{r['tokens_per_second']:.1f}",
            f"{r['streamed_tokens_per_second']:.1f}",
            format_size(r["peak_memory_bytes"]),
            format_size(r["streamed_peak_memory_bytes"]),
        )
    return shown


def main() -> int:
    """Measure, print, write; returns 1 where a streamed figure is not the resident one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("models", nargs="*", default=[str(SHARED / name) for name in MODELS])
    parser.add_argument("--bits", default="8,6,4,3", help="Numbers of bits, besides as it is.")
    parser.add_argument("--data-path", default=str(SHARED / "eval.txt"), help="A text.")
    parser.add_argument("--num-samples", type=int, default=4, help="Sequences at most; -1 for all.")
    parser.add_argument("--sequence-length", type=int, default=256, help="Tokens.")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--decode-tokens", type=int, default=16)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(KINDS[args.child[0]](**json.loads(args.child[1]))))
        return 0
    settings = {
        name: getattr(args, name)
        for name in ("data_path", "num_samples", "sequence_length", "batch_size", "decode_tokens")
    }
    found: list[Result] = []
    with tempfile.TemporaryDirectory() as cache:
        os.environ.setdefault("OUTCORE_CACHE", cache)
        for model in args.models:
            for row in rows(model, [int(b) for b in args.bits.split(",") if b], settings):
                found.append(row)
                same = "equal" if row["equal"] else "NOT EQUAL"
                print(f"{row['model']} {row['bits'] or 'bf16'}: {row['ppl']:.3f}, {same}", file=sys.stderr)
    Console(width=None if sys.stdout.isatty() else 150).print(table(found))
    if args.json is not None:
        document = {
            "schema": SCHEMA,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            # Names only: where the files lay here is of no use elsewhere.
            "command": shlex.join(["python", "benchmarks/quantizations.py", *shown_arguments()]),
            "machine": asdict(machine(ROOT)),
            "settings": settings | {"data_path": Path(args.data_path).name, "group_size": GROUP_SIZE},
            "rows": found,
        }
        args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0 if all(r["equal"] for r in found) else 1


if __name__ == "__main__":
    sys.exit(main())
