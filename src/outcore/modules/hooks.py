"""Replaces a model's parameters, wraps its modules' calls, and finds arrays, caches and tokens in their arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import CacheList

from ..errors import UsageError
from .layers import STREAMED, Parameter
from .mlx_lm_compat import BaseCache


def put(parameters: Sequence[Parameter], arrays: Sequence[mx.array]) -> None:
    for p, a in zip(parameters, arrays, strict=True):
        # Not setattr, because some classes guard their attributes; a module is a dictionary.
        dict.__setitem__(p.module, p.key, a)


def absent(arrays: Sequence[mx.array]) -> list[mx.array]:
    """Return an empty array of each array's dtype, for weights that are not in memory: any use raises an error."""
    return [mx.zeros((0,), dtype=a.dtype) for a in arrays]


def settle(parameters: Sequence[Parameter], stays: bool) -> None:
    """Tell modules with ``STREAMED`` that their parameters are resident from now on (``stays``) or streamed again."""
    for p in parameters:
        if hasattr(type(p.module), STREAMED):
            p.module.settle() if stays else p.module.unsettle()


Call = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class _Swapped:
    """Base class before a module's own class; makes calls of the module run ``call(original, args, kwargs)``."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call: Call = self.__dict__["_outcore_call"]
        return call(super().__call__, args, kwargs)  # type: ignore[misc]


class _SwappedTable(_Swapped):
    """The same for an embedding: also makes ``as_linear`` run ``product(original, args, kwargs)``."""

    def as_linear(self, *args: Any, **kwargs: Any) -> Any:
        product: Call = self.__dict__["_outcore_product"]
        return product(super().as_linear, args, kwargs)  # type: ignore[misc]


class _SwappedModel(_Swapped):
    """The same for a streamed model: also replaces the repr, which would show the placeholders' shapes."""

    def __repr__(self) -> str:
        kind = type(self)
        return f"<{kind.__bases__[1].__name__} of {kind.__module__}, streamed: {self.__dict__['outcore']!r}>"

    def parameters(self) -> Any:
        """Raise ``UsageError``: placeholders for weights on disk must not be saved or counted."""
        raise UsageError(
            "this model is streamed: most of its weights are on disk and not among its parameters; to save or change "
            "them load it with mlx_lm, or with enough memory for all of it"
        )

    def set_dtype(self, dtype: mx.Dtype, *_: Any) -> None:
        """Do nothing if the model was loaded with this dtype; otherwise raise ``UsageError``."""
        if dtype != self.__dict__["outcore"].profile.cast.dtype:
            raise UsageError(f"set_dtype: this model is streamed; load it with dtype={str(dtype).rpartition('.')[2]!r}")


def swap(module: nn.Module, prefix: str, call: Call, product: Call | None = None, *, whole_model: bool = False) -> None:
    """Give ``module`` a subclass of its own class that runs ``call`` in place of ``__call__``, and ``product`` in place
    of ``as_linear``.

    The object stays the same, so its path, attributes and ``isinstance`` do too; a proxy would break type checks.
    """
    cls = type(module)
    names = {"__module__": cls.__module__, "__doc__": cls.__doc__}
    mixed_in = _SwappedModel if whole_model else _Swapped if product is None else _SwappedTable
    module.__class__ = type(prefix + cls.__name__, (mixed_in, cls), names)
    module.__dict__["_outcore_call"] = call
    module.__dict__["_outcore_product"] = product


def unswap(module: nn.Module) -> None:
    cls = type(module)
    if issubclass(cls, _Swapped):
        module.__class__ = cls.__bases__[1]
        module.__dict__.pop("_outcore_call", None)
        module.__dict__.pop("_outcore_product", None)


# Where a module keeps a function that sees the outputs of its calls, also of those that another rank computes.
TAP = "_outcore_tap"


def arrays_in(*values: Any) -> list[mx.array]:
    """Return every array in ``values``: in nested sequences and dictionaries, and in attributes of caches.

    Takes a cache's arrays from its attributes: ``state`` returns slices of them, and whole buffers must be evaluated.
    """
    found: list[mx.array] = []
    seen: set[int] = set()
    # A stack instead of recursion, for speed: every layer of every pass calls this.
    ahead: list[tuple[Any, int]] = list(zip(reversed(values), repeat(5)))
    while ahead:
        value, depth = ahead.pop()
        if isinstance(value, mx.array):
            found.append(value)
        elif value is None or isinstance(value, str | int | float | nn.Module | type):
            continue
        elif depth and id(value) not in seen:
            if isinstance(value, list | tuple):
                inner: Any = value
            elif isinstance(value, dict):
                inner = value.values()
            elif hasattr(value, "__dict__") and not callable(value):
                inner = vars(value).values()
            else:
                continue
            seen.add(id(value))
            ahead += zip(reversed(inner), repeat(depth - 1))
    return found


def handle(array: mx.array) -> mx.array:
    """Return another ``mx.array`` of the same data, which does not change when ``array[...] = x`` is run.

    ``mx.array(array)`` would copy the data when it is evaluated.
    """
    return array.astype(array.dtype)


def copy_of(array: mx.array) -> mx.array:
    flat = array.reshape(-1)
    return mx.concatenate([flat[:1], flat[1:]]).reshape(array.shape) if array.size > 1 else array + 0


def handles(*values: Any) -> list[mx.array]:
    """Return a ``handle`` of every array in ``values``, because a later layer may write into an array it receives."""
    found = arrays_in(*values)
    for i, a in enumerate(found):
        found[i] = a.astype(a.dtype)  # as in ``handle``
    return found


def flat(caches: Sequence[Any]) -> list[Any]:
    return [part for c in caches for part in (flat(c.caches) if isinstance(c, CacheList) else [c])]


def caches_in(*values: Any) -> list[Any]:
    found: list[Any] = []
    for v in values:
        if isinstance(v, list | tuple):
            found += caches_in(*v)
        elif isinstance(v, dict):
            found += caches_in(*v.values())
        elif isinstance(v, CacheList):
            found += caches_in(*v.caches)
        elif isinstance(v, BaseCache):
            found.append(v)
    return found


def tokens_in(args: Any) -> int:
    """Return the number of tokens in a layer's input: the product of all dimensions but the last."""
    for x in args:
        if isinstance(x, mx.array):
            return x.size // max(x.shape[-1], 1)
    return 0


def sequences_in(args: Any) -> int:
    """Return the number of sequences in a layer's input. With one token each, MLX's CUDA kernels read the weights once
    per sequence."""
    x = next((a for a in args if isinstance(a, mx.array)), None)
    return x.shape[0] if x is not None and x.ndim > 2 else 1
