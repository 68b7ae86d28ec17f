"""Times a model's layers in memory: runs the model's own forward pass on random weights.

Layers of a kind share random weights, and tables keep only some rows, so any model fits if memory has room for one
layer of each kind. Afterwards the model is as before. Also measures the device without a model.
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

# How often each kind of layer is timed for each number of tokens, if there is time.
SAMPLES = 6

# Seconds after which no larger number of tokens is begun. If compiling the GPU kernels for a number takes longer than
# COMPILE_S seconds (24 to 62 s on an H200), that number and larger ones are not measured.
COMPUTE_S, COMPILE_S = 12.0, 20.0

# How many random numbers are drawn for a weight; a larger weight repeats them.
BLOCK = 1 << 20

Progress = Callable[[str, int, int], None]
# Seconds of each call, by kind of layer.
Seconds = dict[str, list[float]]


class _Enough(Exception):
    """Raised in a layer's call to end the forward pass, once enough layers were timed."""


@dataclass
class TimedPass:
    """Seconds of a pass: of each layer's call, before the first layer (``prelude``), and of the whole pass."""

    layers: Seconds = field(default_factory=lambda: defaultdict(list))
    prelude: float = 0.0
    seconds: float = 0.0


def times_of(
    made: Rig, sync_s: float, *, budget_s: float = COMPUTE_S, progress: Progress = lambda *_: None
) -> dict[str, dict[int, float]]:
    """Returns seconds of one pass, by kind of layer (and for the rest of the model) and number of tokens.

    Each layer is evaluated by itself.

    Args:
        sync_s: seconds of waiting for the device, which are subtracted from each layer's time.
        budget_s: most seconds, without compiling; numbers of tokens that would take longer are left out.
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
        rows: token ids are below this number.
    """

    def __init__(self, profile: ModelProfile, clock: Callable[[], float]) -> None:
        self.profile = profile
        self.model = profile.lazy.model
        self.clock = clock
        self.rows = min((t.places[0].shape[0] for t in profile.tables if t.looked_up), default=_vocabulary(profile))
        # By table: the function of its product, input width and dtype, and all its rows divided by the rows kept here.
        self._products: dict[int, tuple[Callable[..., Any], int, mx.Dtype, float]] = {}
        self._pass: TimedPass | None = None
        self._enough: Callable[[Seconds], bool] = lambda _: False
        self._began = 0.0

    def watched(self, n: int, enough: Callable[[Seconds], bool] = lambda _: False) -> TimedPass:
        """Runs a pass of ``n`` tokens and times each layer by itself; ends it early once ``enough`` returns True."""
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
        """Returns the seconds of all tables' products for ``n`` tokens, extrapolated to all rows."""
        whole = 0.0
        for call, width, dtype, scale in self._products.values():
            x = mx.random.normal((1, n, width), key=mx.random.key(0)).astype(dtype)
            mx.eval(x)
            whole += scale * seconds_of(partial(call, x), self.clock)
        return whole

    def _tokens(self, n: int) -> mx.array:
        """Returns ``n`` token ids, different if the vocabulary is large enough: int32 (1, n)."""
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
            # All logits must exist, because some models assign to those of certain tokens.
            return out if rows == all_rows else mx.pad(out, [(0, 0)] * (out.ndim - 1) + [(0, all_rows - rows)])

        return call


