"""Routed experts read one by one whose layers have arrays by expert in memory, against mlx-lm's resident model.

    python benchmarks/expert_scales.py [--cases NAME ...] [--slots N ...] [--tries N] [--json FILE]

Of a small random mixture of experts: nvfp4 weights with a global scale for each expert, which MLX multiplies with on a
GPU only, and mlx-lm's adapters: LoRA by its default keys beside nvfp4, 4-bit and whole weights, and weights that are
replaced as a whole. A prompt, single tokens, a few at once, a second prompt and tokens again, then a greedy answer; all
logits and tokens compared, for two texts. mlx-lm's own model is called several times, as on a GPU its answers may
differ from run to run: ours hold if they are one of these, or as near to one as these are to each other. For a measure,
"wrong arrays" is how far logits move if each expert gets its neighbour's scale, or nothing of the adapter.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
import mlx_lm.utils
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache

import _support  # noqa: F401
import zoo
from adapters import FULL, LORA, save_adapter
from outcore import OutcoreError, load_model
from outcore.modules.switches import is_stacked
from result_file import write_result

EXPERTS, USED, WIDTH = 64, 4, 256
PASSES = (17, 1, 1, 1, 3, 17, 1, 1, 48, 1)
ANSWER = 16
NVFP4 = {"group_size": 16, "bits": 4, "mode": "nvfp4", "global_scale": True}

CASES: dict[str, tuple[dict[str, Any] | None, dict[str, Any] | None]] = {
    "nvfp4, global scales": (NVFP4, None),
    "nvfp4, global scales, LoRA": (NVFP4, {"kind": LORA}),
    "4 bit, LoRA": ({"group_size": 64, "bits": 4}, {"kind": LORA}),
    "whole weights, LoRA": (None, {"kind": LORA}),
    "whole weights, replaced": (None, {"kind": FULL, "keys": ["switch_mlp.gate_proj"]}),
}
"""How weights are quantized, and the adapter."""

Answer = tuple[npt.NDArray[np.float32], list[int]]
"""Logits of all passes, and the tokens of a greedy answer."""


@dataclass(frozen=True)
class Row:
    """A case with so many slots a layer (0: layers are streamed whole).

    Attributes:
        equal: bits and tokens are those of one of mlx-lm's answers; None: mlx-lm cannot run it.
        tokens: the greedy answers are. ``why``: what was raised instead.
        apart: largest difference of a logit to the nearest of mlx-lm's answers; ``theirs``: between two of these;
            ``wrong``: to the same model with other scales, or without the adapter.
    """

    case: str
    slots: int
    equal: bool | None
    tokens: bool = False
    apart: float = 0.0
    theirs: float = 0.0
    wrong: float = 0.0
    read: int = 0
    why: str = ""

    @property
    def holds(self) -> bool:
        """Whether it says what mlx-lm does."""
        return bool(self.equal) or (self.tokens and self.apart <= self.theirs)


def made(folder: Path, quantize: dict[str, Any] | None, dtype: mx.Dtype) -> Path:
    """A checkpoint, whose experts' global scales differ by up to seven times."""
    whole = zoo.CONFIGS["qwen3_5_moe"]
    text = whole["text_config"] | {
        "num_experts": EXPERTS, "num_experts_per_tok": USED, "hidden_size": WIDTH, "moe_intermediate_size": WIDTH,
        "mlp_only_layers": [],
    }  # fmt: skip
    with mock.patch.dict(zoo.CONFIGS, {"qwen3_5_moe": whole | {"text_config": text}}):
        zoo.save_checkpoint("qwen3_5_moe", folder, quantize=quantize, dtype=dtype)
    file = folder / "model.safetensors"
    weights: dict[str, mx.array] = mx.load(str(file))  # type: ignore[assignment]
    factors = mx.array([(1 + e * 5 % 7) / 4 for e in range(EXPERTS)], mx.float32)
    weights = {name: a * factors if name.endswith("global_scale") else a for name, a in weights.items()}
    mx.eval(weights)
    mx.save_safetensors(str(file), weights, {"format": "mlx"})
    return folder


def answer(model: Any, seed: int) -> Answer:
    ids = [(7 * i * i + (3 + seed) * i + 1) % 60 + 1 for i in range(sum(PASSES))]
    cache, found, at = make_prompt_cache(model), [], 0
    for n in PASSES:
        out = model(mx.array(ids[at : at + n])[None], cache=cache)
        found.append(np.array(out.astype(mx.float32))[0])
        at += n
    tokens = [int(found[-1][-1].argmax())]
    while len(tokens) < ANSWER:
        tokens.append(int(model(mx.array([tokens[-1:]]), cache=cache)[0, -1].argmax().item()))
    return np.concatenate(found), tokens


