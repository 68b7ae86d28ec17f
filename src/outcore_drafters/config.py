"""Reads a drafter's folder: which kind its config says it is, and whether it was made for a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path

from outcore.errors import CheckpointError, UnsupportedModelError, UsageError
from outcore.machine.random_state import random_state_kept
from outcore.machine.small_files import CONFIG_BYTES, parse_json, read_small
from outcore.text import one_line, shortened
from outcore_drafts.mtp.layouts import tensors_in

from .dflash import DFlash
from .dflash2 import DFlash2
from .drafter import BlockDrafter, Config, DraftedModel
from .dspark import DSpark
from .eagle3 import Eagle3

# The kinds that are known. A config is of the first one that claims it.
KINDS: tuple[type[BlockDrafter], ...] = (Eagle3, DFlash2, DSpark, DFlash)

# What is in the names of drafters' classes and types, also of kinds that are not known here.
WORDS = ("eagle", "dflash", "dspark", "specul", "medusa", "hydra", "drafter", "draftmodel", "assistant")

KEYS = ("speculators_model_type", "draft_vocab_size", "dflash_config")

GROUPS = (64, 32)

T = TypeVar("T")

# Maps a parameter's path and dtype to the dtype that it is computed in; None: its own.
ComputeDtype = Callable[[str, mx.Dtype], mx.Dtype | None]


def config_of(folder: Path) -> dict[str, Any]:
    """Returns the folder's config. Raises ``CheckpointError`` if it cannot be read."""
    path = folder / "config.json"
    try:
        found = parse_json(read_small(path, CONFIG_BYTES))
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{path}: cannot be read: {one_line(e)}") from e
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: is not a JSON object")
    return found


def is_drafter(config: Config) -> bool:
    """Returns whether a config is of a drafter, of whatever kind, not of a whole model."""
    return any(key in config for key in KEYS) or any(w in name.lower() for name in _names(config) for w in WORDS)


def kind_of(folder: Path, config: Config) -> type[BlockDrafter]:
    """Returns the drafter's kind. Raises ``UnsupportedModelError`` if it is unknown."""
    try:
        found = next((kind for kind in KINDS if kind.claims(config)), None)
    except (AttributeError, TypeError):
        found = None
    if found is None:
        names = ", ".join(_names(config)) or "its config names none"
        known = ", ".join(kind.kind for kind in KINDS)
        raise UnsupportedModelError(f"{folder}: a drafter of an unknown kind ({names}); known are {known}")
    return found


def _names(config: Config) -> list[str]:
    architectures = config.get("architectures")
    listed = architectures if isinstance(architectures, list) else []
    named = (config.get("speculators_model_type"), config.get("model_type"), *listed)
    return [name for name in named if isinstance(name, str)]


def check_target(folder: Path, kind: type[BlockDrafter], config: Config, model: DraftedModel, of: Path) -> None:
    """Raises ``UsageError`` if the drafter was made for another model than the one in the folder ``of``."""
    made_for = _understood(folder, kind, lambda: kind.made_for(config))
    for field, what in (("hidden", "states of {}"), ("vocabulary", "{} tokens"), ("layers", "{} layers")):
        theirs, ours = getattr(made_for, field), getattr(model, field)
        if theirs is not None and theirs != ours:
            wrong = f"{what.format(theirs)}; {of} has {ours}"
            raise UsageError(f"{folder}: a drafter for another model, with {wrong}; give one that was made for it")
    if made_for.model_type not in (None, model.model_type):
        raise UsageError(
            f"{folder}: a drafter for another model, of type {made_for.model_type}; {of} is of type "
            f"{model.model_type}; give one that was made for it"
        )


def open_drafter(
    folder: Path, config: Config, kind: type[BlockDrafter], model: DraftedModel, bits: int | None, compute: ComputeDtype
) -> BlockDrafter:
    """Returns the drafter, lazy: none of its weights has been read.

    Args:
        bits: quantize it to so many bits; None: leave it as it is stored.

    Raises:
        CheckpointError, MissingFileError, HeaderError: tensors are missing or damaged.
        UnsupportedModelError: the config cannot be understood.
        UsageError: it reads layers that the model does not have.
    """
    tensors = tensors_in(folder)
    arrays: dict[str, mx.array] = {}
    for file in sorted({info.file for info in tensors.values()}):
        loaded: Any = mx.load(str(file))
        arrays.update(loaded)

    def made() -> tuple[BlockDrafter, dict[str, mx.array]]:
        weights = kind.renamed(arrays)
        with random_state_kept():
            return kind.made(config, {name: a.shape for name, a in weights.items()}, model), weights

    network, weights = _understood(folder, kind, made)
    _check_layers(folder, network, model.layers or 0)
    stored: Mapping[str, Any] = config.get("quantization") or {"group_size": 64, "bits": 4}

    def quantized(path: str, module: nn.Module) -> bool:
        return hasattr(module, "to_quantized") and f"{path}.scales" in weights

    def quantize() -> None:
        how = {"mode": stored.get("mode", "affine"), "class_predicate": quantized}
        nn.quantize(network, stored["group_size"], stored["bits"], **how)

    _understood(folder, kind, quantize)
    wanted = dict(tree_flatten(network.parameters()))
    _check_tensors(folder, wanted, weights)
    network.load_weights([(name, weights[name]) for name in wanted])

    network = _as_used(network, bits, compute)
    _understood(folder, kind, lambda: _rehearse(network, model))
    return network


