"""A model that runs without its weights: all layers of a kind share random ones, and tables lose most of their rows.

The model's own forward pass runs on them, so every architecture that can be rehearsed can be measured, in memory for
one layer of each kind. The model is left as it was.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import prod
from statistics import median
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from ..engine.model_profile import ModelProfile
from ..engine.vocabulary import SLICE_STEP, Table
from ..errors import CalibrationError
from ..machine.allocator import Needs, clear_cache, limits
from ..machine.device import on_cpu
from ..machine.memory import last_resort
from ..modules.hooks import arrays_in, put, swap
from ..modules.layers import Parameter
from ..modules.split_linear import split_rows
from ..sizes import format_size

PAST_CACHES = 128 << 20
"""Bytes. So much weight lies between two uses of the same one, if the model has as much: more than a processor's last
level of cache holds for one core (32 MiB here), so that weights come from memory as they do in a run."""

REPEATS, BLOCK = 5, 1 << 20
"""Times that a product is timed; and random numbers that are drawn for a weight."""


class _Enough(Exception):
    """Breaks off a forward pass of which enough has been seen."""


@dataclass
class TimedPass:
    """What one forward pass has shown, evaluated layer by layer. Seconds.

    Attributes:
        layers: of each call, by kind of layer.
        prelude: before the first layer.
        seconds: of all of it.
    """

    layers: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    prelude: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True)
class _Product:
    """A product with a table, as the model calls it; ``scale``: rows that the table has over those that it has here."""

    call: Callable[..., Any]
    width: int
    dtype: mx.Dtype
    scale: float


class Rig:
    """A model that runs on random weights. Made by ``rig``.

    Attributes:
        rows: token ids must be less.
    """

    def __init__(self, profile: ModelProfile, clock: Callable[[], float]) -> None:
        self.profile = profile
        self.model = profile.lazy.model
        self.clock = clock
        self.rows = min((t.places[0].shape[0] for t in profile.tables if t.looked_up), default=_vocabulary(profile))
        self._products: dict[int, _Product] = {}
        self._pass: TimedPass | None = None
        self._enough: Callable[[dict[str, list[float]]], bool] = lambda _: False
        self._began = 0.0

    def tokens(self, n: int) -> mx.array:
        """``n`` token ids, all different where the vocabulary allows: int32 (1, n)."""
        return (mx.arange(n, dtype=mx.int32) * 7 % self.rows)[None]

    def watched(self, n: int, enough: Callable[[dict[str, list[float]]], bool] = lambda _: False) -> TimedPass:
        """A pass over ``n`` tokens, each layer evaluated and timed by itself, until there is ``enough`` of its layers'
        seconds by kind."""
        seen = self._pass = TimedPass()
        self._enough = enough
        cache = make_prompt_cache(self.model)
        ids = self.tokens(n)
        mx.eval(ids)
        self._began = self.clock()
        try:
            with contextlib.suppress(_Enough):
                mx.eval(self.model(ids, cache=cache), arrays_in(cache))
        finally:
            self._pass = None
        seen.seconds = self.clock() - self._began
        return seen

    def decode(self, prefill: int, steps: int) -> list[float]:
        """Seconds of each token after ``prefill`` others, nothing evaluated in between, as mlx-lm generates."""
        cache = make_prompt_cache(self.model)

        def step(ids: mx.array) -> mx.array:
            return mx.argmax(self.model(ids, cache=cache)[:, -1], axis=-1)[None] % self.rows

        token = step(self.tokens(prefill))
        mx.eval(token, arrays_in(cache))
        # Each step is queued while the one before is computed.
        token = step(token)
        mx.async_eval(token)
        times = []
        for _ in range(steps):
            began = self.clock()
            following = step(token)
            mx.async_eval(following)
            mx.eval(token)
            times.append(self.clock() - began)
            token = following
        mx.eval(token)
        return times

    def head(self, n: int) -> tuple[float, float]:
        """Seconds of all products with tables for ``n`` tokens, as if they had all their rows; and with those that they
        have."""
        whole = computed = 0.0
        for product in self._products.values():
            x = mx.random.normal((1, n, product.width), key=mx.random.key(0)).astype(product.dtype)
            mx.eval(x)
            seconds = seconds_of(partial(product.call, x), self.clock)
            whole, computed = whole + product.scale * seconds, computed + seconds
        return whole, computed

    # What layers' and tables' calls go through

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
            self._products[table] = _Product(original, args[0].shape[-1], args[0].dtype, all_rows / rows)
            out = original(*args, **kwargs)
            # Some models write to the logits of certain tokens.
            return out if rows == all_rows else mx.pad(out, [(0, 0)] * (out.ndim - 1) + [(0, all_rows - rows)])

        return call


@contextmanager
def rig(profile: ModelProfile, cpu_streams: int, clock: Callable[[], float] = time.perf_counter) -> Iterator[Rig]:
    """Give a lazily opened model random weights, and take them away again.

    Args:
        cpu_streams: streams that linear layers are split over on the CPU device.

    Raises:
        CalibrationError: no layers were found, or one of each kind does not fit into memory.
    """
    model = profile.lazy.model
    if not profile.layers:
        raise CalibrationError("no layers were found in this model, so none were measured")
    before = [(m, type(m), dict(m), dict(m.__dict__)) for m in model.modules()]
    wired = None
    try:
        made = Rig(profile, clock)
        if on_cpu():
            split_rows(model, cpu_streams)
        _furnish(made)
        # As weights are while a model runs.
        wired = limits.hold(made, Needs(wired=mx.get_active_memory()))
        yield made
    finally:
        if wired is not None:
            wired()
        for module, cls, items, attributes in before:
            module.__class__ = cls
            dict.clear(module)
            dict.update(module, items)
            module.__dict__.clear()
            module.__dict__.update(attributes)
        clear_cache()


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
    """Give a table random weights for some of its rows, and have products with it known."""
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
    """Rows of a table that are enough to measure it by: more than caches hold."""
    rows = table.places[0].shape[0]
    fewer = PAST_CACHES // max(1, table.row_bytes) // SLICE_STEP * SLICE_STEP
    return rows if fewer >= rows // 2 else max(SLICE_STEP, fewer)


def _vocabulary(profile: ModelProfile) -> int:
    text = profile.lazy.config.get("text_config")
    size = profile.lazy.config.get("vocab_size") or (text or {}).get("vocab_size")
    return size if isinstance(size, int) else 128


def _noise(p: Parameter, shape: Sequence[int], cast: mx.Dtype | None) -> mx.array:
    """An evaluated array in the parameter's place, of its dtype or the one that it is cast to: random weights at which
    no layer saturates. What is larger than a block repeats it."""
    dtype, size, key = p.array.dtype if cast is None else cast, prod(shape), mx.random.key(0)
    if p.key == "scales" and not mx.issubdtype(dtype, mx.floating):
        # Exponents of mxfp4 and mxfp8 (2**-7), and 8-bit floats of nvfp4 (1/4).
        array = mx.full(shape, 40 if getattr(p.module, "mode", "") == "nvfp4" else 120, dtype=dtype)
    else:
        block = mx.random.randint(0, 2**31 - 1, (min(size, BLOCK),), mx.uint32, key=key)
        if mx.issubdtype(dtype, mx.floating):
            block = mx.random.normal((min(size, BLOCK),), scale=0.02, key=key)
            # A quantized weight is up to 255 times its scale.
            block = mx.abs(block) * 0.05 if p.key == "scales" else block
        array = mx.tile(block.astype(dtype), -(-size // BLOCK))[:size].reshape(shape)
    mx.eval(array)
    return array


def seconds_of(run: Callable[[], Any], clock: Callable[[], float], repeats: int = REPEATS) -> float:
    """Median seconds until what ``run`` returns has been computed."""
    times = []
    for _ in range(repeats):
        begin = clock()
        mx.eval(run())
        times.append(clock() - begin)
    return median(times)
