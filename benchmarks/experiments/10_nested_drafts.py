"""A throw-away: a 4-bit model's own high bits as its draft, and only the low bits streamed. What does it give?

    mlx_lm.convert --hf-path MODEL --mlx-path q4 -q --q-bits 4 --q-group-size 64 --dtype float32
    python benchmarks/experiments/10_nested_drafts.py text q4 TEXT --high 2 --whole 6 --window 8
    python benchmarks/experiments/10_nested_drafts.py kernel --json FILE

``text``: held-out pieces of TEXT, greedy. The low bits of all layers but the first ``whole`` are read from a file
around the page cache while the layers before are computed; start it in a cgroup with a limited disk. Caches are mended
after each verification by a pass over weights that stay in memory, which is counted. ``kernel``: on a CUDA device, how
fast codes are put together.
"""

from __future__ import annotations

import argparse
import mmap
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import make_prompt_cache

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import _support  # noqa: F401
from outcore.modules.cache_rollback import Snapshot
from result_file import write_result

BLOCK = 4096
STARTS = (4000, 60_000, 120_000, 200_000)

Words = npt.NDArray[np.uint32]

HEADER = """
__device__ inline unsigned s2(unsigned x) {
  x = (x | (x << 8)) & 0x00FF00FFu; x = (x | (x << 4)) & 0x0F0F0F0Fu; return (x | (x << 2)) & 0x33333333u; }
__device__ inline unsigned s3(unsigned x) {
  x = (x & 0xFFFu) | ((x & 0xFFF000u) << 4); x = (x & 0x003F003Fu) | ((x & 0x0FC00FC0u) << 2);
  return (x & 0x07070707u) | ((x & 0x38383838u) << 1); }
__device__ inline unsigned s1(unsigned x) {
  x = (x | (x << 12)) & 0x000F000Fu; x = (x | (x << 6)) & 0x03030303u; return (x | (x << 3)) & 0x11111111u; }
"""
INDEX = "auto i = cooperative_groups::this_grid().thread_rank(); if (i >= n[0]) return;\n"
KERNELS = {
    2: INDEX
    + """unsigned h = hi[i], l = lo[i];
out[2 * i] = (s2(h & 0xFFFFu) << 2) | s2(l & 0xFFFFu); out[2 * i + 1] = (s2(h >> 16) << 2) | s2(l >> 16);""",
    1: INDEX
    + """unsigned a = hi[3 * i], b = hi[3 * i + 1], c = hi[3 * i + 2], l = lo[i];
out[4 * i] = (s3(a & 0xFFFFFFu) << 1) | s1(l & 0xFFu);
out[4 * i + 1] = (s3((a >> 24) | ((b & 0xFFFFu) << 8)) << 1) | s1((l >> 8) & 0xFFu);
out[4 * i + 2] = (s3((b >> 16) | ((c & 0xFFu) << 16)) << 1) | s1((l >> 16) & 0xFFu);
out[4 * i + 3] = (s3(c >> 8) << 1) | s1(l >> 24);""",
}
"""By the number of low bits: 16 codes, or 32, of one thread."""


def codes_of(words: Words) -> npt.NDArray[np.uint8]:
    """4-bit codes as MLX packs them, eight in a word."""
    return np.stack([(words >> (4 * i)) & 15 for i in range(8)], -1).astype(np.uint8).reshape(*words.shape[:-1], -1)