def sketched(
    folder: Path, config: Config, kind: type[BlockDrafter], model: DraftedModel, bits: int | None, compute: ComputeDtype
) -> BlockDrafter:
    """Returns the network that a config alone describes, with any weights, for its sizes. As ``open_drafter``."""
    with random_state_kept():
        network = _understood(folder, kind, lambda: kind.made(config, None, model))
    _check_layers(folder, network, model.layers or 0)
    inner: Config = config.get("transformer_layer_config") or config
    named = next((str(each[key]) for each in (config, inner) for key in ("dtype", "torch_dtype") if key in each), "")
    stored = {"float32": mx.float32, "float16": mx.float16}.get(named, mx.bfloat16)
    return _as_used(network, bits, lambda path, dtype: compute(path, stored) or stored)


def _as_used(network: BlockDrafter, bits: int | None, compute: ComputeDtype) -> BlockDrafter:
    """Returns the drafter in the dtype that it is computed in, and quantized if ``bits`` are given."""

    def cast(path: str, a: mx.array) -> mx.array:
        to = compute(path, a.dtype) if mx.issubdtype(a.dtype, mx.floating) else None
        return a if to is None else a.astype(to)

    network.update(tree_map_with_path(cast, network.parameters()))
    if bits is not None:
        nn.quantize(network, GROUPS[0], bits, class_predicate=lambda _, module: _quantized(module, bits))
    network.eval()
    return network


def _check_layers(folder: Path, network: BlockDrafter, layers: int) -> None:
    taps = network.taps
    if not taps or len(set(taps)) < len(taps) or not all(type(n) is int and n >= 0 for n in taps):
        raise UnsupportedModelError(
            f"{folder}: its config names the layers {shortened(str(list(taps)))}, which have no meaning"
        )
    if max(taps) >= layers:
        raise UsageError(
            f"{folder}: a drafter for another model: it reads layer {max(taps)}, and this one's last is {layers - 1}; "
            "give one that was made for it"
        )


def _check_tensors(folder: Path, wanted: Mapping[str, mx.array], weights: Mapping[str, mx.array]) -> None:
    if missing := wanted.keys() - weights.keys():
        raise CheckpointError(f"{folder}: tensor {min(missing)} is missing; download the drafter again")
    for name, a in wanted.items():
        found, floating = weights[name], mx.issubdtype(a.dtype, mx.floating)
        if found.shape != a.shape:
            raise CheckpointError(
                f"{folder}: tensor {name} has the shape {found.shape}, not {a.shape} as its config says; download the "
                "drafter again"
            )
        if floating != mx.issubdtype(found.dtype, mx.floating) or (not floating and found.dtype != a.dtype):
            raise CheckpointError(f"{folder}: tensor {name} has numbers of another kind, {found.dtype}")


class _Nothing:
    """A model's parts that are never computed."""

    def __init__(self, model: DraftedModel) -> None:
        self._hidden, self._vocabulary = model.hidden or 0, model.vocabulary or 0

    def embedded(self, ids: mx.array) -> mx.array:
        return mx.zeros((1, ids.size, self._hidden))

    def logits(self, states: mx.array) -> mx.array:
        if states.shape[-1] != self._hidden:
            raise ValueError(f"states of {states.shape[-1]} for a head of {self._hidden}")
        return mx.zeros((*states.shape[:-1], self._vocabulary))


def _rehearse(network: BlockDrafter, model: DraftedModel) -> None:
    """Drafts two tokens without computing them: MLX refuses what does not fit, and nothing is read but ``d2t``."""
    network.check()
    text = network.text(_Nothing(model))
    for tokens in (16, 1):
        text.begin(mx.zeros((1, tokens, len(network.taps) * (model.hidden or 0))), mx.zeros(tokens, mx.int32))
        for drafted in ([], [0]):
            text.logits(drafted)
        text.cut()


def _quantized(module: nn.Module, bits: int) -> bool | dict[str, int]:
    """Returns how to quantize a module; False: it stays as it is."""
    if not isinstance(module, nn.Linear):
        return False
    fitting = next((g for g in GROUPS if module.weight.shape[-1] % g == 0), None)
    return False if fitting is None else {"group_size": fitting, "bits": bits}


def _understood(folder: Path, kind: type[BlockDrafter], make: Callable[[], T]) -> T:
    try:
        return make()
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as e:
        raise UnsupportedModelError(f"{folder}: its {kind.kind} drafter cannot be made: {one_line(repr(e))}") from e
