"""The prefix cache: what was computed of prompts is kept on disk, and never computed again.

A prompt is cut into blocks of ``GRID`` tokens, behind which a chunk of it ends, with the cache and without: so whoever
goes on behind a block computes what comes then in the same passes, to the same bits. A block's name is a SHA-256 over
the one before it and its tokens, and over all that makes it valid before the first; so the longest stored prefix of a
text is found by looking whether files are there. Three kinds: ``.kv``, a block's keys and values; ``.state``, what
cannot be cut by token (recurrent states, sliding windows) as it was behind a block; ``.end``, what a whole prompt adds
to its last block, with the logits of its last position: who asks the same again needs no sweep for its first token.

States are large (those of a 9B hybrid as much as 1,570 tokens of its keys and values), so there are few: behind a
prompt, behind its last block, and behind the last block of what others' texts begin with too, which is found by every
other conversation of one system prompt; where that is there already, or nothing is shared, behind a power of two of
blocks. Together they are no more than keys and values.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ..modules.away import Away
from ..modules.call_values import flat
from .blocks import Block, BlockFiles
from .cache_states import Packed, named, notes, set_state, state_of
from .kv_slices import KvBits, Pair, by_token, by_token_still, pair_of, put_together, sequences, slices

GRID = 512
"""Tokens of a block, and at most of a chunk of a prompt."""

CAPTURED = 2
"""States that are held until a prompt is computed, beside the last ones."""

STATE_SHARE = 1.0
"""Bytes of all states of a prompt at most, for each of its keys and values."""

STATES_ALONE = 4
"""Of a model without keys and values."""


@dataclass(frozen=True)
class PrefixMatch:
    """What there is of a prompt.

    Attributes:
        cache: as after ``tokens`` of its tokens.
        logits: (1, vocabulary) of its last position, where that is all of them; else None.
    """

    tokens: int
    cache: list[Any]
    logits: mx.array | None = None


class PrefixCache:
    """Prompts of one model, computed in one way.

    Args:
        validity: all that decides what tokens are computed to: parts of any kind that say themselves as text.
        make_cache: new caches for the model.
    """

    def __init__(self, blocks: BlockFiles, validity: Sequence[str], make_cache: Callable[[], list[Any]]) -> None:
        self.blocks = blocks
        self._begin = _digest(b"", *(part.encode() for part in (*validity, str(GRID))))
        self._make_cache = make_cache

    def salt(self, secret: str) -> None:
        """From now on prompts are kept and found under names that only who knows the secret comes to: whoever does not
        finds nothing of them, and sees by no answer's time what was asked."""
        self._begin = _digest(self._begin, b"salt", _digest(secret.encode("utf-8", "surrogateescape")))

    def find(
        self, tokens: Sequence[int], step: int = GRID, *, whole: bool = True, kv: KvBits | None = None
    ) -> PrefixMatch | None:
        """The longest prefix of a prompt that was kept; None: there is none.

        Args:
            step: tokens of a chunk, of which some are a block.
            whole: all of it will do, with its logits.
            kv: how keys and values are quantized; None: they are not.
        """
        names = self._names(tokens, step, kv)
        if whole and (found := self._whole(tokens, names, kv)) is not None:
            return found
        # At least the last token is computed.
        there = 0
        while there < (len(tokens) - 1) // GRID and self.blocks.has(f"{names[there + 1]}.kv"):
            there += 1
        for n in range(there, 0, -1):
            found = self._behind(n, names, len(tokens), kv)
            if found is not None:
                return found
        return None

    def recording(
        self, tokens: Sequence[int], step: int = GRID, held: int = 0, shared: int = 0, kv: KvBits | None = None
    ) -> Recording:
        """What notes a prompt while it is computed, of which so many tokens were found; with the first ``shared`` of
        them other texts begin too. ``kv`` as in ``find``."""
        will = kv is not None and kv.quantized(len(tokens), len(tokens))
        return Recording(self.blocks, self._names(tokens, step, kv), len(tokens), held, shared, quantized=will)

    def like(self, cache: Sequence[Any]) -> bool:
        """Whether somebody's caches are those that prompts are kept of: of the same kinds, with the same bounds."""
        return list(map(_kind, flat(cache))) == list(map(_kind, flat(self._make_cache())))

    def quantizes(self) -> bool:
        """Whether the caches that mlx-lm quantizes are those that can be cut by token."""
        return all(by_token(c) or not hasattr(c, "to_quantized") for c in self._make_cache())

    # Conversations

    def keep(self, tokens: Sequence[int], cache: Sequence[Any], instead: str | None = None) -> str | None:
        """Keep caches that hold these tokens, however those were computed; the name under which they are, if they are.

        Args:
            instead: of this one, which is removed. Nothing is kept of caches that lie on disk: they would have to come
                into memory for it.
        """
        if any(isinstance(c, Away) for c in flat(cache)):
            return None
        try:
            states = {i: state_of(c) for i, c in enumerate(flat(cache))}
        except (AttributeError, TypeError):  # a model's own kind of cache
            return None
        name = self._name_of(tokens)
        size = sum(a.nbytes for _, arrays in states.values() for a in arrays)
        if not self.blocks.has_room(size):
            return instead
        self.blocks.drop(size)
        said = notes(states) | {"kinds": json.dumps(list(map(_kind, flat(cache))))}
        if not self.blocks.has(name) and not self.blocks.write(name, named(states), said):
            return instead
        if instead is not None and instead != name:
            self.blocks.remove(instead)
        return name

    def kept(self, tokens: Sequence[int], cache: list[Any]) -> str | None:
        """Have new caches hold these tokens, if such were kept; the name under which they are."""
        name = self._name_of(tokens)
        block = self.blocks.read(name) if self.blocks.has(name) else None
        fresh = flat(cache)
        # A state brings the window along that it was computed with.
        if block is None or block.notes.get("kinds") != json.dumps(list(map(_kind, fresh))):
            return None
        try:
            for i, c in enumerate(fresh):
                set_state(c, block, i)
        except (KeyError, IndexError, ValueError, TypeError, AttributeError):
            return None
        self.blocks.touch([name])
        return name

    def _name_of(self, tokens: Sequence[int]) -> str:
        return _digest(self._begin, b"conversation", np.asarray(tokens, np.int32).tobytes()).hex() + ".conversation"

    def _names(self, tokens: Sequence[int], step: int, kv: KvBits | None = None) -> list[str]:
        """The name of each block boundary, the first of nothing; and of the whole prompt."""
        if GRID % step:
            raise ValueError(f"chunks of {step} tokens: a block has {GRID}")
        ids = np.asarray(tokens, np.int32)
        # Another chunk may have other bits.
        names = [_digest(self._begin, *(str(part).encode() for part in (step, kv) if part is not None))]
        for at in range(0, (len(ids) - 1) // GRID * GRID, GRID):
            names.append(_digest(names[-1], ids[at : at + GRID].tobytes()))
        names.append(_digest(names[-1], b"end", ids[(len(names) - 1) * GRID :].tobytes()))
        return [name.hex() for name in names]

    def _whole(self, tokens: Sequence[int], names: Sequence[str], kv: KvBits | None) -> PrefixMatch | None:
        if not self.blocks.has(f"{names[-1]}.end"):
            return None
        end = self.blocks.read(f"{names[-1]}.end")
        parts = self._parts(names[1:-1])
        if end is None or parts is None or "logits" not in end.arrays:
            return None
        cache = self._restored([*parts, end], end, len(tokens), len(tokens), kv)
        if cache is None:
            return None
        self.blocks.touch([f"{names[-1]}.end", *(f"{name}.kv" for name in names[-2:0:-1])])
        return PrefixMatch(len(tokens), cache, end.arrays["logits"])

    def _behind(self, n: int, names: Sequence[str], prompt: int, kv: KvBits | None) -> PrefixMatch | None:
        """The caches behind n blocks of a prompt of so many tokens."""
        state: Block | None = None
        used = [f"{name}.kv" for name in names[n:0:-1]]
        fresh = self._make_cache()
        if not all(map(by_token, flat(fresh))):
            if not self.blocks.has(f"{names[n]}.state"):
                return None
            state = self.blocks.read(f"{names[n]}.state")
            if state is None:
                return None
            used.insert(0, f"{names[n]}.state")
        parts = self._parts(names[1 : n + 1])
        cache = None if parts is None else self._restored(parts, state, n * GRID, prompt, kv)
        if cache is None:
            return None
        self.blocks.touch(used)
        return PrefixMatch(n * GRID, cache)

    def _parts(self, names: Sequence[str]) -> list[Block] | None:
        found = []
        for name in names:
            block = self.blocks.read(f"{name}.kv")
            if block is None:
                return None
            found.append(block)
        return found

    def _restored(
        self, parts: Sequence[Block], state: Block | None, tokens: int, prompt: int, kv: KvBits | None
    ) -> list[Any] | None:
        """Caches of these keys and values, and these states; None: they do not fit together."""
        cache = self._make_cache()
        kv = kv if kv is not None and kv.quantized(tokens, prompt) else None
        place = {id(c): n for n, c in enumerate(cache)}  # mlx-lm quantizes those of no list within
        try:
            for i, c in enumerate(flat(cache)):
                if by_token(c):
                    made = put_together(c, [p.arrays for p in parts], i, tokens, kv if id(c) in place else None)
                    if made is not c:
                        cache[place[id(c)]] = made
                elif state is not None:
                    set_state(c, state, i)
        except (KeyError, IndexError, ValueError, TypeError, AttributeError):
            return None
        return cache


class Recording:
    """A prompt that is being computed.

    Args:
        names: of its block boundaries and of the whole, as ``PrefixCache._names`` gives them.
        tokens: of the prompt. ``held``: those that were found. ``shared``: those that other texts begin with too.
        quantized: keys and values will have been quantized when it is computed.
    """

    def __init__(
        self,
        blocks: BlockFiles,
        names: Sequence[str],
        tokens: int,
        held: int,
        shared: int = 0,
        *,
        quantized: bool = False,
    ) -> None:
        self._blocks, self._names, self._tokens, self._held = blocks, names, tokens, held
        self._quantized = quantized
        self._plain: dict[int, Pair] = {}  # what they were before
        self._plain_to = 0
        self._states: dict[int, dict[int, Packed]] = {}
        last = (tokens - 1) // GRID
        power = 1 << (last - 1).bit_length() - 1 if last > 1 else 0
        begin = min(shared // GRID, last)
        self._shared = begin * GRID if begin * GRID > held else None
        places = dict.fromkeys(n * GRID for n in (last, begin, power) if n * GRID > held)
        self._wanted = set(list(places)[:CAPTURED])

    def passed(self, tokens: int, cache: Sequence[Any]) -> None:
        """A pass was built behind which caches hold so many tokens of the prompt, not quantized yet if they are to be.
        Nothing is evaluated."""
        if self._quantized and tokens // GRID * GRID > self._held:
            top = {id(c) for c in cache}
            held = {i: pair_of(c) for i, c in enumerate(flat(cache)) if by_token(c) and id(c) in top and not c.empty()}
            if held:
                self._plain, self._plain_to = held, tokens
        if tokens not in self._wanted:
            return
        try:
            # References: MLX copies what is written to while somebody refers to it.
            found = {i: state_of(c) for i, c in enumerate(flat(cache)) if not by_token_still(c)}
        except (AttributeError, TypeError):
            return
        if found:
            self._states[tokens] = found

    def save(self, cache: Sequence[Any], logits: mx.array) -> None:
        """Keep what was computed: ``cache`` holds the prompt, ``logits`` (1, vocabulary) are of its last position."""
        self._save_and_end(cache, logits, self._tokens)

    def save_part(self, cache: Sequence[Any], tokens: int) -> None:
        """Keep the blocks of the first so many tokens, which ``cache`` holds; nothing is kept of the rest."""
        if tokens // GRID > self._held // GRID:
            self._save_and_end(cache, None, tokens)

    def _save_and_end(self, cache: Sequence[Any], logits: mx.array | None, tokens: int) -> None:
        try:
            self._save(cache, logits, tokens)
        finally:
            # Whoever refers to an array has MLX copy it for every token.
            self._states, self._plain = {}, {}

    def _save(self, cache: Sequence[Any], logits: mx.array | None, computed: int) -> None:
        caches = flat(cache)
        plain = {i: c for i, c in enumerate(caches) if by_token_still(c)}
        now = {i: pair_of(c) for i, c in plain.items() if not c.empty()}
        if any(plain[i].offset != computed or sequences(pair) != 1 for i, pair in now.items()):
            return  # a model that gives a cache other tokens than the text's
        try:
            end = {i: state_of(c) for i, c in enumerate(caches) if i not in plain}
        except (AttributeError, TypeError):  # a model's own kind of cache
            return
        before = now | self._plain
        per_token, per_plain = (sum(a.nbytes for a in slices(pairs, 0, 1).values()) for pairs in (now, before))
        each = sum(a.nbytes for _, arrays in end.values() for a in arrays)
        # So that together they are not more than keys and values.
        share = int(STATE_SHARE * self._tokens * per_token)
        room = STATES_ALONE if not per_token else share // each if each else CAPTURED + 1
        last = min(computed, self._tokens - 1) // GRID
        were_plain = max(0, min(self._plain_to // GRID, last) * GRID - self._held)
        size = (computed - self._held - were_plain) * per_token + were_plain * per_plain
        size += min(room, len(self._states) + 1) * each + (0 if logits is None else logits.nbytes)
        if not self._blocks.has_room(size):
            return  # nor would others' prompts be left
        self._blocks.drop(size)
        for n in range(self._held // GRID + 1, last + 1):
            pairs = before if n * GRID <= self._plain_to else now
            if not self._write(f"{self._names[n]}.kv", slices(pairs, (n - 1) * GRID, n * GRID), {}):
                return
        for tokens in self._most_wanted()[:room]:
            if tokens == self._tokens:
                if logits is None:
                    continue
                arrays = slices(now, last * GRID, tokens) | named(end) | {"logits": logits}
                kept = self._write(f"{self._names[-1]}.end", arrays, notes(end))
            else:
                states = self._states.pop(tokens)
                kept = self._write(f"{self._names[tokens // GRID]}.state", named(states), notes(states))
            if not kept:
                return
        # Its end is what goes first.
        end_first = [] if logits is None else [f"{self._names[-1]}.end"]
        self._blocks.touch([*end_first, *(f"{name}.kv" for name in self._names[last:0:-1])])
        self._blocks.drop()

    def _most_wanted(self) -> list[int]:
        """The places of states, in tokens, the most wanted first: what is shared is kept once, for everybody; then the
        prompt's end, and the later ones of the others."""
        places = [self._tokens, *sorted(self._states, reverse=True)]
        return sorted(places, key=lambda tokens: tokens != self._shared)

    def _write(self, name: str, arrays: dict[str, mx.array], notes: dict[str, str]) -> bool:
        return self._blocks.has(name) or self._blocks.write(name, arrays, notes)


def _kind(cache: Any) -> tuple[Any, ...]:
    return type(cache).__name__, getattr(cache, "max_size", None), getattr(cache, "keep", None)


def _digest(*parts: bytes) -> bytes:
    """SHA-256 over parts, each with its length."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(len(part).to_bytes(8, "little") + part)
    return whole.digest()
