"""A multi-token-prediction head: from a token's last hidden state and the next token, it predicts the token after that.

    x = project([embedding_norm(embedding of token i + 1); hidden_norm(hidden state of token i)])
    state of token i + 1 = norm(layer(x)),   logits of token i + 2 = model's head(state)

The order and the norms are those of the sources named in ``layouts``. The hidden state is the input of the model's own
head, after the final norm: what ``Qwen3NextModel.forward`` and ``DeepseekV2Model.forward`` of vLLM return. (Heads that
get the state before that norm draft fluently and are right less often; numbers: llama.cpp's pull request 24025.) For
further tokens the head gets its own state instead, as in sglang. vLLM takes DeepSeek's before ``shared_head.norm``;
which of the two is right more often was not measured with trained weights of that family.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import CacheList, KVCache

from outcore.checkpoint.lazy_model import LazyModel
from outcore.errors import CheckpointError, UnsupportedModelError
from outcore.machine.random_state import random_state_kept
from outcore.text import one_line

from .hidden_states import HiddenTap
from .layouts import (
    QWEN,
    Cache,
    HeadLayer,
    MtpTensors,
    attending,
    find_mtp,
    leaves,
    tensors_in,
    unknown_mtp,
)

_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(\w+)\.weight")


class MtpHead(nn.Module):
    """The head without embeddings and output head, which are the model's (``SharedParts``).

    Args:
        hidden: width of the hidden states.
        made: the head's layer.
    """

    def __init__(self, hidden: int, made: HeadLayer, eps: float) -> None:
        super().__init__()
        self.embedding_norm, self.hidden_norm, self.norm = (nn.RMSNorm(hidden, eps) for _ in range(3))
        self.project = nn.Linear(2 * hidden, hidden, bias=False)
        self.layer, self.caches = made.module, made.caches

    def make_cache(self) -> Cache:
        return KVCache() if self.caches == 1 else CacheList(*(KVCache() for _ in range(self.caches)))

    def __call__(self, embedded: mx.array, states: mx.array, cache: Cache | None = None) -> mx.array:
        """Returns states (1, tokens, hidden), from the tokens' embeddings and the states of the tokens before them."""
        both = [self.embedding_norm(embedded), self.hidden_norm(states)]
        x = self.project(mx.concatenate(both, axis=-1))
        first = cache[0] if isinstance(cache, CacheList) else cache
        mask = create_attention_mask(x, first, return_array=True)
        out: mx.array = self.norm(self.layer(x, mask, cache))
        return out


class SharedParts:
    """The parts of the model that a head uses. Not a module, so that no weights are counted twice."""

    def __init__(self, model: nn.Module) -> None:
        self.text = text_model(model)
        inner = trunk(self.text)
        self._table, self.tap = inner.embed_tokens, HiddenTap(inner.norm)

    def embedded(self, ids: mx.array) -> mx.array:
        """Returns embeddings (1, tokens, hidden) of ids (tokens,). Rows of a table on disk are read from there."""
        found: mx.array = self._table(ids[None])
        return found

    def logits(self, states: mx.array) -> mx.array:
        made: mx.array = self.text.lm_head(states) if "lm_head" in self.text else self._table.as_linear(states)
        return made


def text_model(model: Any) -> Any:
    """Returns the part of a model that has ``args`` and the trunk: the language model if there are other parts."""
    return model.language_model if "language_model" in model else model


def trunk(text: Any) -> Any:
    """Returns the module with embeddings, layers and the final norm, without the output head."""
    return text.model


def has_mtp(lazy: LazyModel) -> bool:
    try:
        count = len(trunk(text_model(lazy.model)).layers)
    except AttributeError:
        return False
    return find_mtp(lazy.checkpoint.tensors, count) is not None


# Maps a parameter's path and dtype to the dtype that it is computed in; None: its own.
ComputeDtype = Callable[[str, mx.Dtype], mx.Dtype | None]


def open_mtp(
    lazy: LazyModel, source: Path | None = None, compute_dtype: ComputeDtype = lambda *_: None
) -> MtpHead | None:
    """Returns a model's head, lazy, and quantized as the model is; None if there is none.

    Args:
        lazy: the model, before its layers are streamed.
        source: the folder with the head's tensors; None: the model's own folder.

    Raises:
        UnsupportedModelError: the head's layout is unknown, or mlx-lm's classes cannot make it.
        CheckpointError, MissingFileError, HeaderError: files are missing or damaged.
    """
    where = lazy.checkpoint.folder if source is None else source
    tensors = lazy.checkpoint.tensors if source is None else tensors_in(source)
    try:
        text = text_model(lazy.model)
        layers = trunk(text).layers
    except AttributeError:
        return None
    found = find_mtp(tensors, len(layers))
    if found is None:
        if (name := unknown_mtp(tensors)) is not None:
            raise UnsupportedModelError(f"{where}: a multi-token-prediction head of an unknown layout ({name})")
        return None
    try:
        with random_state_kept():
            return _open(lazy, text, found, compute_dtype)
    except (ValueError, AttributeError, KeyError, TypeError, IndexError) as e:
        raise UnsupportedModelError(f"{where}: its multi-token-prediction head cannot be made: {one_line(e)}") from e


