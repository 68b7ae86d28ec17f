"""The test behind every optimisation: a streamed model's logits equal mlx-lm's resident ones bit for bit.

    python benchmarks/equality.py [MODEL ...] [--bits 4,8] [--dtype float32] [--no-zoo] [--json FILE]

For every MODEL (a folder or Hub name), as it is and quantized to each of ``--bits`` by ``mlx_lm.convert``, and for a
tiny random model of every type in mlx-lm that can be constructed (tests/support/zoo.py): 0 %, 50 % and 100 % of the
layers resident, 0 % with the head streamed as well; a prompt in three chunks, in three sweeps and in one, then a token
at a time; all logits compared.
A model that this device cannot compute in its own type is run in ``--dtype`` (default float32), and the table says so.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
from mlx_lm.models.cache import make_prompt_cache
from rich.console import Console
from rich.table import Table

import _support  # noqa: F401
import zoo
from outcore import load_model
from outcore.checkpoint.find_model import resolve_model
from outcore.engine.session import Session
from outcore.machine.device import COMPUTE_DTYPES
from result_file import shown_arguments

# Some architectures of mlx-lm compress the cache in groups and take no second prompt chunk: then one chunk, one step.
CHUNKS = [[5, 6, 7, 8, 9], [1, 2, 3], [4]]
STEPS = [11, 12, 13]

# All types know these tokens; phi3small gives some of the tokens beyond them no probability at all.
TOKENS = 128


def resident_logits(
    folder: Path, chunks: list[list[int]], steps: list[int], dtype: str | None = None
) -> tuple[list[mx.array], bool]:
    """mlx-lm's own logits for the chunks and steps, and whether the model takes several chunks."""
    model, _ = mlx_lm.utils.load_model(folder)
    if dtype is not None:
        model.set_dtype(COMPUTE_DTYPES[dtype])
    try:
        return _by_sweeps(model, chunks, steps), True
    except ValueError:
        return _by_sweeps(model, chunks[:1], steps[:1]), False


def told_apart(logits: list[mx.array]) -> bool:
    """Whether all are numbers that differ by token and by place: if not, equal ones would show nothing."""
    found = mx.concatenate([a[0].astype(mx.float32) for a in logits])[:, :TOKENS]
    return bool(mx.isfinite(found).all() and min(found.std(axis=0).min(), found.std(axis=1).min()) > 1e-3)


def _by_sweeps(model: Any, chunks: list[list[int]], steps: list[int]) -> list[mx.array]:
    cache = make_prompt_cache(model)
    out = []
    for ids in [*chunks, *([s] for s in steps)]:
        out.append(model(mx.array([ids]), cache=cache))
        mx.eval(out[-1], [c.state for c in cache])
    return out


def _in_one_sweep(model: Any, chunks: list[list[int]], steps: list[int]) -> list[mx.array]:
    """The chunks share one sweep, then a sweep for each step."""
    cache = make_prompt_cache(model)
    passes = [functools.partial(model, mx.array([ids]), cache=cache) for ids in chunks]
    out = model.outcore.streaming.run_passes(passes)
    mx.eval(out, [c.state for c in cache])
    for s in steps:
        out.append(model(mx.array([[s]]), cache=cache))
        mx.eval(out[-1])
    return out


HOLDINGS = ((0, True, False), (0, False, False), (0.5, True, False), (1, True, False), (0, False, True))
"""Shares of the layers in memory, whether the head is there, and whether within the smallest budget that works."""

NONE_RESIDENT = HOLDINGS[1:2]
BRIEF = HOLDINGS[1], HOLDINGS[4]
"""Nothing resident: whole layers, one forward pass for all chunks; and in parts, a forward pass for each chunk."""


def differences(
    folder: Path, dtype: str | None = None, holdings: Sequence[tuple[float, bool, bool]] = HOLDINGS, **options: Any
) -> tuple[list[str], list[Session]]:
    """What differs from mlx-lm at 0 %, 50 % and 100 % resident, as lines; and the sessions, for what they counted.

    0 % comes three times: with the head in memory, with that streamed as well, and last of all within the smallest
    budget that works, for which layers are streamed in parts. Each of all ``holdings`` computes a prompt in both ways,
    each of fewer in one way a prompt of two chunks, and a token.
    """
    chunks, steps = (CHUNKS, STEPS) if holdings is HOLDINGS else (CHUNKS[:2], STEPS[:1])
    expected, chunked = resident_logits(folder, chunks, steps, dtype)
    if not chunked:
        chunks, steps = chunks[:1], steps[:1]
    found: list[str] = []
    if holdings is not HOLDINGS and not told_apart(expected):  # of random weights
        found.append("mlx-lm's logits are no numbers, or the same for all tokens or places")
    sessions: list[Session] = []
    layers = smallest = 0
    for share, head, least in holdings:
        model, _ = load_model(
            folder,
            draft="none",
            memory=smallest if least else "8GB",
            resident=int(layers * share),
            head_resident=head,
            # A longer prompt in chunks needs more memory in parts than in whole layers.
            **{"context": 64, "prompt": 16, "dtype": dtype} | options,
        )
        session: Session = model.outcore
        layers = len(session.size.layers)
        if not head and not least:
            smallest = session.plan.smallest_budget_bytes
        sessions.append(session)
        with session:
            ways = [("a sweep a chunk", _by_sweeps)]
            if session.streaming is not None and not session.streaming.evaluates:
                ways.append(("one sweep", _in_one_sweep))
            if holdings is not HOLDINGS:
                ways = ways[:1] if least or share else ways[-1:]
            for how, run in ways:
                got = run(model, chunks, steps)
                for i, (a, b) in enumerate(zip(got, expected, strict=True)):
                    if not mx.array_equal(a, b, equal_nan=True).item():
                        worst = mx.abs(a.astype(mx.float32) - b.astype(mx.float32)).max().item()
                        parts = ", in parts" if session.plan.split else ""
                        what = f"{share:.0%} resident{'' if head else ', head streamed'}{parts}, {how}, pass {i}"
                        found.append(f"{what}: off by up to {worst}")
    return found, sessions


