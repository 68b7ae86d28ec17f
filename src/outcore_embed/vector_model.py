"""mlx-vlm's embedding and reranking models as the engine wants them: called with tokens, they return one array.

A model loses its parts for images and speech, whose weights are not read. Streaming then finds its layers in the module
tree as it does in language models. There are no caches.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_vlm.models.cache import create_causal_mask

from outcore.checkpoint.checkpoint import read_header
from outcore.errors import CheckpointError
from outcore.options import LoadOptions
from outcore.plan.model_size import ModelSize
from outcore_vision.text_model import Arguments

from .kinds import CLASSIFIERS, DENSE, FOLDER, GENERATIVE, POOLING, RERANK, read_json

# Modules that texts do not need, by their names in mlx-vlm's models.
APART = (
    "vision_tower", "embed_vision", "audio_tower", "embed_audio", "vision_model", "mlp1", "connector", "visual",
)  # fmt: skip

# Classes that change weights while loading, beside the model's own (mlx-vlm's ``encoder_loader``).
CHANGE = {"VisionModel": "vision_config", "LanguageModel": "text_config"}

# How many float masks (tokens, tokens) of a text a pass holds until its last layer, if not one; and the types whose
# masks have one row for each text.
MASKS = {"embedding_gemma2": 2, "gemma3_embedding": 2, "modernbert": 2}
ONE_ROW = {"bert", "lfm2_colbert", "lfm2_embedding", "ministral3_embedding", "xlm_roberta"}


class VectorArguments(Arguments):
    """mlx-vlm's configuration, and what files beside the checkpoint say. ``folder``: the model's; None: unknown."""

    folder: Path | None = None

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Arguments:
        folder = Path(config[FOLDER]) if FOLDER in config else None
        if folder is not None and (dense := read_json(folder / DENSE)) is not None:
            config = {**config, "embedding_dim": dense.get("out_features")}
        made = super().from_dict(config | {"num_labels": 1})
        assert isinstance(made, VectorArguments)
        made.folder = folder
        return made


class VectorModel(nn.Module):
    """Base class before mlx-vlm's ``Model``. ``arch``: mlx-vlm's module.

    A call returns vectors (texts, width), or (texts, tokens, width) where each token has one.
    """

    arch: ModuleType

    # Passes that are traced.
    outcore_traced = (16, 1)

    def __init__(self, arguments: VectorArguments) -> None:
        super().__init__(arguments.config)
        self.__dict__["outcore_opened"] = arguments
        if arguments.folder is not None and (pooling := read_json(arguments.folder / POOLING)) is not None:
            self.__dict__["pooling_config"] = pooling
        for name in APART:
            if name in self:
                setattr(self, name, None)

    def __call__(self, inputs: mx.array, cache: Any = None, mask: Any = None, types: Any = None) -> mx.array:
        language: Any = getattr(self, "language_model", None)
        if hasattr(language, "_rope_deltas"):  # of the last texts, which may have been others
            language._position_ids = language._rope_deltas = None
        more = {} if types is None else {"token_type_ids": types}
        out: Any = super().__call__(inputs, attention_mask=_mask(inputs, mask), **more)
        return out.text_embeds

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Changes weights as mlx-vlm's loader does, adds those of layers behind the pooling, and leaves out those of
        parts that are gone."""
        arguments = self.__dict__["outcore_opened"]
        config, weights = arguments.config, {**weights, **_dense(arguments.folder)}
        if hasattr(self.arch.Model, "sanitize"):
            weights = super().sanitize(weights)
        for name, part in CHANGE.items():
            made = getattr(self.arch, name, None)
            if made is not None and hasattr(made, "sanitize") and getattr(config, part, None) is not None:
                weights = made(getattr(config, part)).sanitize(weights)
        gone = tuple(f"{name}." for name in APART if name not in self)
        return {k: w for k, w in weights.items() if not k.startswith(gone)}

    def make_cache(self) -> list[Any]:
        return []

    @property
    def mask_rows(self) -> int:
        """How many numbers of masks a token holds for each token of its text."""
        kind = self.arch.__name__.rpartition(".")[2]
        return 0 if kind in ONE_ROW else MASKS.get(kind, 1)

    def outcore_sized(self, size: ModelSize, o: LoadOptions) -> ModelSize:
        """Counts masks with each token: the trace of a few takes them for something that grows with the tokens alone,
        and texts' passes share readings of the weights whatever their masks weigh. Keys and values, which look expanded
        from nothing without a cache, are a pass's own, and outputs of a layer's parts."""
        prompt = max(size.prompt, o.prefill_step_size or 0)  # texts of a pass, not parts of one
        hidden = size.hidden + 4 * self.mask_rows * size.context
        return replace(size, prompt=prompt, masked=0, hidden=hidden, token=size.token + size.expanded, expanded=0)


