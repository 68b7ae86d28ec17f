"""mlx-vlm's models as the engine wants them: called with tokens and caches, they return logits.

A model keeps its paths in the module tree, but loses what its language model does not need: towers, projectors, heads
for speech. Their weights are not read. Streaming then finds the layers in the tree as it does in mlx-lm's models.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import sys
from collections.abc import Callable, Collection, Iterator
from functools import cache
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from outcore.errors import UnsupportedModelError
from outcore.machine.device import on_cpu
from outcore.modules.layers import modules, named_modules
from outcore.modules.side_by_side import NOT_MERGEABLE

from .caches import as_mlx_lm, within
from .mixtures import renamed
from .switches import adapt, call_singly

# Parts that mlx-vlm's loader looks for in a configuration, and those whose classes change weights while loading.
KINDS = ("text", "vision", "perceiver", "projector", "audio")
CHANGE = {"VisionModel": "vision_config", "LanguageModel": "text_config", "AudioModel": "audio_config"}

# Of ZAYA1's attention and experts, used where images are.
ADAPTERS = "lora_linear_q", "lora_linear_k", "lora_linear_o", "lora_val_proj1", "lora_val_proj2", "lora_fc1", "lora_fc2"

# How paths of modules end that text does not need, in language models; or in models that are their own language model.
APART = {
    "ernie4_5_moe_vl": (".mlp.gate_1", ".mlp.switch_mlp_1"),
    "molmo_point": ("vision_model", "connector", "build_vit_embedding", "point_predictor"),
    "phi3_v": ("model.vision_embed_tokens",),
    "zaya1_vl": tuple(f".{of}" for of in ADAPTERS),
}

# Models whose language model cannot make positions itself: it lacks what images would need.
POSITIONED = (".minicpmo",)

# Models whose language model scales embeddings that it is given, but not those that it looks up itself. mlx-vlm's
# ``generate`` gives a prompt's and then calls with tokens, so only its prompts are right: mlx-lm scales all.
GIVEN = (".granite", ".granitemoe", ".minicpm", ".minicpm3")

# How modules of models ask MLX to compute hidden states at once that are computed anyway, and by which function.
HINTS = {"async_eval": "async_eval", "mx.eval(h)": "eval"}

# Models whose layers ask other layers' caches for their keys and values.
ASKED = (".afm7", ".gemma3n")

# Models whose rows of several lengths differ from the same texts alone, in mlx-vlm's own shared caches, too: they place
# a shorter row's tokens, masks or blocks as the longest one's.
APART_IN_BATCHES = (
    "deepseek_vl_v2", "hunyuan_vl", "jina_vlm", "limite", "llada2_moe", "minimax_m3", "mllama", "paligemma",
)  # fmt: skip
NOT_MERGEABLE.update(APART_IN_BATCHES)

# Modules that compile a choice of the best k for all lengths.
PARTED = ".hy_v4.indexer"

# Attributes outside of the module tree: all of the model and its configuration, until its weights are sanitized; and
# how the names of weights that it does not need begin.
WHOLE, GONE = "outcore_whole", "outcore_gone"

# Attribute: what is left of that model once weights are sanitized, and the configuration, for images.
TOWER = "outcore_tower"


class TextModel(nn.Module):
    """Base class before mlx-vlm's ``Model``, whose ``language_model`` does the work. ``arch``: mlx-vlm's module."""

    arch: ModuleType

    # Passes that are traced: mlx-vlm computes up to eight tokens otherwise than more, or one.
    outcore_traced = (16, 3, 1)

    def __init__(self, arguments: Arguments) -> None:
        super().__init__(arguments.config)
        if not isinstance(getattr(self, "language_model", None), nn.Module):
            raise UnsupportedModelError(f"{self.arch.__name__}: no language model that writes token by token")
        if "decoder_input_ids" in inspect.signature(type(self.language_model).__call__).parameters:
            raise UnsupportedModelError(f"{self.arch.__name__}: needs all of its input encoded before it writes")
        self.__dict__[WHOLE] = self.arch.Model(arguments.config), arguments.config
        if hasattr(self.language_model, "_batch_invariant_decode"):
            # It goes through the layers' parts without calling the layers.
            self.language_model.__dict__["_batch_invariant_decode"] = None
        gone = [] if self.language_model is self else list(_prune(self, self.language_model))
        gone += _removed(self, APART.get(self.arch.__name__.rpartition(".")[2], ()))
        self.__dict__[GONE] = tuple(gone)

    def __call__(self, inputs: mx.array, cache: Any = None, **kwargs: Any) -> mx.array:
        language: Any = self.language_model
        if hasattr(language, "_rope_deltas"):
            # mlx-vlm keeps the positions of the last prompt, which may have been another text's.
            (sequences, tokens), told = inputs.shape, self.arch.__name__.endswith(POSITIONED)
            language._position_ids = mx.broadcast_to(mx.arange(tokens), (3, sequences, tokens)) if told else None
            language._rope_deltas = kwargs.pop("rope_deltas", mx.zeros((sequences, 1), mx.int32))
        if self.arch.__name__.endswith(GIVEN):
            kwargs["inputs_embeds"] = language.model.embed_tokens(inputs)
        run = super().__call__ if language is self else language
        with within(cache, self.arch.__name__.endswith(ASKED)):
            return run(inputs, cache=cache, **kwargs).logits

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Changes weights as mlx-vlm's loader does, and leaves out those of parts that are gone."""
        whole, config = self.__dict__[TOWER] = self.__dict__.pop(WHOLE)
        weights = sanitized(self.arch, whole, config, weights)
        return {k: w for k, w in weights.items() if not k.startswith(self.__dict__[GONE])}

    def load_weights(self, file_or_weights: Any, strict: bool = True) -> nn.Module:
        adapt(self)  # quantizing has replaced modules before
        return super().load_weights(renamed(self, file_or_weights), strict)

    @property
    def cast_predicate(self) -> Any:
        """Says by name which weights get another dtype."""
        try:
            return getattr(super(), "cast_predicate", lambda _: True)
        except TypeError:  # glm_moe_dsa's calls a property of the class that has these
            return lambda name: "e_score_correction_bias" not in name

    @property
    def layers(self) -> Any:
        language: Any = self.language_model
        return getattr(super() if language is self else language, "layers")  # noqa: B009

    @property
    def make_cache(self) -> Callable[[], list[Any]]:
        """Makes a model's own caches. Those that have none lack this, so they get what ``max_kv_size`` says."""
        language: Any = self.language_model
        make = getattr(super() if language is self else language, "make_cache", None)
        if make is None:
            raise AttributeError("make_cache")

        def made() -> list[Any]:
            return [as_mlx_lm(each) for each in make()]

        return made


