"""The interface of published drafters. Each kind is a ``BlockDrafter``, listed in ``config.KINDS``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

Config = Mapping[str, Any]

# The most layers and the longest block that a config may ask for; published drafters have at most 8 and 16.
MOST_LAYERS, MOST_ROWS = 256, 256

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class DraftedModel:
    """A model that is drafted for; None: a drafter's config does not say."""

    hidden: int | None = None
    vocabulary: int | None = None
    layers: int | None = None
    model_type: str | None = None


class Shared(Protocol):
    """The parts of the model that drafters use, in memory or read when used."""

    def embedded(self, ids: mx.array) -> mx.array:
        """Returns embeddings (1, tokens, hidden) of ids (tokens,), in the model's dtype."""

    def logits(self, states: mx.array) -> mx.array:
        """Returns the model's logits (1, tokens, vocabulary) of states of any dtype (1, tokens, hidden), which are the
        input of its output head, after the final norm."""


class DraftedText(Protocol):
    """What a drafter knows of one text. Nothing has to be evaluated in its methods."""

    @property
    def arrays(self) -> list[mx.array]:
        """Caches and all other arrays that are kept, to be evaluated after ``begin``."""

    def begin(self, states: mx.array, following: mx.array) -> None:
        """Takes in more of the text, in order; nothing is drafted then. Called at least once before ``logits``.

        Args:
            states: outputs (1, n, len(taps) * hidden) of the tapped layers for the next ``n`` tokens, in the order of
                ``taps``, in the model's dtype.
            following: int32 (n,), the token after each. The last of them is the text's last token once all is taken
                in; the model has not computed that one yet.
        """

    def logits(self, drafted: Sequence[int]) -> mx.array | None:
        """Returns logits (vocabulary,) of the model's tokens for the place after the text and the ``drafted`` tokens,
        -inf for tokens that the drafter does not know; None: it guesses no further. Called with more and more drafted
        tokens, often one more each time, until ``cut``."""

    def cut(self) -> None:
        """Forgets what was drafted: trims the caches to the text."""


class BlockDrafter(nn.Module):
    """A drafter's network, without the model's embeddings and output head. Its parameters are named as those of the
    published file are after ``renamed``.

    Attributes:
        kind: its name, for messages.
        taps: the numbers of the model's layers whose outputs it reads, from 0.
        borrows_head: it uses ``Shared.logits``, so the model's head stays in memory.
        growing: bytes of its caches for each token of a text, each with the most tokens that are kept (None: all), for
            arrays with items of two bytes.
        rows: how many tokens it guesses at once; 0: one after the other.
    """

    kind: str
    taps: tuple[int, ...]
    borrows_head: bool
    growing: tuple[tuple[int, int | None], ...]
    rows: int = 0

    @classmethod
    def claims(cls, config: Config) -> bool:
        """Returns whether a ``config.json`` is of this kind."""
        raise NotImplementedError

    @classmethod
    def made_for(cls, config: Config) -> DraftedModel:
        """Returns what the config says of the model that the drafter was made for."""
        raise NotImplementedError

    @classmethod
    def made(cls, config: Config, shapes: Shapes | None, target: DraftedModel) -> BlockDrafter:
        """Returns the network with any weights.

        Args:
            shapes: of the file's tensors, by their names after ``renamed``; tensors may be missing or more. None: there
                is only the config.
            target: the model, of which nothing is None.

        Raises:
            ValueError, KeyError, TypeError: the config cannot be understood; the message becomes part of an error.
        """
        raise NotImplementedError

    @classmethod
    def renamed(cls, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Returns the file's tensors by the names of the network's parameters. Those of no use may stay in it."""
        return weights

    def check(self) -> None:
        """Raises ``ValueError`` if a loaded weight would be used beyond an array's end."""

    def text(self, shared: Shared) -> DraftedText:
        """Returns what is known of a new text: nothing."""
        raise NotImplementedError
