"""A multi-token-prediction head as a module: from a token's last hidden state and the next token, the one after it.

    x = project([embedding_norm(embedding of token i + 1); hidden_norm(hidden state of token i)])
    state of token i + 1 = norm(layer(x)),   logits of token i + 2 = model's head(state)

The order and the norms are those of the sources that ``mtp_tensors`` names. The hidden state is the one that the
model's own head is given, behind the final norm: what ``Qwen3NextModel.forward`` and ``DeepseekV2Model.forward`` of
vLLM return. (Heads fed with the state before it draft fluently and are right less often; llama.cpp's pull request 24025
has numbers.) The head's own state takes its place for the tokens after, as in sglang. vLLM hands DeepSeek's on before
``shared_head.norm``; which of the two is right more often was not measured with trained weights of that family.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache

from ..errors import CheckpointError, UnsupportedModelError
from ..system.allocator import clear_cache
from ..system.device import on_cpu
from ..system.random_state import random_state_kept
from .hidden_tap import HiddenTap
from .lazy_model import LazyModel
from .mtp_tensors import MtpTensors, find_mtp, tensors_in
from .split_linear import split_rows

_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(\w+)\.weight")


class MtpHead(nn.Module):
    """The head; embeddings and what makes logits are the model's (``Shared``).

    Args:
        hidden: width of its states. ``layer``: of the model's own class.
    """

    def __init__(self, hidden: int, layer: nn.Module, eps: float) -> None:
        super().__init__()
        self.embedding_norm, self.hidden_norm, self.norm = (nn.RMSNorm(hidden, eps) for _ in range(3))
        self.project = nn.Linear(2 * hidden, hidden, bias=False)
        self.layer = layer

    def __call__(self, embedded: mx.array, states: mx.array, cache: KVCache | None = None) -> mx.array:
        """States (1, tokens, hidden) of tokens from their embeddings and the states of the tokens before them."""
        x = self.project(mx.concatenate([self.embedding_norm(embedded), self.hidden_norm(states)], axis=-1))
        mask = create_attention_mask(x, cache, return_array=True)
        out: mx.array = self.norm(self.layer(x, mask, cache))
        return out


class Shared:
    """What a head shares with its model. Not a module, so that no weights are counted twice."""

    def __init__(self, model: nn.Module) -> None:
        self.text = text_model(model)
        self.tap = HiddenTap(self.text.model.norm)

    def embedded(self, ids: mx.array) -> mx.array:
        """Embeddings (1, tokens, hidden) of ids (tokens,), looked up on disk where they lie there."""
        found: mx.array = self.text.model.embed_tokens(ids[None])
        return found

    def logits(self, states: mx.array) -> mx.array:
        """By the model's own head."""
        inner = self.text
        made: mx.array = inner.lm_head(states) if "lm_head" in inner else inner.model.embed_tokens.as_linear(states)
        return made


def text_model(model: Any) -> Any:
    """The part of a model that has ``model`` (embeddings, layers, norm) and ``args``."""
    return model.language_model if "language_model" in model else model


def has_mtp(lazy: LazyModel) -> bool:
    """Whether the model's own folder has a head for it."""
    try:
        count = len(text_model(lazy.model).model.layers)
    except AttributeError:
        return False
    return find_mtp(lazy.checkpoint.tensors, count) is not None


Target = Callable[[str, mx.Dtype], mx.Dtype | None]
"""By a parameter's path and dtype, the one to compute it in; None: as it is."""


def open_mtp(lazy: LazyModel, source: Path | None = None, target: Target = lambda *_: None) -> MtpHead | None:
    """A model's head, lazily: nothing is read. Quantized as the model is; None where there is none.

    Args:
        lazy: the model, before its layers are streamed.
        source: the folder that has the head's tensors; None: the model's own.

    Raises:
        UnsupportedModelError: there is one, and mlx-lm's classes cannot make it.
        CheckpointError, MissingFileError, HeaderError: files are not there, or damaged.
    """
    where = lazy.checkpoint.folder if source is None else source
    tensors = lazy.checkpoint.tensors if source is None else tensors_in(source)
    try:
        text = text_model(lazy.model)
        count = len(text.model.layers)
    except AttributeError:
        return None
    found = find_mtp(tensors, count)
    if found is None:
        return None
    try:
        with random_state_kept():
            return _open(lazy, text, found, target)
    except (ValueError, AttributeError, KeyError, TypeError, IndexError) as e:
        said = " ".join(str(e).split())[:300]
        raise UnsupportedModelError(f"{where}: its multi-token-prediction head cannot be made: {said}") from e


