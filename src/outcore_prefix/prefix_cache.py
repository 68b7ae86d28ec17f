"""The prefix cache: computed prompts are kept on disk and not computed again.

A prompt is cut into blocks of ``GRID`` tokens. With and without the prefix cache, a chunk ends where a block ends, so a
prompt that continues after a block is computed in the same passes, to the same bits. A block's name is a SHA-256 over
the name of the block before it and its tokens; the first block's name begins with everything that makes it valid. So
the longest stored prefix of a text is found by testing which files exist. There are three kinds of files: ``.kv``, a
block's keys and values; ``.state``, the caches that cannot be cut by token (recurrent states, sliding windows) as they
were after a block; ``.end``, what a whole prompt adds to its last block, with the logits of its last position, so that
the same prompt needs no pass for its first token again.

States are large (those of a 9B hybrid as much as keys and values of 1,570 tokens), so few are stored: after a prompt,
after its last block, and after the last block of the shared prefix, which other conversations with the same system
prompt begin with. Together they take at most as many bytes as the keys and values.
"""

from __future__ import annotations

import hashlib
import json
import platform
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
from mlx_lm.models.cache import KVCache, make_prompt_cache

from outcore.checkpoint.identity import identity_of, identity_of_adapter
from outcore.checkpoint.lazy_model import LazyModel
from outcore.checkpoint.packed_store import cached
from outcore.decode.prefix_cache import CAPTURED, GRID, PrefixMatch
from outcore.machine.hardware import version
from outcore.modules.cache_rollback import is_away
from outcore.modules.hooks import flat
from outcore.options import LoadOptions

from .blocks import FOLDER, Block, BlockFiles

# The most bytes of states that are stored of a prompt, for each byte of its keys and values.
STATE_SHARE = 1.0

# The most states that are stored of a prompt of a model without keys and values.
STATES_ALONE = 4

# Tokens by which mlx-lm's caches grow (``KVCache.step``), so that a restored cache has the same spare room.
STEP = 256

# A cache's state: its structure for JSON, in which numbers stand for arrays, and the arrays.
Packed = tuple[Any, list[mx.array]]

# Errors that are raised if a file does not fit the caches into which it is read.
MISFIT = (KeyError, IndexError, ValueError, TypeError, AttributeError)


