"""Times a model's layers in memory: its own forward pass on random weights.

Layers of a kind share random weights, and tables lose most rows, so any architecture fits into memory for one layer of
each kind. The model is left unchanged. Also: speed of the device without a model.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from statistics import median
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from outcore.engine.model_profile import ModelProfile
from outcore.engine.streamed_layers import SLICE_STEP, Table
from outcore.errors import CalibrationError
from outcore.machine.allocator import Needs, clear_cache, limits
from outcore.machine.device import on_cpu
from outcore.machine.memory import last_resort
from outcore.modules.hooks import arrays_in, put, swap
from outcore.modules.layers import Parameter
from outcore.modules.split_linear import split_rows
from outcore.plan.machine_profile import TOKENS
from outcore.sizes import format_size
from outcore_packs.codings import EXPONENTS, SplitDecoder

# Timings of each kind of layer for a number of tokens, where there is time.
SAMPLES = 6

# Seconds after which no larger number of tokens is begun; and seconds of compiling a number's GPU kernels (24 to 62 s
# on an H200) after which it is not measured.
COMPUTE_S, COMPILE_S = 12.0, 20.0

# Random numbers drawn for a weight; larger weights repeat them.
BLOCK = 1 << 20

Progress = Callable[[str, int, int], None]
# Seconds of single calls, by kind of layer.
Seconds = dict[str, list[float]]


class _Enough(Exception):
    """Ends a forward pass once enough layers were timed."""


@dataclass
class TimedPass:
    """Seconds of each layer, before the first layer, and of the whole pass."""

    layers: Seconds = field(default_factory=lambda: defaultdict(list))
    prelude: float = 0.0
    seconds: float = 0.0


def times_of(
    made: Rig, sync_s: float, *, budget_s: float = COMPUTE_S, progress: Progress = lambda *_: None
) -> dict[str, dict[int, float]]:
    """Returns seconds of one pass, by kind of layer (and the rest of the model) and number of tokens.

    Layers are evaluated one by one.

    Args:
        sync_s: of waiting for one layer, which is subtracted.
        budget_s: most seconds, without compiling; numbers of tokens that do not fit are left out.
    """
    size, clock = made.profile.size, made.clock
    kinds = {layer.kind for layer in size.layers}
    found: dict[str, dict[int, float]] = {kind: {} for kind in (*sorted(kinds), size.rest_kind)}
    left, took = budget_s, 0.0
    for i, n in enumerate(TOKENS):
        progress("measuring the layers", i, len(TOKENS))
        if n > 1 and took * n / TOKENS[i - 1] > left:
            break
        if n == 1:
            made.watched(1)  # a whole pass records the products with tables
        elif not on_cpu():
            # MLX compiles a GPU's kernels when they are first needed.
            began = clock()
            made.watched(n, kinds.issubset)
            if clock() - began > COMPILE_S:
                break
        began = clock()
        until = began + left / (len(TOKENS) - i)
        seen = made.watched(n, partial(_enough, kinds, clock, until))
        head = made.head(n)
        took = seen.seconds / min(map(len, seen.layers.values()), default=1) + head
        times = {kind: median(samples) for kind, samples in seen.layers.items()}
        left -= clock() - began
        for kind, s in times.items():
            found[kind][n] = max(s - sync_s, s / 2)
        found[size.rest_kind][n] = seen.prelude + head
    progress("measuring the layers", len(TOKENS), len(TOKENS))
    return {kind: by_tokens for kind, by_tokens in found.items() if by_tokens}


def _enough(kinds: set[str], clock: Callable[[], float], until: float, layers: Seconds) -> bool:
    fewest = min(len(layers[kind]) for kind in kinds)
    return fewest >= SAMPLES or (fewest >= 1 and clock() > until)


class Rig:
    """A model that runs on random weights. Made by ``rig``.

    Attributes:
        rows: upper bound of token ids.
    """

    def __init__(self, profile: ModelProfile, clock: Callable[[], float]) -> None:
        self.profile = profile
        self.model = profile.lazy.model
        self.clock = clock
        self.rows = min((t.places[0].shape[0] for t in profile.tables if t.looked_up), default=_vocabulary(profile))
        # By table: its product function, input width and dtype, and the ratio of its rows to those kept here.
        self._products: dict[int, tuple[Callable[..., Any], int, mx.Dtype, float]] = {}
        self._pass: TimedPass | None = None
        self._enough: Callable[[Seconds], bool] = lambda _: False
        self._began = 0.0

    def watched(self, n: int, enough: Callable[[Seconds], bool] = lambda _: False) -> TimedPass:
        """Runs a pass over ``n`` tokens and times each layer by itself, until ``enough`` says so."""
        seen = self._pass = TimedPass()
        self._enough = enough
        cache, ids = make_prompt_cache(self.model), self._tokens(n)
        self._began = self.clock()
        try:
            with contextlib.suppress(_Enough):
                mx.eval(self.model(ids, cache=cache), arrays_in(cache))
        finally:
            self._pass = None
        seen.seconds = self.clock() - self._began
        return seen

    def head(self, n: int) -> float:
        """Returns seconds of all products with tables for ``n`` tokens, scaled to all their rows."""
        whole = 0.0
        for call, width, dtype, scale in self._products.values():
            x = mx.random.normal((1, n, width), key=mx.random.key(0)).astype(dtype)
            mx.eval(x)
            whole += scale * seconds_of(partial(call, x), self.clock)
        return whole

    def _tokens(self, n: int) -> mx.array:
        """Returns ``n`` token ids, distinct where the vocabulary allows: int32 (1, n)."""
        ids = (mx.arange(n, dtype=mx.int32) * 7 % self.rows)[None]
        mx.eval(ids)
        return ids

    def layer(self, kind: str) -> Callable[..., Any]:
        def call(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            seen = self._pass
            if seen is None:
                return original(*args, **kwargs)
            mx.eval(arrays_in(args, kwargs))
            began = self.clock()
            if not seen.layers:
                seen.prelude = began - self._began
            out = original(*args, **kwargs)
            mx.eval(arrays_in(out, args, kwargs))
            seen.layers[kind].append(self.clock() - began)
            if self._enough(seen.layers):
                raise _Enough
            return out

        return call

    def product(self, table: int, rows: int, all_rows: int) -> Callable[..., Any]:
        def call(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            self._products[table] = original, args[0].shape[-1], args[0].dtype, all_rows / rows
            out = original(*args, **kwargs)
            # Some models write to the logits of certain tokens.
            return out if rows == all_rows else mx.pad(out, [(0, 0)] * (out.ndim - 1) + [(0, all_rows - rows)])

        return call


@contextlib.contextmanager
def rig(profile: ModelProfile, cpu_streams: int, clock: Callable[[], float] = time.perf_counter) -> Iterator[Rig]:
    """Gives a lazily opened model random weights for the block, then restores it.

    Args:
        cpu_streams: streams that linear layers are split over on the CPU device.

    Raises:
        CalibrationError: no layers were found, or one of each kind does not fit into memory.
    """
    model = profile.lazy.model
    if not profile.layers:
        raise CalibrationError("no layers were found in this model, so none were measured")
    before = [(m, type(m), dict(m), dict(m.__dict__)) for m in model.modules()]
    with contextlib.ExitStack() as stack:
        stack.callback(clear_cache)
        stack.callback(_restore, before)
        made = Rig(profile, clock)
        if on_cpu():
            split_rows(model, cpu_streams)
        _furnish(made)
        # Wired as in a real run.
        stack.callback(limits.hold(made, Needs(wired=mx.get_active_memory())))
        yield made


def _restore(before: list[tuple[nn.Module, type, dict[str, Any], dict[str, Any]]]) -> None:
    for module, cls, items, attributes in before:
        module.__class__ = cls
        for target, was in ((module, items), (module.__dict__, attributes)):
            dict.clear(target)
            dict.update(target, was)


def _furnish(made: Rig) -> None:
    found = made.profile
    sizes = found.size.layers
    counts, bytes_of = Counter(z.kind for z in sizes), {z.kind: z.resident for z in sizes}
    copies = {k: min(counts[k], -(-PAST_CACHES // max(1, bytes_of[k]))) for k in counts}
    rows = [_rows(table) for table in found.tables]
    needed = sum(copies[k] * bytes_of[k] for k in counts)
    needed += sum(n * t.row_bytes for n, t in zip(rows, found.tables, strict=True))
    if needed > (free := max(0, last_resort())):
        raise CalibrationError(
            f"one layer of each kind takes {format_size(needed)}, of which only {format_size(free)} are free, so no "
            "layers were measured"
        )
    replaced: set[tuple[int, str]] = set()
    weights: dict[tuple[str, int], dict[str, mx.array]] = {}
    for layer, z, parts in zip(found.layers, sizes, found.parts, strict=True):
        counts[z.kind] -= 1
        copy = weights.setdefault((z.kind, counts[z.kind] % copies[z.kind]), {})
        for p, cast in zip(layer.parameters, parts.casts, strict=True):
            if p.path not in copy:
                copy[p.path] = _noise(p, p.array.shape, cast)
        put(layer.parameters, [copy[p.path] for p in layer.parameters])
        replaced |= {(id(p.module), p.key) for p in layer.parameters}
    for n, table in enumerate(found.tables):
        replaced |= {(id(p.module), p.key) for p in table.layer.parameters}
        _cut(made, n, table, rows[n])
    for path, module in made.model.named_modules():
        for key, value in module.items():
            if isinstance(value, mx.array) and (id(module), key) not in replaced:
                to = found.cast.target(f"{path}.{key}" if path else key, value.dtype)
                dict.__setitem__(module, key, value if to is None else value.astype(to))
                mx.eval(module[key])
    for layer, z in zip(found.layers, sizes, strict=True):
        swap(layer.module, "Timed", made.layer(z.kind))


def _cut(made: Rig, number: int, table: Table, rows: int) -> None:
    """Gives a table random weights for some of its rows, and records products with it."""
    module, parameters = table.layer.module, table.layer.parameters
    all_rows = table.places[0].shape[0]
    shapes = [(rows, *p.array.shape[1:]) for p in parameters]
    put(parameters, [_noise(p, shape, cast) for p, shape, cast in zip(parameters, shapes, table.casts, strict=True)])
    if "bias" in module:
        dict.__setitem__(module, "bias", module["bias"][:rows])
    product = made.product(number, rows, all_rows)
    if isinstance(module, nn.Embedding | nn.QuantizedEmbedding):
        swap(module, "Timed", lambda original, args, kwargs: original(args[0] % rows, *args[1:], **kwargs), product)
    else:
        swap(module, "Timed", product)


def _rows(table: Table) -> int:
    """Returns enough rows of a table to measure it: more than caches hold."""
    rows = table.places[0].shape[0]
    fewer = PAST_CACHES // max(1, table.row_bytes) // SLICE_STEP * SLICE_STEP
    return rows if fewer >= rows // 2 else max(SLICE_STEP, fewer)


def _vocabulary(profile: ModelProfile) -> int:
    config = profile.lazy.config
    size = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    return size if isinstance(size, int) else 128


def _noise(p: Parameter, shape: Sequence[int], cast: mx.Dtype | None) -> mx.array:
    """Returns an evaluated random array for a parameter, in its own or its cast dtype, at which no layer saturates."""
    dtype, size, key = p.array.dtype if cast is None else cast, prod(shape), mx.random.key(0)
    if p.key == "scales" and not mx.issubdtype(dtype, mx.floating):
        # Exponents of mxfp4 and mxfp8 (2**-7), and 8-bit floats of nvfp4 (1/4).
        array = mx.full(shape, 40 if getattr(p.module, "mode", "") == "nvfp4" else 120, dtype=dtype)
    else:
        if mx.issubdtype(dtype, mx.floating):
            block = mx.random.normal((min(size, BLOCK),), scale=0.02, key=key)
            # A quantized weight is up to 255 times its scale.
            block = mx.abs(block) * 0.05 if p.key == "scales" else block
        else:
            block = mx.random.randint(0, 2**31 - 1, (min(size, BLOCK),), mx.uint32, key=key)
        array = mx.tile(block.astype(dtype), -(-size // BLOCK))[:size].reshape(shape)
    mx.eval(array)
    return array


# Bytes of weights between two uses of the same one, so that weights come from memory as in a real run: more than one
# core's last-level cache (32 MiB here).
PAST_CACHES = 128 << 20

# Matrices used in turn, together past the caches; uses of each; and repeats of a single product.
PARTS, ROUNDS, REPEATS = 8, 3, 5


def seconds_of(run: Callable[[], Any], clock: Callable[[], float] = time.perf_counter, repeats: int = REPEATS) -> float:
    """Returns the median seconds until the result of ``run`` is computed."""
    times = []
    for _ in range(repeats):
        begin = clock()
        mx.eval(run())
        times.append(clock() - begin)
    return median(times)


def sync_seconds() -> float:
    """Returns the median seconds of submitting a tiny graph and waiting for it."""
    x = mx.zeros((8,))
    mx.eval(x)
    return seconds_of(lambda: (x + 1) * 2, repeats=200)


def _gbps(shape: tuple[int, ...], dtype: mx.Dtype, use: Callable[[mx.array], mx.array], made: int) -> float:
    """Returns GB/s at which ``made`` bytes are computed from each of several matrices, used in turn."""
    matrices = [mx.full(shape, 1, dtype=dtype) for _ in range(PARTS)]
    mx.eval(matrices, use(matrices[0]))  # the first use compiles it
    times = [seconds_of(lambda m=m: use(m), repeats=1) for _ in range(ROUNDS) for m in matrices]  # type: ignore[misc]
    return made / median(times) / 1e9


def product_gbps() -> float:
    """Returns GB/s of float32 weights in a product of one token, for machines without a measured model."""
    x = mx.ones((1, 4096), dtype=mx.float32)
    nbytes = PAST_CACHES // PARTS
    return _gbps((nbytes // 4096 // 4, 4096), mx.float32, lambda w: x @ w.T, nbytes)


def decode_gbps() -> float:
    """Returns GB/s of bfloat16 weights decoded from signs, mantissas and coded exponents."""
    nbytes = PAST_CACHES // PARTS
    shape = nbytes // 2 // 4096, 4096
    decoder = SplitDecoder.of(shape, np.zeros(EXPONENTS // 4 + shape[0] + 1, np.uint32))
    return _gbps(decoder.stored_shape, mx.uint8, decoder.decode, nbytes)
