"""What is said of a run besides its flags: nothing, unless a package's flag names a file that says something."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from ..serve.api import Defaults
    from ..serve.service import ModelService


class Preset:
    """Says nothing. ``args.preset`` is one of these, or of a subclass that a package's flag put there, whose methods
    refuse with a UsageError what does not go together.

    Attributes:
        messages: as chat templates take them; they stand before the user's first one.
        stop: texts that end an answer.
    """

    messages: Sequence[Mapping[str, str]] = ()
    stop: tuple[str, ...] = ()

    def prepare(self, tokenizer: TokenizerWrapper, *, template: bool = True, cached: bool = False) -> None:
        """Set the tokenizer's chat template.

        Args:
            template: whether one is used.
            cached: what stands before the question is in a prompt cache.
        """

    def answer_tokens(self, prompt: int, most: int) -> int:
        """Tokens of an answer at most, -1 for no limit, behind a prompt of so many."""
        return most

    def options(self) -> dict[str, Any]:
        """Arguments of ``stream_generate``."""
        return {}

    def defaults(self, defaults: Defaults) -> Defaults:
        """What a server assumes where a request says nothing."""
        return defaults

    def service(self, service: ModelService) -> ModelService:
        """A server's service."""
        return service

    def served_template(self, args: argparse.Namespace, names: Sequence[str]) -> str | None:
        """The chat template of a server's models; None: each its own."""
        given: str | None = args.chat_template
        return given