class StoredPrompts:
    """A ``PrefixCache`` in files.

    Args:
        validity: texts that name everything on which computed results depend.
        make_cache: makes new caches for the model.
    """

    def __init__(self, blocks: BlockFiles, validity: Sequence[str], make_cache: Callable[[], list[Any]]) -> None:
        self.blocks = blocks
        self._begin = _digest(b"", *(part.encode() for part in (*validity, str(GRID))))
        self._make_cache = make_cache

    def salt(self, secret: str) -> None:
        self._begin = _digest(self._begin, b"salt", _digest(secret.encode("utf-8", "surrogateescape")))

    def find(self, tokens: Sequence[int], step: int = GRID, *, whole: bool = True) -> PrefixMatch | None:
        names = self._names(tokens, step)
        blocks = [f"{name}.kv" for name in names[1:-1]]
        if whole and self.blocks.has(end := f"{names[-1]}.end"):
            found = self._restored(blocks, end, len(tokens))
            if found is not None:
                return found
        # The last token is always computed, for its logits.
        there = 0
        while there < len(blocks) and self.blocks.has(blocks[there]):
            there += 1
        cut = all(map(_by_token, flat(self._make_cache())))
        for n in range(there, 0, -1):
            state = None if cut else f"{names[n]}.state"
            if state is None or self.blocks.has(state):
                found = self._restored(blocks[:n], state, n * GRID)
                if found is not None:
                    return found
        return None

    def recording(self, tokens: Sequence[int], step: int = GRID, held: int = 0, shared: int = 0) -> Recording:
        return Recording(self.blocks, self._names(tokens, step), len(tokens), held, shared)

    def like(self, cache: Sequence[Any]) -> bool:
        return _kinds(cache) == _kinds(self._make_cache())

    def keep(self, tokens: Sequence[int], cache: Sequence[Any], instead: str | None = None) -> str | None:
        # Offloaded caches are not stored, because they would have to come into memory.
        states = None if any(map(is_away, flat(cache))) else _states_of(flat(cache), by_token=True)
        if states is None:
            return None
        name = self._name_of(tokens)
        size = sum(a.nbytes for _, arrays in states.values() for a in arrays)
        if not self.blocks.has_room(size):
            return instead
        self.blocks.drop(size)
        notes = _notes(states) | {"kinds": _kinds(cache)}
        if not self.blocks.has(name) and not self.blocks.write(name, _named(states), notes):
            return instead
        if instead is not None and instead != name:
            self.blocks.remove(instead)
        return name

    def kept(self, tokens: Sequence[int], cache: list[Any]) -> str | None:
        name = self._name_of(tokens)
        block = self.blocks.read(name) if self.blocks.has(name) else None
        # A state fits only caches with the same window.
        if block is None or block.notes.get("kinds") != _kinds(cache):
            return None
        try:
            for i, c in enumerate(flat(cache)):
                _set_state(c, block, i)
        except MISFIT:
            return None
        self.blocks.touch([name])
        return name

    # Other results for prompts, such as features of images, by what they were made of.

    def has_arrays(self, key: bytes) -> bool:
        return self.blocks.has(self._name_of_arrays(key))

    def arrays(self, key: bytes) -> dict[str, mx.array] | None:
        name = self._name_of_arrays(key)
        if (block := self.blocks.read(name)) is None:
            return None
        self.blocks.touch([name])
        return block.arrays

    def keep_arrays(self, key: bytes, arrays: Mapping[str, mx.array]) -> None:
        size = sum(a.nbytes for a in arrays.values())
        if self.blocks.has_room(size):
            self.blocks.drop(size)
            self.blocks.write(self._name_of_arrays(key), arrays)

    def _name_of_arrays(self, key: bytes) -> str:
        return _digest(self._begin, b"arrays", key).hex() + ".arrays"

    def _name_of(self, tokens: Sequence[int]) -> str:
        return _digest(self._begin, b"conversation", np.asarray(tokens, np.int32).tobytes()).hex() + ".conversation"

    def _names(self, tokens: Sequence[int], step: int) -> list[str]:
        """Returns the name of each block boundary, the first for no tokens, and last the name of the whole prompt."""
        if GRID % step:
            raise ValueError(f"chunks of {step} tokens do not divide a block of {GRID}")
        ids = np.asarray(tokens, np.int32)
        # The chunk length is part of the names: another length may give other bits.
        names = [_digest(self._begin, str(step).encode())]
        for at in range(0, (len(ids) - 1) // GRID * GRID, GRID):
            names.append(_digest(names[-1], ids[at : at + GRID].tobytes()))
        names.append(_digest(names[-1], b"end", ids[(len(names) - 1) * GRID :].tobytes()))
        return [name.hex() for name in names]

    def _restored(self, blocks: Sequence[str], last: str | None, tokens: int) -> PrefixMatch | None:
        """Returns caches with the keys and values of these files and the states of ``last``; None: they cannot be read,
        or do not fit together."""
        names = [*blocks, *([] if last is None else [last])]
        parts = []
        for name in names:
            if (part := self.blocks.read(name)) is None:
                return None
            parts.append(part)
        logits = parts[-1].arrays.get("logits")
        cache = self._make_cache()
        try:
            for i, c in enumerate(flat(cache)):
                if not _by_token(c):
                    _set_state(c, parts[-1], i)
                elif any(f"{i}.k" in p.arrays for p in parts):
                    held = [p.arrays for p in parts if f"{i}.k" in p.arrays]
                    c.keys, c.values = (
                        _joined([arrays.pop(f"{i}.{which}") for arrays in held], tokens) for which in "kv"
                    )
                    mx.eval(c.keys, c.values)
                    c.offset = tokens
        except MISFIT:
            return None
        self.blocks.touch([*names[len(blocks) :], *reversed(blocks)])
        return PrefixMatch(tokens, cache, logits)


class Recording:
    """Stores a prompt while it is computed; a ``Recorder``.

    Args:
        names: names of its block boundaries and of the whole prompt, from ``StoredPrompts._names``.
        tokens: number of tokens of the prompt.
        held: how many of its first tokens were found in the prefix cache.
        shared: how many of its first tokens other prompts begin with, too.
    """

    def __init__(self, blocks: BlockFiles, names: Sequence[str], tokens: int, held: int, shared: int = 0) -> None:
        self._blocks, self._names, self._tokens, self._held = blocks, names, tokens, held
        self._states: dict[int, dict[int, Packed]] = {}
        last = (tokens - 1) // GRID
        begin = min(shared // GRID, last)
        self._shared = begin * GRID if begin * GRID > held else None
        self._wanted = {n * GRID for n in (last, begin) if n * GRID > held}

    def passed(self, tokens: int, cache: Sequence[Any]) -> None:
        if tokens not in self._wanted:
            return
        # Only references: MLX copies an array before it writes to it while others refer to it.
        if found := _states_of(flat(cache)):
            self._states[tokens] = found

    def save(self, cache: Sequence[Any], logits: mx.array | None, tokens: int | None = None) -> None:
        computed = self._tokens if tokens is None else tokens
        try:
            if logits is not None or computed // GRID > self._held // GRID:
                self._save(cache, logits, computed)
        finally:
            # With these references MLX would copy the arrays for every token.
            self._states = {}

    def _save(self, cache: Sequence[Any], logits: mx.array | None, computed: int) -> None:
        cut = {i: c for i, c in enumerate(flat(cache)) if _by_token(c) and not c.empty()}
        if any(c.offset != computed or c.keys.shape[0] != 1 for c in cut.values()):
            return  # the caches have other tokens than the prompt
        if (end := _states_of(flat(cache))) is None:
            return
        per_token = sum(a.nbytes for a in _slices(cut, 0, 1).values())
        each = sum(a.nbytes for _, arrays in end.values() for a in arrays)
        # All states together may be as large as the keys and values.
        share = int(STATE_SHARE * self._tokens * per_token)
        room = STATES_ALONE if not per_token else share // each if each else CAPTURED + 1
        last = min(computed, self._tokens - 1) // GRID
        size = (computed - self._held) * per_token + min(room, len(self._states) + 1) * each
        size += 0 if logits is None else logits.nbytes
        if not self._blocks.has_room(size):
            return  # it would take the room of all other prompts
        self._blocks.drop(size)
        for n in range(self._held // GRID + 1, last + 1):
            if not self._write(f"{self._names[n]}.kv", _slices(cut, (n - 1) * GRID, n * GRID), {}):
                return
        # First the shared prefix's state, which many prompts use, then the prompt's end, then others, the latest first.
        places = sorted([self._tokens, *sorted(self._states, reverse=True)], key=lambda place: place != self._shared)
        for place in places[:room]:
            if place != self._tokens:
                states = self._states.pop(place)
                kept = self._write(f"{self._names[place // GRID]}.state", _named(states), _notes(states))
            elif logits is not None:
                arrays = _slices(cut, last * GRID, place) | _named(end) | {"logits": logits}
                kept = self._write(f"{self._names[-1]}.end", arrays, _notes(end))
            else:
                kept = True
            if not kept:
                return
        # The end is touched first, so that it is dropped before the blocks.
        end_first = [] if logits is None else [f"{self._names[-1]}.end"]
        self._blocks.touch([*end_first, *(f"{name}.kv" for name in self._names[last:0:-1])])
        self._blocks.drop()

    def _write(self, name: str, arrays: dict[str, mx.array], notes: dict[str, str]) -> bool:
        return self._blocks.has(name) or self._blocks.write(name, arrays, notes)


def _by_token(cache: Any) -> bool:
    """Whether a cache can be cut by token and has all tokens: whether it is mlx-lm's ``KVCache``."""
    return type(cache) is KVCache


def _slices(caches: Mapping[int, Any], begin: int, end: int) -> dict[str, mx.array]:
    """Returns these caches' tokens ``begin`` to ``end``, (1, heads, tokens, features), named by cache and k or v."""
    pairs = ((f"{i}.{k}", a) for i, c in caches.items() for k, a in (("k", c.keys), ("v", c.values)))
    return {name: array[..., begin:end, :] for name, array in pairs}


def _joined(parts: Sequence[mx.array], tokens: int) -> mx.array:
    """Concatenates arrays by token, with spare room at the end. Raises ValueError if they do not have ``tokens``."""
    if sum(a.shape[2] for a in parts) != tokens:
        raise ValueError("wrong number of tokens")
    *shape, _, features = parts[0].shape
    room = [mx.zeros((*shape, -tokens % STEP, features), parts[0].dtype)] if tokens % STEP else []
    return mx.concatenate([*parts, *room], axis=2)


def _state_of(cache: Any) -> Packed:
    """Returns mlx-lm's state of a cache, with references to its arrays. Raises ``TypeError`` if it cannot be stored."""
    arrays: list[mx.array] = []

    def packed(tree: Any) -> Any:
        if isinstance(tree, mx.array):
            arrays.append(tree)
            return {"array": len(arrays) - 1}
        if isinstance(tree, tuple | list):
            return {type(tree).__name__: [packed(part) for part in tree]}
        if tree is None or isinstance(tree, bool | int | float | str):
            return tree
        raise TypeError(f"a {type(tree).__name__}")

    return packed(cache.state), arrays


def _states_of(caches: Sequence[Any], *, by_token: bool = False) -> dict[int, Packed] | None:
    """Returns by number the states of the caches that cannot be cut by token (with ``by_token`` of all); None: a
    cache's state cannot be stored."""
    try:
        return {i: _state_of(c) for i, c in enumerate(caches) if by_token or not _by_token(c)}
    except (AttributeError, TypeError):
        return None


def _set_state(cache: Any, block: Block, i: int) -> None:
    """Puts the stored state of cache number ``i`` into a new cache of the same kind."""

    def unpacked(tree: Any) -> Any:
        if not isinstance(tree, dict):
            return tree
        ((kind, inside),) = tree.items()
        if kind == "array":
            return block.arrays[f"{i}.{inside}"]
        parts = [unpacked(part) for part in inside]
        return tuple(parts) if kind == "tuple" else parts

    cache.state = unpacked(json.loads(block.notes[str(i)]))


def _named(states: Mapping[int, Packed]) -> dict[str, mx.array]:
    return {f"{i}.{n}": a for i, (_, arrays) in states.items() for n, a in enumerate(arrays)}


def _notes(states: Mapping[int, Packed]) -> dict[str, str]:
    return {str(i): json.dumps(tree) for i, (tree, _) in states.items()}


def _kinds(cache: Sequence[Any]) -> str:
    """Returns the caches' classes and bounds, as text: stored states fit only caches with the same."""
    kinds = [(type(c).__name__, getattr(c, "max_size", None), getattr(c, "keep", None)) for c in flat(cache)]
    return json.dumps(kinds)


def _digest(*parts: bytes) -> bytes:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(len(part).to_bytes(8, "little") + part)
    return whole.digest()


# Part of every file's name; changed with each version of Outcore that computes prompts differently.
FORMAT = "prompts 1"


def make(lazy: LazyModel, o: LoadOptions) -> StoredPrompts:
    validity = [
        FORMAT,
        identity_of(lazy.checkpoint),
        json.dumps(lazy.arguments["model_config"], sort_keys=True, default=repr),
        identity_of_adapter(Path(o.adapter_path)) if o.adapter_path else "",
        o.dtype or "",
        *(version("mlx"), mlx_lm.__version__),
        *_device(),
    ]
    folder = cached(FOLDER, lazy.checkpoint, validity).name.removeprefix(f"{FOLDER}-")
    # A weak reference, because the model's session refers to the prefix cache.
    model = weakref.ref(lazy.model)

    def caches() -> list[Any]:
        found: list[Any] = make_prompt_cache(model())
        return found

    most = None if isinstance(o.prefix_cache, str) else o.prefix_cache
    return StoredPrompts(BlockFiles(folder, most), validity, caches)


def _device() -> list[str]:
    """Returns what identifies the device: another device rounds differently."""
    info = mx.device_info()
    known = [str(info.get(name, "")) for name in ("device_name", "architecture")]
    return [str(mx.default_device().type), platform.machine(), *known]