def _open(lazy: LazyModel, text: Any, found: MtpTensors, compute_dtype: ComputeDtype) -> MtpHead:
    layers = trunk(text).layers
    made = found.make_layer(text, layers)
    own, inside = _arrays(found)
    # Qwen's original checkpoints store norm weights minus one; mlx-lm's conversion adds it.
    shifted = found.layout is QWEN and not found.converted
    if shifted:
        own = {path: a + 1.0 if a.ndim == 1 else a for path, a in own.items()}
    weights = {**own, **{f"layer.{path}": a for path, a in _sanitized(lazy.model, inside, shifted).items()}}
    head = MtpHead(text.args.hidden_size, made, text.args.rms_norm_eps)
    how, asked = lazy.config.get("quantization"), getattr(lazy.model, "quant_predicate", None)

    def chosen(path: str, module: nn.Module) -> Any:
        if how is None or not hasattr(module, "to_quantized") or module.weight.shape[-1] % how["group_size"]:
            return False
        return asked(path, module) if callable(asked) else True

    # First as the head is stored, then to the model's bits, to save memory: drafts need not be exact.
    _quantize(head, how, lambda path, module: hasattr(module, "to_quantized") and f"{path}.scales" in weights)
    head.load_weights(list(weights.items()), strict=True)
    _quantize(head, how, chosen)

    def cast(path: str, a: mx.array) -> mx.array:
        to = compute_dtype(path, a.dtype)
        return a if to is None else a.astype(to)

    head.update(tree_map_with_path(cast, head.parameters()))
    head.eval()
    return head


def _quantize(head: MtpHead, how: Mapping[str, Any] | None, which: Callable[[str, nn.Module], Any]) -> None:
    if how is not None:
        nn.quantize(head, how["group_size"], how["bits"], mode=how.get("mode", "affine"), class_predicate=which)


def _arrays(found: MtpTensors) -> tuple[dict[str, mx.array], dict[str, mx.array]]:
    arrays: dict[str, mx.array] = {}
    infos = (*found.own.values(), *found.layer.values())
    for file in sorted({info.file for info in infos}):
        loaded: Any = mx.load(str(file))
        arrays.update(loaded)
    if missing := {info.name for info in infos} - arrays.keys():
        raise CheckpointError(f"{infos[0].file.parent}: tensor {min(missing)} is gone; load the model again")
    own, inside = ({path: arrays[t.name] for path, t in part.items()} for part in (found.own, found.layer))
    return own, inside


def _sanitized(model: Any, inside: Mapping[str, mx.array], shifted: bool) -> dict[str, mx.array]:
    """Returns the weights of the head's layer after ``sanitize``, which takes it for the model's last attention layer.

    Qwen's shifts norms if it finds a convolution of the original's shape, so it gets one.
    """
    prefix = f"model.layers.{attending(trunk(text_model(model)).layers)}."
    weights = {prefix + path: a for path, a in inside.items()}
    if shifted:
        weights["model.layers.0.linear_attn.conv1d.weight"] = mx.zeros((1, 1, 4))
    made = model.sanitize(weights) if hasattr(model, "sanitize") else weights
    return _stacked({name.partition(prefix)[2]: a for name, a in made.items() if prefix in name})


def _stacked(layer: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Stacks the weights of experts that are still one tensor for each expert after ``sanitize``."""
    made: dict[str, mx.array] = {}
    experts: dict[str, dict[int, mx.array]] = defaultdict(dict)
    for path, a in layer.items():
        if match := _EXPERT.fullmatch(path):
            experts[match[2]][int(match[1])] = a
        else:
            made[path] = a
    for name, each in experts.items():
        made[f"mlp.switch_mlp.{name}.weight"] = mx.stack([each[e] for e in range(len(each))])
    return made


def kv_bytes(head: MtpHead, hidden: int, dtype: mx.Dtype) -> int:
    """Returns the bytes of keys and values per token of the head's cache; builds a graph and computes nothing."""
    cache = head.make_cache()
    head(mx.zeros((1, 1, hidden), dtype), mx.zeros((1, 1, hidden), dtype), cache)
    held = [a for leaf in leaves(cache) for a in (leaf.keys, leaf.values) if a is not None]
    return sum(a.nbytes // a.shape[2] for a in held)