def texts(model: Any) -> list[Answer]:
    return [answer(model, seed) for seed in (0, 1)]


def resident(folder: Path, adapter: Path | None) -> Any:
    model = mlx_lm.utils.load_model(folder)[0]
    if adapter is not None:
        model = mlx_lm.utils.load_adapters(model, str(adapter)).eval()
    for module in model.modules():
        if is_stacked(module):
            module.update(tree_map(mx.contiguous, module.parameters()))
    return model


def wrong(folder: Path, adapter: Path | None) -> list[Answer]:
    """What another expert's scales give, or no adapter."""
    model = resident(folder, None)
    if adapter is None:
        for module in model.modules():
            if is_stacked(module):
                module.global_scale = mx.roll(module.global_scale, 1)
    return texts(model)


def apart(ones: Sequence[Answer], others: Sequence[Answer]) -> float:
    return max(float(np.abs(a - b).max()) for (a, _), (b, _) in zip(ones, others, strict=True))


def same(ones: Sequence[Answer], others: Sequence[Answer]) -> bool:
    return all(np.array_equal(a, b) and m == n for (a, m), (b, n) in zip(ones, others, strict=True))


def rows(case: str, scratch: Path, slots: Sequence[int], tries: int, dtype: mx.Dtype) -> Iterator[Row]:
    quantize, kind = CASES[case]
    folder = made(scratch / "model", quantize, dtype)
    adapter = None if kind is None else save_adapter(folder, scratch / "adapter", **kind)
    try:
        theirs = resident(folder, adapter)
        answers = [texts(theirs) for _ in range(tries)]
    except (ValueError, RuntimeError) as e:
        yield Row(case, 0, None, why=f"mlx-lm itself: {e}")
        return
    del theirs
    between = max(apart(a, b) for a in answers for b in answers)
    off = apart(wrong(folder, adapter), answers[0])
    path = None if adapter is None else str(adapter)
    for n in slots:
        ring: dict[str, Any] = {"experts": n} if n else {"experts": 0, "resident": 0}
        try:
            model, _ = load_model(folder, memory="2GB", context=256, govern=False, adapter_path=path, **ring)
            ours = texts(model)
        except (OutcoreError, ValueError, RuntimeError) as e:
            yield Row(case, n, False, why=f"ours: {e}")
            continue
        with model.outcore as session:
            yield Row(
                case,
                n,
                equal=any(same(ours, a) for a in answers),
                tokens=any([t for _, t in ours] == [t for _, t in a] for a in answers),
                apart=min(apart(ours, a) for a in answers),
                theirs=between,
                wrong=off,
                read=session.metrics.experts_read,
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES, metavar="NAME", help="those alone")
    parser.add_argument(
        "--slots", type=int, nargs="+", default=[3, 24, 0], help="of each layer; 0: layers are streamed whole"
    )
    parser.add_argument("--tries", type=int, default=2, help="runs of mlx-lm's own model (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    dtype = mx.bfloat16 if on_gpu else mx.float32
    found: list[Row] = []
    began = time.perf_counter()
    for case in args.cases:
        with tempfile.TemporaryDirectory() as scratch:
            for row in rows(case, Path(scratch), args.slots, args.tries, dtype):
                found.append(row)
                how = f"not run: {row.why}"
                if not row.why:
                    how = "equal" if row.equal else "as near as mlx-lm to itself" if row.holds else "NOT EQUAL"
                    how += (
                        f"; tokens {'equal' if row.tokens else 'differ'}, logits {row.apart:.3g} apart (mlx-lm's own "
                    )
                    how += f"{row.theirs:.3g}, wrong arrays {row.wrong:.3g}); {row.read} experts read"
                slots = f"{row.slots} of {EXPERTS} slots" if row.slots else "whole layers"
                print(f"{case}, {slots}: {how} [{time.perf_counter() - began:.0f} s]", flush=True)
    bad = [r for r in found if r.equal is not None and not r.holds]
    print(f"{sum(r.holds for r in found)} hold, {len(bad)} do not, {sum(r.equal is None for r in found)} not run")
    write_result(args.json, "expert_scales", Path(), rows=[asdict(r) for r in found])
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