class Classifier(VectorModel):
    """Rates pairs of texts between 0 and 1: (texts, 1)."""

    def __call__(self, inputs: mx.array, cache: Any = None, mask: Any = None, types: Any = None) -> mx.array:
        more = {} if types is None else {"token_type_ids": types}
        out: Any = super(VectorModel, self).__call__(inputs, attention_mask=_mask(inputs, mask), **more)
        return mx.sigmoid(out.logits)


class Judge(VectorModel):
    """Rates prompts that ask for yes or no, by the probability of yes: (texts, 1).

    Attributes:
        answers: the tokens of yes and no.
    """

    def __call__(self, inputs: mx.array, cache: Any = None, mask: Any = None, types: Any = None) -> mx.array:
        language: Any = self.language_model
        inner = language.model
        hidden = inner.embed_tokens(inputs)
        attended: Any = "causal"
        if mask is not None and not bool(mx.all(mask).item()):
            valid = mask.astype(mx.bool_)
            causal = create_causal_mask(mask.shape[1])
            attended = causal[None, None] & mx.expand_dims(valid, (1, 2)) & mx.expand_dims(valid, (1, 3))
        for layer in inner.layers:
            hidden = layer(hidden, attended, None)
        hidden = inner.norm(hidden)
        last = mx.full((inputs.shape[0],), inputs.shape[1] - 1)
        if mask is not None:
            last = mask.shape[1] - mx.argmax(mask[:, ::-1], axis=1) - 1
        pooled = hidden[mx.arange(hidden.shape[0]), last]
        logits = language.lm_head(pooled) if hasattr(language, "lm_head") else inner.embed_tokens.as_linear(pooled)
        yes, no = self.__dict__.get("answers", (0, 1))
        return mx.sigmoid(logits[:, yes : yes + 1] - logits[:, no : no + 1])


def _mask(inputs: mx.array, mask: Any) -> mx.array:
    return mx.ones(inputs.shape, dtype=mx.int64) if mask is None else mask


def _dense(folder: Path | None) -> dict[str, mx.array]:
    """Returns the weights of sentence-transformers' dense layers, by mlx-vlm's names."""
    found: dict[str, mx.array] = {}
    for file in sorted(folder.glob("*_Dense/*.safetensors")) if folder is not None else ():
        read_header(file)
        loaded = mx.load(str(file))
        if not isinstance(loaded, dict):
            raise CheckpointError(f"{file}: holds no tensors")
        found |= {f"{file.parent.name}.{name}": array for name, array in loaded.items()}
    return found


@cache
def vector_classes(kind: str, task: str) -> tuple[type[VectorModel], type[VectorArguments]]:
    """Returns the classes of a model of one of mlx-vlm's folders, and of its arguments."""
    arch = importlib.import_module(f"mlx_vlm.models.{kind}")
    base, theirs = VectorModel, arch.Model
    if task == RERANK:
        base = Judge if kind in GENERATIVE else Classifier
        theirs = arch.SequenceClassificationModel if kind in CLASSIFIERS else arch.Model
    model = type("Model", (base, theirs), {"__module__": arch.Model.__module__, "arch": arch})
    return model, type("Arguments", (VectorArguments,), {"__module__": __name__, "arch": arch})
