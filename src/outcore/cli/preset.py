"""Settings of a run that no flag has. The default is none; a package's flag can bring them, as Modelfiles do."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from ..serve.api import Defaults
    from ..serve.service import ModelService


class Preset:
    """The empty preset. A package's flag may set ``args.preset`` to a subclass, whose methods raise UsageError for
    flags that contradict it.

    Attributes:
        messages: put before the user's first message, in the form that chat templates take.
        stop: strings that end an answer.
    """

    messages: Sequence[Mapping[str, str]] = ()
    stop: tuple[str, ...] = ()

    def prepare(self, tokenizer: TokenizerWrapper, *, template: bool = True, cached: bool = False) -> None:
        """Sets the tokenizer's chat template.

        Args:
            template: whether the command applies a chat template.
            cached: whether a prompt cache holds what the template writes before the question.
        """

    def answer_tokens(self, prompt: int, most: int) -> int:
        """Returns the most tokens of an answer (-1 for no limit) to ``prompt`` tokens; ``most`` is the flag's limit."""
        return most

    def options(self) -> dict[str, Any]:
        return {}

    def defaults(self, defaults: Defaults) -> Defaults:
        return defaults

    def service(self, service: ModelService) -> ModelService:
        """Returns the service that a server uses, which may wrap the given one."""
        return service

    def served_template(self, args: argparse.Namespace, names: Sequence[str]) -> str | None:
        """Returns the chat template for a server's models; None for each model's own."""
        given: str | None = args.chat_template
        return given