def sanitized(arch: ModuleType, whole: Any, config: Any, weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Returns a whole model's weights as mlx-vlm's loader changes them."""
    weights = whole.sanitize(weights) if hasattr(whole, "sanitize") else weights
    for name, part in CHANGE.items():
        made = getattr(arch, name, None)
        if made is not None and hasattr(made, "sanitize") and hasattr(config, part):
            weights = made(getattr(config, part)).sanitize(weights)
    return weights


class Arguments:
    """The arguments of a ``TextModel``: mlx-vlm's configuration, made as its loader makes it."""

    arch: ModuleType

    def __init__(self, config: Any) -> None:
        self.config = config

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Arguments:
        said = copy.deepcopy(config)
        said.setdefault("text_config", said.pop("llm_config", {}))
        said.setdefault("vision_config", {})
        said.setdefault("audio_config", {})
        found = cls.arch.ModelConfig.from_dict(said)
        for kind in KINDS:
            name = f"{kind}_config"
            if hasattr(found, name) and said.get(name) is not None:
                setattr(found, name, getattr(cls.arch, f"{kind.title()}Config").from_dict(said[name]))
        for key in ("quantization", "quantization_config"):
            if "quantization" in config and getattr(found, key, None) is not None:
                config[key] = getattr(found, key)  # mlx-lm's loader looks there
        return cls(found)


class NoHints:
    """MLX for modules of models, without ``hints`` to compute: weights may not have been read yet. On the CPU nothing
    is compiled for all lengths: ``argpartition`` would part each text where the first one's length says."""

    def __init__(self, module: ModuleType, hints: Collection[str]) -> None:
        self._module, self._hints = module, hints

    def __getattr__(self, name: str) -> Any:
        return (lambda *_: None) if name in self._hints else getattr(self._module, name)

    def compile(self, function: Any, **options: Any) -> Any:
        """Returns a function as it is on the CPU."""
        return function if on_cpu() else mx.compile(function, **options)


@cache
def text_classes(folder: str) -> tuple[type[TextModel], type[Arguments]]:
    """Returns the classes for the text of one of mlx-vlm's model folders.

    Raises:
        UnsupportedModelError: it has no model of that form.
    """
    arch = importlib.import_module(f"mlx_vlm.models.{folder}")
    if not hasattr(arch, "Model") or not hasattr(arch, "ModelConfig"):
        raise UnsupportedModelError(f"{arch.__name__}: no language model")
    _without_hints()
    call_singly()
    model = type("Model", (TextModel, arch.Model), {"__module__": arch.Model.__module__, "arch": arch})
    return model, type("Arguments", (Arguments,), {"__module__": __name__, "arch": arch})


def _without_hints() -> None:
    """Gives ``NoHints`` to the modules of mlx-vlm's models that hint, of those that are imported by now."""
    models = [m for name, m in list(sys.modules.items()) if name.startswith("mlx_vlm.models.")]
    for module in models:
        source = inspect.getsource(module) if getattr(module, "mx", None) is mx else ""
        hints = {name for hint, name in HINTS.items() if hint in source}
        if hints or module.__name__.endswith(PARTED):
            vars(module)["mx"] = NoHints(mx, hints)


def _prune(model: nn.Module, wanted: nn.Module, path: str = "") -> Iterator[str]:
    """Removes modules that do not lead to the ``wanted`` one; yields how the names of their weights begin."""
    for name, child in list(model.items()):
        inside = _modules_in(child)
        if child is wanted or not inside:
            continue
        if isinstance(child, nn.Module) and any(m is wanted for m in inside):
            yield from _prune(child, wanted, f"{path}{name}.")
        else:
            dict.pop(model, name)
            yield f"{path}{name}."


def _removed(model: nn.Module, ends: tuple[str, ...]) -> Iterator[str]:
    """Removes modules whose paths end so; yields how the names of their weights begin."""
    for path, module in named_modules(model):
        for name, child in list(module.items()):
            here = f"{path}.{name}" if path else name
            if here.endswith(ends) and _modules_in(child):
                dict.pop(module, name)
                yield f"{here}."


def _modules_in(value: Any) -> list[nn.Module]:
    if isinstance(value, nn.Module):
        return modules(value)
    inside = value if isinstance(value, list) else value.values() if isinstance(value, dict) else ()
    return [m for each in inside for m in _modules_in(each)]
