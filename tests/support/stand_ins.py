"""Stand-ins for random models: a tokenizer that has no text, and a source that knows what will come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from outcore.decode.speculative.proposers import Guess, Proposer


class TokensOnly(TokenizerWrapper):
    """As much of a tokenizer as generating tokens takes."""

    bos_token = None
    eos_token_ids = frozenset[int]()
    last_segment = text = ""

    def __init__(self) -> None: ...

    @property
    def detokenizer(self) -> Any:
        return self

    def add_token(self, token: int) -> None: ...

    def finalize(self) -> None: ...

    def decode(self, *_: Any, **__: Any) -> str:
        return ""


class Oracle:
    """Guesses the text that will come, but for every n-th token."""

    name = "oracle"
    cheaper: Proposer | None = None

    def __init__(self, text: Sequence[int], wrong: int = 3) -> None:
        self.text, self.wrong = list(text), wrong
        self.at = 0

    def begin(self, text: Sequence[int]) -> None:
        self.at = len(text)

    def guess(self, drafted: Sequence[int]) -> Guess | None:
        at = self.at + len(drafted)
        if at >= len(self.text):
            return None
        token = self.text[at]
        if at % self.wrong == 0:
            token = token - 1 if token else 1
        return Guess(token, (self.name, 0))