@contextlib.contextmanager
def rig(profile: ModelProfile, cpu_streams: int, clock: Callable[[], float] = time.perf_counter) -> Iterator[Rig]:
    """Gives a lazily opened model random weights inside the context, then restores the model.

    Args:
        cpu_streams: number of streams over which linear layers are split on the CPU.

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
        # Memory is wired as in a real run.
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
    rows = [_rows(table, len(found.tables)) for table in found.tables]
    needed = sum(copies[k] * bytes_of[k] for k in counts)
    needed += sum(n * t.row_bytes for n, t in zip(rows, found.tables, strict=True))
    if needed > (free := max(0, last_resort())):
        raise CalibrationError(
            f"no layers were measured: one layer of each kind takes {format_size(needed)}, and only "
            f"{format_size(free)} are free"
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
    """Gives a table random weights for ``rows`` of its rows, and records the products with it."""
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


def _rows(table: Table, tables: int) -> int:
    """Returns how many rows of a table, one of ``tables``, are enough to measure it: more bytes than the processor's
    caches hold, of those that are only looked up together."""
    rows = table.places[0].shape[0]
    fewer = PAST_CACHES // (1 if table.multiplied else tables) // max(1, table.row_bytes) // SLICE_STEP * SLICE_STEP
    return rows if fewer >= rows // 2 else max(SLICE_STEP, fewer)


def _vocabulary(profile: ModelProfile) -> int:
    config = profile.lazy.config
    size = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    return size if isinstance(size, int) else 128


def _noise(p: Parameter, shape: Sequence[int], cast: mx.Dtype | None) -> mx.array:
    """Returns an evaluated random array for a parameter, in its dtype or ``cast``, with which no layer saturates."""
    dtype, size, key = p.array.dtype if cast is None else cast, prod(shape), mx.random.key(0)
    if p.key == "scales" and not mx.issubdtype(dtype, mx.floating):
        # For mxfp4 and mxfp8 an exponent (2**-7), for nvfp4 an 8-bit float (1/4).
        array = mx.full(shape, 40 if getattr(p.module, "mode", "") == "nvfp4" else 120, dtype=dtype)
    elif mx.issubdtype(dtype, mx.signedinteger):
        array = mx.zeros(shape, dtype=dtype)  # numbers of rows or experts, which must exist
    else:
        if mx.issubdtype(dtype, mx.floating):
            block = mx.random.normal((min(size, BLOCK),), scale=0.02, key=key)
            # Smaller, as a quantized weight is up to 255 times its scale.
            block = mx.abs(block) * 0.05 if p.key == "scales" else block
        else:
            block = mx.random.randint(0, 2**31 - 1, (min(size, BLOCK),), mx.uint32, key=key)
        array = mx.tile(block.astype(dtype), -(-size // BLOCK))[:size].reshape(shape)
    mx.eval(array)
    return array


# Bytes of other weights that are used between two uses of a weight, so that it comes from memory as in a real run:
# more than a processor's last-level cache (32 MiB here).
PAST_CACHES = 128 << 20

# How many matrices are used in turn (together larger than the caches), how often each, and repeats of one product.
PARTS, ROUNDS, REPEATS = 8, 3, 5


def seconds_of(run: Callable[[], Any], clock: Callable[[], float] = time.perf_counter, repeats: int = REPEATS) -> float:
    """Returns the median seconds of computing the result of ``run``."""
    times = []
    for _ in range(repeats):
        begin = clock()
        mx.eval(run())
        times.append(clock() - begin)
    return median(times)


def sync_seconds() -> float:
    """Returns the median seconds of handing a tiny graph to the device and waiting for it."""
    x = mx.zeros((8,))
    mx.eval(x)
    return seconds_of(lambda: (x + 1) * 2, repeats=200)


def _gbps(shape: tuple[int, ...], dtype: mx.Dtype, use: Callable[[mx.array], mx.array], made: int) -> float:
    """Returns the GB/s at which ``use`` computes ``made`` bytes from a matrix; several matrices are used in turn."""
    matrices = [mx.full(shape, 1, dtype=dtype) for _ in range(PARTS)]
    mx.eval(matrices, use(matrices[0]))  # the first use compiles it
    times = [seconds_of(lambda m=m: use(m), repeats=1) for _ in range(ROUNDS) for m in matrices]  # type: ignore[misc]
    return made / median(times) / 1e9


def product_gbps() -> float:
    """Returns the GB/s of float32 weights in the product of one token, for machines on which no model was measured."""
    x = mx.ones((1, 4096), dtype=mx.float32)
    nbytes = PAST_CACHES // PARTS
    return _gbps((nbytes // 4096 // 4, 4096), mx.float32, lambda w: x @ w.T, nbytes)


def decode_gbps() -> float:
    """Returns the GB/s of bfloat16 weights that are decoded from a ``compact`` copy's form."""
    nbytes = PAST_CACHES // PARTS
    shape = nbytes // 2 // 4096, 4096
    decoder = SplitDecoder.of(shape, np.zeros(EXPONENTS // 4 + shape[0] + 1, np.uint32))
    return _gbps(decoder.stored_shape, mx.uint8, decoder.decode, nbytes)