@dataclass
class Result:
    """One model's comparison.

    Attributes:
        streamed: layers streamed at 0 % resident; ``parts``: in how many parts within the smallest budget.
        misses: units that were not read ahead, over all runs.
        error: what kept the model from being run; else None.
    """

    model: str
    variant: str
    streamed: int = 0
    parts: int = 0
    misses: int = 0
    notes: tuple[str, ...] = ()
    differences: tuple[str, ...] = ()
    error: str | None = None

    @property
    def equal(self) -> bool:
        return self.error is None and not self.differences


def compare(name: str, variant: str, folder: Path, dtype: str | None = None) -> Result:
    """``differences`` as a ``Result``; what a model raises is its error."""
    try:
        found, sessions = differences(folder, dtype)
    except Exception as e:  # a table with a failed row says more than none
        return Result(name, variant, error=f"{type(e).__name__}: {e}")
    misses = sum(s.metrics.misses for s in sessions)
    streamed, parts = len(sessions[0].plan.streamed), len(sessions[-1].plan.parts)
    return Result(name, variant, streamed, parts, misses, sessions[0].notes, tuple(found))


def trained(model: str, bits: list[int], dtype: str) -> Iterator[Result]:
    """A model as it is, and quantized."""
    folder = resolve_model(model)
    name = Path(model).name
    as_is = compare(name, "as it is", folder)
    yield compare(name, f"as it is, {dtype}", folder, dtype) if as_is.error is not None else as_is
    for b in bits:
        with tempfile.TemporaryDirectory() as scratch:
            out = Path(scratch) / "model"
            with contextlib.redirect_stdout(sys.stderr):
                mlx_lm.convert(str(folder), str(out), quantize=True, q_bits=b, q_group_size=64)
            yield compare(name, f"{b} bit, {dtype}", out, dtype)


def tiny(model_type: str) -> Result:
    """A tiny random model of one of mlx-lm's types."""
    with tempfile.TemporaryDirectory() as scratch:
        return compare(model_type, "tiny", zoo.save_checkpoint(model_type, Path(scratch) / "model"))


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare streamed with resident logits, bit for bit.")
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--bits", default="4,8", help="quantize the models to these bits too (default: 4,8)")
    parser.add_argument("--dtype", default="float32", choices=COMPUTE_DTYPES, help="(default: float32)")
    parser.add_argument("--no-zoo", action="store_true", help="leave the tiny models out")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    bits = [int(b) for b in args.bits.split(",") if b]
    results: list[Result] = []

    def keep(result: Result) -> None:
        results.append(result)
        print(f"{result.model} ({result.variant}): {'equal' if result.equal else 'NOT EQUAL'}", file=sys.stderr)

    with tempfile.TemporaryDirectory() as cache:
        os.environ.setdefault("OUTCORE_CACHE", cache)
        for model in args.models:
            for result in trained(model, bits, args.dtype):
                keep(result)
        for model_type in [] if args.no_zoo else zoo.RUNNABLE:
            keep(tiny(model_type))

    table = Table("model", "variant", "streamed", "parts", "misses", "logits")
    for r in results:
        if r.variant != "tiny" or not r.equal or not r.streamed:
            why = "equal" if r.equal else r.error or "; ".join(r.differences)
            table.add_row(r.model, r.variant, str(r.streamed), str(r.parts), str(r.misses), "; ".join([why, *r.notes]))
    console = Console()
    console.print(table)
    types = [r for r in results if r.variant == "tiny"]
    if types:
        console.print(
            f"{sum(r.equal for r in types)} of {len(types)} tiny models of mlx-lm's types equal, "
            f"{sum(r.streamed > 0 for r in types)} of them streamed. "
            f"Not run on the CPU: {', '.join(sorted(zoo.NOT_ON_CPU))}. "
            f"Not constructible: {', '.join(sorted(zoo.NOT_CONSTRUCTIBLE))}."
        )
    if args.json is not None:
        versions = {name: version(name) for name in ("mlx", "mlx-lm", "outcore")}
        shown = shown_arguments()
        command = ["benchmarks/equality.py", *shown]
        document = {"versions": versions, "command": command, "results": [asdict(r) for r in results]}
        args.json.write_text(json.dumps(document, indent=1))
    return 0 if all(r.equal for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