def _open(lazy: LazyModel, text: Any, found: MtpTensors, target: Target) -> MtpHead:
    at = max(i for i, layer in enumerate(text.model.layers) if not getattr(layer, "is_linear", False))
    arrays = _arrays(found)
    own = {path: arrays[info.name] for path, info in found.own.items()}
    if found.zero_centred:
        own = {path: a + 1.0 if a.ndim == 1 else a for path, a in own.items()}
    layer = _sanitized(lazy.model, at, {path: arrays[info.name] for path, info in found.layer.items()}, found)
    weights = {**own, **{f"layer.{path}": a for path, a in layer.items()}}
    kind = type(text.model.layers[at])
    head = MtpHead(text.args.hidden_size, kind(text.args, at), text.args.rms_norm_eps)
    _quantize_as_stored(head, weights, lazy.config)
    head.load_weights(list(weights.items()), strict=True)
    _quantize(head, lazy)
    head.update(tree_map_with_path(lambda path, a: _cast(a, target(path, a.dtype)), head.parameters()))
    head.eval()
    return head


def _cast(array: mx.array, to: mx.Dtype | None) -> mx.array:
    return array if to is None else array.astype(to)


def _arrays(found: MtpTensors) -> dict[str, mx.array]:
    wanted = {info.name for info in (*found.own.values(), *found.layer.values())}
    arrays: dict[str, mx.array] = {}
    for file in found.files:
        loaded: Any = mx.load(str(file))
        arrays.update({name: a for name, a in loaded.items() if name in wanted})
    if missing := wanted - arrays.keys():
        raise CheckpointError(f"{found.files[0].parent}: tensor {min(missing)} is gone; load the model again")
    return arrays


def _sanitized(model: Any, at: int, layer: Mapping[str, mx.array], found: MtpTensors) -> dict[str, mx.array]:
    """A layer's weights as mlx-lm uses them: its own ``sanitize`` is handed them as those of the model's layer ``at``.

    Qwen's shifts norms where a convolution has the original's shape; the head has none, so it is handed one.
    """
    prefix = f"model.layers.{at}."
    weights = {prefix + path: a for path, a in layer.items()}
    if found.zero_centred:
        weights["model.layers.0.linear_attn.conv1d.weight"] = mx.zeros((1, 1, 4))
    made = model.sanitize(weights) if hasattr(model, "sanitize") else weights
    made = {name.partition(prefix)[2]: a for name, a in made.items() if prefix in name}
    return _stacked(made)


def _stacked(layer: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Experts that lie one by one put together, where the model's own are not kept so and ``sanitize`` left them."""
    made = {path: a for path, a in layer.items() if not _EXPERT.fullmatch(path)}
    experts: dict[str, dict[int, mx.array]] = {}
    for path, a in layer.items():
        if match := _EXPERT.fullmatch(path):
            experts.setdefault(match[2], {})[int(match[1])] = a
    for name, each in experts.items():
        made[f"mlp.switch_mlp.{name}.weight"] = mx.stack([each[e] for e in range(len(each))])
    return made


def _quantize_as_stored(head: MtpHead, weights: Mapping[str, mx.array], config: Mapping[str, Any]) -> None:
    """Where the head was quantized when it was stored, as the config of its model says."""
    how = config.get("quantization")
    if how is not None and any(path.endswith(".scales") for path in weights):
        nn.quantize(
            head,
            how["group_size"],
            how["bits"],
            mode=how.get("mode", "affine"),
            class_predicate=lambda path, module: hasattr(module, "to_quantized") and f"{path}.scales" in weights,
        )


def _quantize(head: MtpHead, lazy: LazyModel) -> None:
    """To the model's own bits: what drafts need not be exact, and stays in memory."""
    how = lazy.config.get("quantization")
    if how is None:
        return
    group, asked = how["group_size"], getattr(lazy.model, "quant_predicate", None)

    def chosen(path: str, module: nn.Module) -> Any:
        if not hasattr(module, "to_quantized") or module.weight.shape[-1] % group:
            return False
        return asked(path, module) if callable(asked) else True

    nn.quantize(head, group, how["bits"], mode=how.get("mode", "affine"), class_predicate=chosen)


def load_mtp(head: MtpHead, cpu_streams: int) -> None:
    """Read a head, array by array: what quantizing takes beside it is one of them."""
    for _, array in tree_flatten(head.parameters()):
        mx.eval(array)
    clear_cache()
    if on_cpu():
        split_rows(head, cpu_streams)


def head_bytes(head: MtpHead) -> int:
    """Of its weights."""
    return sum(a.nbytes for _, a in tree_flatten(head.parameters()))


def kv_bytes(head: MtpHead, hidden: int, dtype: mx.Dtype) -> int:
    """Bytes of keys and values for each token of its cache. Computes nothing."""
    cache = KVCache()
    head(mx.zeros((1, 1, hidden), dtype), mx.zeros((1, 1, hidden), dtype), cache)
    return sum(a.nbytes // a.shape[2] for a in (cache.keys, cache.values) if a is not None)
