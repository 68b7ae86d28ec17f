"""Routed experts read one by one, against mlx-lm's resident model: equal bit for bit, with any number of slots.

    python benchmarks/expert_equality.py [MODEL ...] [--dtype bfloat16 --prompt 600] [--json FILE]

A tiny random model of every type in mlx-lm that has switches of experts, in float32 and quantized to 4 bit, with two
slots a layer and with a third of the experts; and each MODEL (a folder) in float32, 8 bit and 4 bit with 10, 25, 50 and
100 % of the experts. A prompt that goes over all experts, single tokens, a few at once, a second prompt, and tokens
again; all logits compared. On a GPU, MODELs alone, in the dtype that people use, with a prompt of any length: there
mlx-lm's own model is called several times, as its answers differ from run to run, and its experts' weights are laid row
by row first, without which MLX computes wrong numbers (``is_stacked`` in outcore/modules/switches.py).
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

import _support  # noqa: F401
import zoo
from outcore import OutcoreError, load_model
from outcore.modules.switches import is_stacked
from result_file import write_result

PASSES = (40, *[1] * 12, 3, 24, *[1] * 12)
FEW = (20, *[1] * 6, 3, 12, *[1] * 6)
SHARES = (0.1, 0.25, 0.5, 1.0)


@dataclass(frozen=True)
class Row:
    """One model with so many slots a layer; ``equal`` is None where it could not be run, ``why`` says why;
    ``answers``: different ones that mlx-lm gave, one of which ours is."""

    model: str
    variant: str
    experts: int
    slots: int
    equal: bool | None
    used: int = 0
    read: int = 0
    why: str = ""
    answers: int = 1


def logits(model: Any, passes: tuple[int, ...], ids: list[int]) -> npt.NDArray[np.float32]:
    cache, found, at = make_prompt_cache(model), [], 0
    for n in passes:
        out = model(mx.array(ids[at : at + n])[None], cache=cache)
        found.append(np.array(out.astype(mx.float32))[0])
        at += n
    return np.concatenate(found)


def tokens(count: int, vocabulary: int) -> list[int]:
    """Any, the same ones always."""
    return [(7 * i * i + 3 * i + 1) % min(vocabulary - 2, 4000) + 1 for i in range(count)]


def rows(
    name: str, variant: str, folder: Path, dtype: str | None, slots: list[float], prompt: int = 0, tries: int = 1
) -> Iterator[Row]:
    """A checkpoint with each of these numbers of slots a layer, or shares of its experts."""
    theirs, config = mlx_lm.utils.load_model(folder)
    if dtype is not None:
        theirs.set_dtype(getattr(mx, dtype))
    for module in theirs.modules():
        if is_stacked(module):
            module.update(tree_map(mx.contiguous, module.parameters()))
    # A quantized one's first dimension is as well that of its experts.
    stacked = [
        m for s in theirs.modules() if isinstance(s, SwitchGLU | SwitchMLP) for m in s.modules() if "weight" in m
    ]
    experts = max(m.weight.shape[0] for m in stacked)
    passes = (prompt, *[1] * 40) if prompt else FEW if experts < 8 else PASSES
    ids = tokens(sum(passes), int((config.get("text_config") or config).get("vocab_size") or config["vocab_size"]))
    expected: list[npt.NDArray[np.float32]] = []
    try:
        for _ in range(tries):
            answer = logits(theirs, passes, ids)
            if not any(np.array_equal(answer, e, equal_nan=True) for e in expected):
                expected.append(answer)
    except ValueError as e:
        yield Row(name, variant, experts, 0, None, why=f"mlx-lm itself: {e}")
        return
    del theirs
    for share in slots:
        count = int(share) if share > 1 else max(1, round(share * experts))
        try:
            model, _ = load_model(folder, memory="2GB", experts=count, context=256 + prompt, dtype=dtype, govern=False)
        except OutcoreError as e:
            yield Row(name, variant, experts, count, None, why=str(e))
            continue
        with model.outcore as session:
            ours = logits(model, passes, ids)
            equal = any(np.array_equal(ours, e, equal_nan=True) for e in expected)
            m = session.metrics
            yield Row(name, variant, experts, count, equal, m.experts_used, m.experts_read, answers=len(expected))


def tiny(model_type: str) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as scratch:
        for variant, quantize in (("float32", None), ("4 bit", {"bits": 4, "group_size": 32})):
            folder = zoo.save_checkpoint(model_type, Path(scratch) / variant[:1], quantize=quantize)
            yield from rows(model_type, variant, folder, "float32" if quantize else None, [2, 1 / 3])


def trained(folder: Path, dtype: str, prompt: int, quantized: list[int], tries: int) -> Iterator[Row]:
    yield from rows(folder.name, dtype, folder, dtype, list(SHARES), prompt, tries)
    for bits in quantized:
        with tempfile.TemporaryDirectory() as scratch:
            out = Path(scratch) / "model"
            with contextlib.redirect_stdout(sys.stderr):
                mlx_lm.convert(str(folder), str(out), quantize=True, q_bits=bits, q_group_size=64)
            yield from rows(folder.name, f"{bits} bit", out, dtype, list(SHARES), prompt, tries)


def with_switches() -> Iterator[str]:
    """Types of models that have them here."""
    for model_type in zoo.RUNNABLE:
        if any(isinstance(m, SwitchGLU | SwitchMLP) for m in zoo.build(model_type).modules()):
            yield model_type


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path, metavar="MODEL")
    parser.add_argument("--dtype", default="float32", help="of MODELs, and of their activations (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=0, help="tokens of a prompt; 40 more follow one by one")
    parser.add_argument("--tries", type=int, default=1, help="runs of mlx-lm's own model (default: %(default)s)")
    parser.add_argument("--bits", type=int, nargs="*", default=[8, 4], help="that MODELs are quantized to as well")
    parser.add_argument("--no-zoo", action="store_true", help="leave the tiny models out")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    found: list[Row] = []
    for row in (
        *(r for folder in args.models for r in trained(folder, args.dtype, args.prompt, args.bits, args.tries)),
        *(r for t in (() if args.no_zoo else with_switches()) for r in tiny(t)),
    ):
        found.append(row)
        print(row, file=sys.stderr, flush=True)
    types = {r.model for r in found}
    differ = [r for r in found if r.equal is False]
    left_out = {r.model: r.why for r in found if r.equal is None}
    for r in found:
        how = {True: "equal", False: "NOT EQUAL", None: f"not run: {r.why}"}[r.equal]
        print(f"{r.model} ({r.variant}), {r.slots} of {r.experts} slots: {how}; {r.read} of {r.used} uses read")
    print(
        f"{len(types) - len(left_out)} of {len(types)} models equal wherever they were run, {len(differ)} rows are not"
    )
    write_result(
        args.json, "expert_equality", args.models[0] if args.models else Path(), rows=[asdict(r) for r in found]
    )
    return bool(differ)


if __name__ == "__main__":
    sys.exit(main())