def packed(codes: npt.NDArray[Any], bits: int) -> Words:
    """Codes of so many bits as MLX packs them, 32 in as many words as they have bits."""
    rows = codes.reshape(-1, 32).astype(np.uint64)
    words = np.zeros((len(rows), bits + 1), np.uint64)
    for i in range(32):
        word, at = divmod(i * bits, 32)
        wide = rows[:, i] << np.uint64(at)
        words[:, word] |= wide & np.uint64(2**32 - 1)
        words[:, word + 1] |= wide >> np.uint64(32)
    return words[:, :bits].astype(np.uint32).reshape(*codes.shape[:-1], codes.shape[-1] * bits // 32)


def spread(x: mx.array, bits: int) -> mx.array:
    """Eight neighbouring fields of so many bits, each in four bits of a word."""
    steps: dict[int, tuple[tuple[int, int, int], ...]] = {
        1: ((0xF, 0xF0, 12), (0x00030003, 0x000C000C, 6), (0x01010101, 0x02020202, 3)),
        2: ((0xFF, 0xFF00, 8), (0x000F000F, 0x00F000F0, 4), (0x03030303, 0x0C0C0C0C, 2)),
        3: ((0xFFF, 0xFFF000, 4), (0x003F003F, 0x0FC00FC0, 2), (0x07070707, 0x38383838, 1)),
    }
    for low, high, shift in steps[bits]:
        x = (x & mx.array(low, mx.uint32)) | ((x & mx.array(high, mx.uint32)) << shift)
    return x


def joined(high: mx.array, low: mx.array, low_bits: int) -> mx.array:
    """The words of 4-bit codes from those of their high and low bits."""
    half, byte = mx.array(0xFFFF, mx.uint32), mx.array(0xFF, mx.uint32)
    if low_bits == 2:
        parts = [(high & half, low & half), (high >> 16, low >> 16)]
    else:
        a, b, c = (high.reshape(*high.shape[:-1], -1, 3)[..., i] for i in range(3))
        parts = [
            (a & mx.array(0xFFFFFF, mx.uint32), low & byte),
            ((a >> 24) | ((b & half) << 8), (low >> 8) & byte),
            ((b >> 16) | ((c & byte) << 16), (low >> 16) & byte),
            (c >> 8, low >> 24),
        ]
    words = [(spread(h, 4 - low_bits) << low_bits) | spread(x, low_bits) for h, x in parts]
    out = mx.stack(words, -1)
    return out.reshape(*out.shape[:-2], -1)


class Streamed:
    """Mixed in before a layer's class: its low bits are waited for, put to the high ones, and gone after the call."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arrive, leave = self.__dict__["_nested"]
        arrive()
        out = super().__call__(*args, **kwargs)  # type: ignore[misc]
        mx.eval(out)
        leave()
        return out


class Low:
    """The low bits of layers, in a file that a thread reads again and again, two layers ahead."""

    def __init__(self, path: Path, layers: Sequence[Sequence[Words]]) -> None:
        self._ahead: queue.Queue[mmap.mmap] = queue.Queue(2)
        self._extents: list[tuple[int, int]] = []
        with path.open("wb") as file:
            for words in layers:
                data = b"".join(w.tobytes() for w in words)
                data += bytes(-len(data) % BLOCK)
                self._extents.append((file.tell(), len(data)))
                file.write(data)
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while self._extents:
            for offset, size in self._extents:
                buffer, done = mmap.mmap(-1, size), 0
                while done < size:
                    done += os.preadv(self._fd, [memoryview(buffer)[done : done + (64 << 10)]], offset + done)
                self._ahead.put(buffer)

    def next(self, like: Sequence[Words]) -> list[mx.array]:
        """The words of the next layer."""
        buffer, at, found = self._ahead.get(), 0, []
        for words in like:
            found.append(mx.array(np.frombuffer(buffer, np.uint32, words.size, at).reshape(words.shape)))
            at += words.nbytes
        return found


def quantized(layer: nn.Module) -> dict[str, Any]:
    return {k: m for k, m in layer.named_modules() if isinstance(m, nn.QuantizedLinear)}


def nest(full: Any, draft: Any, target: Any, high: int, whole: int, path: Path) -> tuple[float, float]:
    """Give ``draft`` the high bits of ``full``'s layers and ``target`` the low ones from disk, but for the first
    ``whole``. Returns the shares of the layers' bytes that are resident, and that are streamed."""
    low_bits, everything, resident = 4 - high, 0, 0
    nested: list[tuple[Any, list[Words], list[mx.array], list[Any]]] = []
    for n, (f, d, t) in enumerate(zip(full.layers, draft.layers, target.layers, strict=True)):
        words: list[Words] = []
        highs: list[mx.array] = []
        modules = list(quantized(t).values())
        for mine, theirs in zip(quantized(f).values(), quantized(d).values(), strict=True):
            scales = mine.scales.nbytes + mine.biases.nbytes
            everything += mine.weight.nbytes + scales
            resident += (mine.weight.nbytes if n < whole else mine.weight.nbytes * high // 4) + scales
            if n < whole:
                continue
            codes = codes_of(np.asarray(mine.weight))
            theirs.bits, theirs.weight = high, mx.array(packed(codes >> low_bits, high))
            theirs.scales = mine.scales * 2**low_bits
            theirs.biases = mine.biases + mine.scales * ((2**low_bits - 1) / 2)
            words.append(packed(codes & (2**low_bits - 1), low_bits))
            highs.append(theirs.weight)
            assert mx.array_equal(joined(theirs.weight, mx.array(words[-1]), low_bits), mine.weight)
        if n >= whole:
            nested.append((t, words, highs, modules))
    low = Low(path, [words for _, words, _, _ in nested])
    for layer, words, highs, modules in nested:
        arrive, leave = _turn(low, words, highs, modules, low_bits)
        leave()
        layer.__class__ = type("Nested", (Streamed, type(layer)), {})
        layer.__dict__["_nested"] = (arrive, leave)
    streamed = sum(w.nbytes for _, words, _, _ in nested for w in words)
    return resident / everything, streamed / everything


def _turn(
    low: Low, words: list[Words], highs: list[mx.array], modules: list[Any], low_bits: int
) -> tuple[Callable[[], None], Callable[[], None]]:
    def arrive() -> None:
        for module, high, mine in zip(modules, highs, low.next(words), strict=True):
            module.weight = joined(high, mine, low_bits)

    def leave() -> None:
        for module in modules:
            module.weight = mx.zeros((0,), mx.uint32)

    return arrive, leave


def passed(model: Any, tokens: list[int], cache: list[Any]) -> list[int]:
    """What the model would say after each of these tokens."""
    said = mx.argmax(model(mx.array([tokens]), cache=cache)[0], -1)
    mx.eval(said, [c.state for c in cache])
    return cast(list[int], said.tolist())


def text(args: argparse.Namespace) -> dict[str, Any]:
    models = [mlx_lm.load(str(args.model)) for _ in range(3)]
    (full, tokenizer, *_), (draft, *_), (target, *_) = models
    resident, streamed = nest(full, draft, target, args.high, args.whole, args.low)
    raw = args.text.read_text()
    made, sweeps, seconds, same = 0, 0, 0.0, True
    for start in STARTS:
        ids = tokenizer.encode(raw[start : start + 1500])[:256]
        cache = make_prompt_cache(full)
        want = passed(full, ids, cache)[-1:]
        while len(want) < args.tokens:
            want += passed(full, want[-1:], cache)
        held, drafts = make_prompt_cache(full), make_prompt_cache(draft)
        passed(full, ids, held), passed(draft, ids, drafts)
        out, began = want[:1], time.perf_counter()
        while len(out) < args.tokens:
            before, guesses = Snapshot(drafts), out[-1:]
            for _ in range(args.window):
                guesses += passed(draft, guesses[-1:], drafts)
            before.restore()
            kept = Snapshot(held)
            said, right = passed(target, guesses, held), 0
            sweeps += 1
            while right < args.window and said[right] == guesses[right + 1]:
                right += 1
            kept.restore()
            passed(full, guesses[: right + 1], held), passed(draft, guesses[: right + 1], drafts)
            out += said[: right + 1]
        seconds += time.perf_counter() - began
        made, same = made + len(out) - 1, same and out[: args.tokens] == want
    return {
        "high": args.high, "whole": args.whole, "window": args.window, "resident_share": resident,
        "streamed_share": streamed, "tps": made / seconds, "tokens_a_sweep": made / sweeps, "equal": same,
    }  # fmt: skip


def kernel(low_bits: int, count: int) -> dict[str, Any]:
    per = 16 if low_bits == 2 else 32
    made: Any = mx.fast.cuda_kernel(
        name=f"joined_{low_bits}", input_names=["hi", "lo", "n"], output_names=["out"], source=KERNELS[low_bits],
        header=HEADER,
    )  # fmt: skip
    codes = np.random.default_rng(0).integers(0, 16, min(count, 1 << 22)).astype(np.uint8)
    planes = (codes, 4), (codes >> low_bits, 4 - low_bits), (codes & (2**low_bits - 1), low_bits)
    words, high, low = (mx.array(np.tile(packed(c, b), count // codes.size)) for c, b in planes)
    n, best = mx.array([count // per], mx.uint32), float("inf")
    for _ in range(20):
        mx.eval(words, high, low, n)
        mx.synchronize()
        began = time.perf_counter()
        (out,) = made(
            inputs=[high, low, n], output_shapes=[words.shape], output_dtypes=[mx.uint32], grid=(count // per, 1, 1),
            threadgroup=(256, 1, 1),
        )  # fmt: skip
        mx.eval(out)
        best = min(best, time.perf_counter() - began)
    equal = mx.array_equal(out, words).item()
    return {"low_bits": low_bits, "codes": count, "equal": equal, "s": best, "gbps": words.nbytes / best / 1e9}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["text", "kernel"])
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("text", type=Path, nargs="?")
    parser.add_argument("--high", type=int, choices=[2, 3], default=2, help="bits that stay in memory")
    parser.add_argument("--whole", type=int, default=0, help="layers of which all bits do")
    parser.add_argument("--window", type=int, default=8, help="tokens guessed for a sweep")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--low", type=Path, default=Path("low-bits.bin"), help="file to write the low bits to")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = [text(args)] if args.what == "text" else [kernel(b, n) for b in (2, 1) for n in (4096 * 12_288, 1 << 30)]
    for row in rows:
        print(row, flush=True)
    write_result(args.json, "nested_drafts", args.model or Path.cwd(), rows=rows)


if __name__ == "__main__":
    main()
