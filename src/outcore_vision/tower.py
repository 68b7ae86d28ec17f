"""Features of images: mlx-vlm's model without its language model, whose weights are read when they are needed.

Of its blocks, one is in memory at a time, while the next one is read. Images are part of prompts only, so nothing of it
stays; features are kept by the image's content.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from outcore.engine.session import Session
from outcore.errors import CheckpointError, UnsupportedModelError
from outcore.machine.allocator import clear_cache, note_held
from outcore.machine.interrupts import check
from outcore.machine.random_state import random_state_kept
from outcore.modules.layers import named_modules, named_parameters

if TYPE_CHECKING:
    from .media import Image

# What ``get_input_embeddings`` may say of a prompt with images; more means attention that is not computed here.
ROWS, POSITIONS = ("inputs_embeds", "per_layer_inputs"), ("position_ids", "rope_deltas")
DEEP = ("visual_pos_masks", "deepstack_visual_embeds")
# Arguments that only positions depend on, which are made here; the method that says whether prompts may be in chunks.
GRIDS, ASKED = ("image_grid_thw", "video_grid_thw"), "chunked_prefill_policy"
# In the answer, but read by no language model of the same type.
UNUSED = ("attention_mask_4d",)

# The most bytes of features in memory.
CACHED = 64_000_000

# Attribute of a model: its tower. Attribute of a block: the tower and its number.
TOWER, PLACE = "outcore_image_tower", "outcore_place"


class FeatureCache:
    """Features of images by digest: the latest ones in memory, as NumPy's arrays outside of the budget, which is for
    what MLX holds; and all on disk beside the prefix cache, if the model has one (``prefix``)."""

    def __init__(self, prefix: Any) -> None:
        self._prefix = prefix if hasattr(prefix, "keep_arrays") else None
        self._held: OrderedDict[bytes, dict[str, tuple[Any, mx.Dtype]]] = OrderedDict()

    def has(self, digest: bytes) -> bool:
        return digest in self._held or (self._prefix is not None and self._prefix.has_arrays(digest))

    def find(self, digest: bytes) -> dict[str, mx.array] | None:
        if (held := self._held.get(digest)) is not None:
            self._held.move_to_end(digest)
            return {name: mx.array(a).view(dtype) for name, (a, dtype) in held.items()}
        found: dict[str, mx.array] | None = None if self._prefix is None else self._prefix.arrays(digest)
        if found is not None:
            self._hold(digest, found)
        return found

    def keep(self, digest: bytes, arrays: Mapping[str, mx.array]) -> None:
        self._hold(digest, arrays)
        if self._prefix is not None:
            self._prefix.keep_arrays(digest, arrays)

    def _hold(self, digest: bytes, arrays: Mapping[str, mx.array]) -> None:
        self._held[digest] = {name: (np.array(a.view(mx.uint8)), a.dtype) for name, a in arrays.items()}
        while sum(a.nbytes for held in self._held.values() for a, _ in held.values()) > CACHED:
            self._held.popitem(last=False)


def tower_of(model: nn.Module) -> Tower:
    found = model.__dict__.get(TOWER)
    if found is None:
        found = model.__dict__[TOWER] = Tower(cast(Any, model))
    return cast(Tower, found)


class Tower:
    """What makes features of images for a ``TextModel`` that is loaded.

    Attributes:
        runs: how many images it has computed.
    """

    def __init__(self, model: Any) -> None:
        from . import text_model

        whole, config = model.__dict__[text_model.TOWER]
        if model.language_model is model or model.arch.__name__.rpartition(".")[2] in text_model.APART:
            raise UnsupportedModelError(f"{model.arch.__name__}: images of this type are not read, its text is")
        self._session: Session = model.outcore
        self._checkpoint = self._session.profile.lazy.checkpoint
        self._arch, self._config, self._whole, self._gone = model.arch, config, whole, model.__dict__[text_model.GONE]
        self.runs, self.cache = 0, FeatureCache(self._session.prefix)
        said = inspect.getsource(model.arch.Model.get_input_embeddings)
        self._layers_kept = 0  # how many blocks' outputs are kept until the last block
        path = next(path for path, module in named_modules(model) if module is model.language_model)
        _replace(whole, path, model.language_model)
        with random_state_kept():
            weights = self._weights()
            self._quantize(weights)
        whole.eval()  # without dropout
        mine = {p: a for p, a in named_parameters(whole) if p.startswith(self._gone)}
        if missing := sorted(p for p, a in mine.items() if p not in weights or weights[p].shape != a.shape):
            names = ", ".join(missing[:3])
            raise CheckpointError(f"{self._checkpoint.folder}: without the weights that images need, such as {names}")
        self._blocks = [block for blocks in _lists(whole, self._gone) for block in blocks]
        if "output_hidden_states=True" in said:
            self._layers_kept = len(self._blocks) + 1
        for n, (_, block) in enumerate(self._blocks):
            block.__class__ = _streamed(cast(Any, type(block)))
            block.__dict__[PLACE] = self, n
        self._sizes = {p: weights[p].nbytes for p in mine}
        begins = tuple(f"{path}." for path, _ in self._blocks)
        self._shapes = [tuple(weights[p].shape) for p in mine if p.startswith(begins) and weights[p].ndim > 1]
        self._loaded: dict[str, mx.array] = {}
        self._put({p: mx.zeros((0,), weights[p].dtype) for p in mine})

    def _weights(self) -> dict[str, mx.array]:
        """Returns the weights, not read yet, by the paths of their parameters."""
        from .text_model import sanitized

        found: dict[str, mx.array] = {}
        for file in self._checkpoint.files:
            found |= cast(dict[str, mx.array], mx.load(str(file)))
        made = sanitized(self._arch, self._whole, self._config, found)
        return {name: array for name, array in made.items() if name.startswith(self._gone)}

    def _quantize(self, weights: Mapping[str, mx.array]) -> None:
        how = self._session.profile.lazy.config.get("quantization")
        if how is None:
            return

        def chosen(path: str, module: nn.Module) -> bool | dict[str, Any]:
            known = path.startswith(self._gone) and f"{path}.scales" in weights
            return cast(dict[str, Any], how[path]) if known and isinstance(how.get(path), dict) else known

        nn.quantize(self._whole, how["group_size"], how["bits"], mode=how.get("mode", "affine"), class_predicate=chosen)

    # Weights

    def _put(self, arrays: Mapping[str, mx.array]) -> None:
        for path, array in arrays.items():
            *parts, name = path.split(".")
            _child(self._whole, parts)[name] = array

    def _of_block(self, n: int) -> dict[str, mx.array]:
        begin = f"{self._blocks[n][0]}."
        return {path: array for path, array in self._loaded.items() if path.startswith(begin)}

    def run_block(self, n: int, run: Any) -> Any:
        """Calls a block while its weights are in memory, and begins to read the next one's."""
        mine = self._of_block(n)
        self._put(mine)
        if n + 1 < len(self._blocks):
            mx.async_eval(list(self._of_block(n + 1).values()))
        try:
            out = run()
            mx.eval(out)
            note_held()
        finally:
            self._put({path: mx.zeros((0,), array.dtype) for path, array in mine.items()})
            for path in mine:
                self._loaded.pop(path, None)
        check()
        return out

    # Features

    def features(self, image: Image) -> dict[str, mx.array]:
        """Returns ``rows`` (places, hidden) of the prompt's embeddings, and ``deep 0`` and so on, what is added to
        them after the first layers."""
        if (cached := self.cache.find(image.digest)) is not None:
            return cached
        self._loaded = self._weights()
        blocks = tuple(f"{path}." for path, _ in self._blocks)
        rest = {path: array for path, array in self._loaded.items() if not path.startswith(blocks)}
        try:
            self._put(rest)
            self.runs += 1
            found = self._computed(image)
        finally:
            self._put({path: mx.zeros((0,), array.dtype) for path, array in rest.items()})
            self._loaded = {}
            clear_cache()
        self.cache.keep(image.digest, found)
        return found

    def _computed(self, image: Image) -> dict[str, mx.array]:
        ids = mx.array(image.ids.astype(np.int32))[None]
        inputs = (image if image.again is None else image.again()).inputs
        given = {name: _arrays(value) for name, value in inputs.items()}
        pixels = given.pop("pixel_values")
        made = self._whole.get_input_embeddings(ids, pixels, mask=mx.ones_like(ids), **given)
        said = {name: value for name, value in made.to_dict().items() if value is not None}
        if unknown := said.keys() - {*ROWS, *POSITIONS, *DEEP, *UNUSED}:
            raise self._refusal(f"they need {', '.join(sorted(unknown))}")
        self._check(given)
        places = mx.array(image.places.astype(np.int32))
        found = {"rows": said["inputs_embeds"][0, places]}
        for n, rows in enumerate(said.get("deepstack_visual_embeds", ())):
            found[f"deep {n}"] = rows
        # The other rows have to be those that texts without images have.
        others = np.setdiff1d(np.arange(ids.size), image.places).astype(np.int32)
        text = self.text_rows(ids)["inputs_embeds"][0, mx.array(others)]
        same = mx.array_equal(said["inputs_embeds"][0, mx.array(others)], text)
        mx.eval(found, same)
        if not same.item():
            raise self._refusal("they change the embeddings of text")
        return found

    def text_rows(self, ids: mx.array) -> dict[str, mx.array]:
        """Returns the arguments (1, tokens, ...) that the language model is given for a prompt without images."""
        made = self._whole.get_input_embeddings(ids, None, mask=None).to_dict()
        return {name: made[name] for name in ROWS if made.get(name) is not None}

    def _check(self, given: Mapping[str, Any]) -> None:
        """Refuses images that change more of a pass than embeddings and positions. ``given``:
        what mlx-vlm would pass on to it."""
        language = self._session.profile.lazy.model.language_model
        if any(getattr(each, "no_chunked_prefill", False) for each in (self._whole, language)):
            raise self._refusal("mlx-vlm computes their prompts in one pass")
        policies = [each.chunked_prefill_policy for each in (self._whole, language) if hasattr(each, ASKED)]
        if policies and not all(bool(policy(prefill_kwargs=dict(given))) for policy in policies):
            raise self._refusal("their tokens attend to later ones")
        code = inspect.getsource(cast(Any, inspect.getmodule(self._arch.LanguageModel)))
        code = re.sub("#.*", "", code)
        read = [name for name in given if name not in GRIDS and re.search(rf"\b{name}\b", code)]
        if read and not policies:
            raise self._refusal(f"its language model reads {', '.join(read)}")
        if hasattr(language, "get_rope_index") and GRIDS[0] not in given:
            raise self._refusal("their positions are not known")

    def _refusal(self, why: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self._arch.__name__}: images of this type are not read: {why}")

    def room(self, images: Sequence[Image], tokens: int) -> int:
        """Returns the bytes that ``features`` of these images, one after the other, and the embeddings of a prompt's
        last ``tokens`` tokens take."""
        text: Any = getattr(self._config, "text_config", self._config)
        row = 4 * int(text.hidden_size)
        deep = len(getattr(self._config.vision_config, "deepstack_visual_indexes", None) or ())
        held = 3 * tokens * row + sum(len(image.places) for image in images) * row * (2 + 2 * deep)
        new = [image for image in images if not self.cache.has(image.digest)]
        return held + max((self._run_bytes(image) for image in new), default=0)

    def _run_bytes(self, image: Image) -> int:
        """Returns the bytes that features of an image take while they are computed, beside what they are: weights that
        are not in blocks and those of three blocks, and what a block makes of the image. Attention is counted as if
        all scores were in memory at a time, as on the CPU."""
        vision: Any = self._config.vision_config
        sizes = [sum(n for p, n in self._sizes.items() if p.startswith(f"{path}.")) for path, _ in self._blocks]
        weights = sum(self._sizes.values()) - sum(sizes) + 3 * max(sizes, default=0)
        pixels = image.inputs["pixel_values"]
        arrays = [np.asarray(each) for each in (pixels if isinstance(pixels, list) else [pixels])]
        count = sum(a.size for a in arrays)
        side = getattr(vision, "patch_size", 14)
        side = max(side) if isinstance(side, list | tuple) else side
        flat = arrays[0].ndim <= 3 and arrays[0].shape[-1] % (3 * side * side) == 0  # cut into patches already
        patches = count // arrays[0].shape[-1] if flat else -(-count // (3 * side * side))
        tiles = 1 if flat else max(1, count // (3 * arrays[0].shape[-1] * arrays[0].shape[-2]))
        heads: Any = getattr(vision, "num_attention_heads", None) or getattr(vision, "num_heads", 16)
        widths = [n for shape in self._shapes for n in shape] or [1024]
        states = self._layers_kept * Counter(widths).most_common(1)[0][0]
        return weights + 8 * count + 4 * patches * (6 * max(widths) + states + (2 * heads + 1) * -(-patches // tiles))


def _arrays(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return mx.array(value)
    return [_arrays(each) for each in value] if isinstance(value, list) else value


def _child(module: Any, parts: Sequence[str]) -> Any:
    for part in parts:
        module = module[int(part)] if isinstance(module, list) else module[part]
    return module


def _replace(module: Any, path: str, other: nn.Module) -> None:
    *parts, name = path.split(".")
    _child(module, parts)[name] = other


def _lists(whole: nn.Module, inside: tuple[str, ...]) -> Iterator[list[tuple[str, nn.Module]]]:
    """Yields lists of equal modules that are not in one another, with their paths, in the order of the tree."""

    def search(path: str, value: Any) -> Iterator[list[tuple[str, nn.Module]]]:
        if isinstance(value, list):
            items = [(f"{path}.{n}", each) for n, each in enumerate(value)]
            kinds = {type(each) for each in value}
            if len(items) > 1 and len(kinds) == 1 and isinstance(value[0], nn.Module) and value[0].parameters():
                yield items
                return
        elif isinstance(value, dict):
            items = [(f"{path}.{name}" if path else name, each) for name, each in value.items()]
        else:
            return
        for there, each in items:
            if f"{there}.".startswith(inside) or any(i.startswith(f"{there}.") for i in inside):
                yield from search(there, each)

    yield from search("", whole)


@cache
def _streamed(kind: Any) -> type:
    """Returns a subclass of a block's class whose weights are in memory only while it is called."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        tower, n = self.__dict__[PLACE]
        return tower.run_block(n, lambda: super(made, self).__call__(*args, **kwargs))

    made: Any = type(kind.__name__, (kind,), {"__module__": kind.__module__, "__call__": call})
    return cast(type, made)
