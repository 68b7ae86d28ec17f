"""Is drafted text the text without drafts, byte by byte, and what does a pass for each drafted token cost?

    python benchmarks/exact_drafts.py MODEL --json FILE    # on a GPU within 90 seconds

MODEL is quantized to 4 bits in bf16 if it is not quantized yet (``--bits 0``: taken as it is); a tiny dense model of
random weights in bf16 comes first. Nothing is resident, and the reader is limited (``--rate``), so that the disk is the
limit. Each draft is loaded once; its text is written with a pass for each drafted token (``apart``) and with one pass
for all (``together``), in turns. Then four texts at a time are written with ``exact_batch`` and without. Also printed:
what the check at load says of this device, by shape, and how long it took. Results are written as they come.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.convert import convert
from mlx_lm.utils import load_config, load_tokenizer

import _support  # noqa: F401
import outcore
import zoo
from limited_reader import limit_reads
from outcore.checkpoint.find_model import resolve_model
from outcore.checks import parse_size
from outcore.decode import one_text, rounding
from outcore.decode.preparation import prepare
from outcore.decode.request import Request
from outcore.decode.scheduler import Scheduler
from outcore.machine.device import device_kind
from result_file import write_result
from stand_ins import TokensOnly

TEXT = "".join(
    f"def add_{name}(first, second):\n    return first + second\n\n\n"
    for name in ("int", "float", "text", "list", "set")
)
TEXTS = 4


def models_of(args: argparse.Namespace, folder: Path) -> Iterator[tuple[str, Path, Any, list[int]]]:
    """Yields a name, a folder, a tokenizer and a prompt that repeats itself."""
    yield "tiny qwen3", zoo.save_checkpoint("qwen3", folder / "tiny", dtype=mx.bfloat16), TokensOnly(), [5, 9, 4, 7] * 8
    if args.model is not None:
        model = resolve_model(args.model)
        if args.bits and "quantization" not in load_config(model):
            convert(str(model), str(folder / "quantized"), quantize=True, q_bits=args.bits, dtype="bfloat16")
            model = folder / "quantized"
        tokenizer = load_tokenizer(model)
        yield model.name, model, tokenizer, tokenizer.encode(TEXT)


def checked(folder: Path) -> dict[str, Any]:
    """What the check says of this device; on the CPU, where no load runs it, too."""
    profile, before, began = prepare(folder, dtype=None).profile, set(rounding._tried), time.perf_counter()
    differ = rounding.rows_differ(profile)
    tried = {str(key): found for key, found in rounding._tried.items() if key not in before}
    return {"rows_differ": differ, "seconds": round(time.perf_counter() - began, 3), "tried": tried}


def written(model: Any, tokenizer: Any, prompt: list[int], tokens: int, apart: bool) -> dict[str, Any]:
    """One text; ``apart``: each drafted token has a pass of its own."""
    session, found, first = model.outcore, list[int](), 0.0
    one_text.__dict__["on_cpu"] = lambda: False  # the CPU, too, may verify in one pass here
    session.rows_differ = apart
    session.metrics.reset()
    for r in outcore.stream_generate(model, tokenizer, prompt, max_tokens=tokens):
        found.append(r.token)
        if len(found) == 1:
            first, sweeps = time.perf_counter(), session.metrics.sweeps
    seconds = (time.perf_counter() - first) / max(1, len(found) - 1)
    passes = max(1, session.metrics.sweeps - sweeps)
    return {"tokens": found, "token_s": round(seconds, 4), "tokens_a_pass": round((len(found) - 1) / passes, 2)}


def together(model: Any, prompt: list[int], tokens: int) -> dict[str, Any]:
    """Texts at a time, of which each has a prompt one token shorter than the one before."""
    engine, found, began = Scheduler(model, draft_tokens=0), dict[int, list[int]](), time.perf_counter()
    for i in range(TEXTS):
        engine.add(Request(i, prompt[i:], tokens))
    while engine.running or engine.waiting:
        for token in engine.step().tokens:
            found.setdefault(token.uid, []).append(token.token)
        engine.remove([uid for uid, text in found.items() if len(text) >= tokens])
    engine.close()
    return {"texts": found, "token_s": round((time.perf_counter() - began) / tokens / TEXTS, 4)}


def bytes_of(tokenizer: Any, tokens: list[int]) -> bytes:
    return repr(tokens).encode() if isinstance(tokenizer, TokensOnly) else str(tokenizer.decode(tokens)).encode()


def measured(name: str, folder: Path, tokenizer: Any, prompt: list[int], args: argparse.Namespace) -> Iterator[Any]:
    """Yields a row for each draft and way to verify it, then for texts at a time."""
    options = {"resident": 0, "context": len(prompt) + args.tokens + 40, "prompt": len(prompt), "govern": False}
    plain: list[int] = []
    for draft in args.drafts.split(","):
        began = time.perf_counter()
        model, _ = outcore.load_model(folder, draft=draft, **options)
        loaded = round(time.perf_counter() - began, 1)
        with model.outcore as session:
            written(model, tokenizer, prompt, 4, True)  # kernels are compiled, or loaded
            for apart in (True, False) if draft != "none" else (True,):
                row = written(model, tokenizer, prompt, args.tokens, apart)
                found = row.pop("tokens")
                plain = plain or found
                row["equal"] = bytes_of(tokenizer, found) == bytes_of(tokenizer, plain)
                row |= {"peak": mx.get_peak_memory(), "planned": session.plan.peak_bytes, "load_s": loaded}
                way = "plain" if draft == "none" else "apart" if apart else "together"
                yield {"model": name, "draft": draft, "way": way, **row}
    for exact in (True, False):
        model, _ = outcore.load_model(folder, draft="none", exact_batch=exact, **options)
        with model.outcore:
            alone = [written(model, tokenizer, prompt[i:], args.tokens, True)["tokens"] for i in range(TEXTS)]
            row = together(model, prompt, args.tokens)
            texts = row.pop("texts")
            row["equal"] = all(bytes_of(tokenizer, texts[i]) == bytes_of(tokenizer, alone[i]) for i in range(TEXTS))
            yield {"model": name, "draft": "none", "way": "exact batch" if exact else "batch", **row}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--drafts", default="none,ngram,self:2")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rate", type=parse_size, default=parse_size("100MB"), help="bytes a second")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    limit_reads(args.rate)
    checks, rows = {}, list[Any]()
    with tempfile.TemporaryDirectory() as folder:
        for name, where, tokenizer, prompt in models_of(args, Path(folder)):
            checks[name] = checked(where)
            print(f"{name}: {checks[name]}", flush=True)
            for row in measured(name, where, tokenizer, prompt, args):
                rows.append(row)
                print(row, flush=True)
                write_result(args.json, "exact_drafts", where, device=device_kind(), checks=checks, rows=rows)
    exact = [row for row in rows if row["way"] in ("apart", "exact batch")]
    print(f"{sum(row['equal'] for row in exact)} of {len(exact)} texts that were computed apart are those without")
    return not all(row["equal"] for row in exact)


if __name__ == "__main__":
    sys.exit(main())
