"""What single tokens stand for: text, and bytes, since a character may take several tokens."""

from __future__ import annotations

import re

from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, SPMStreamingDetokenizer, TokenizerWrapper

from ..modules.mlx_lm_compat import byte_decoder
from .events import TokenLogprob

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""A token of SentencePiece's for a byte that no other has."""


class TokenTexts:
    """The texts of a tokenizer's tokens.

    Attributes:
        trims: a space that an answer begins with is no part of its text (mlx-lm's detokenizers leave it out).
    """

    def __init__(self, tokenizer: TokenizerWrapper) -> None:
        self._tokenizer = tokenizer
        detokenizer = tokenizer.detokenizer
        kind = type(detokenizer)
        self.trims = bool(getattr(detokenizer, "trim_space", issubclass(kind, BPEStreamingDetokenizer)))
        self._pieces = issubclass(kind, SPMStreamingDetokenizer)
        self._bytes = byte_decoder() if issubclass(kind, BPEStreamingDetokenizer) else {}

    def data(self, token: int) -> bytes:
        """Its bytes; none for a token that the tokenizer does not have."""
        name = self._tokenizer.convert_ids_to_tokens(token)
        if name is None:
            return b""
        if self._bytes and all(c in self._bytes for c in name):
            return bytes(self._bytes[c] for c in name)
        if self._pieces:
            if byte := BYTE.fullmatch(name):
                return bytes([int(byte[1], 16)])
            return str(name).replace("\u2581", " ").encode()
        return str(self._tokenizer.decode([token])).encode()

    def logprob(
        self, token: int, logprob: float, top: tuple[TokenLogprob, ...] = (), *, first: bool = False
    ) -> TokenLogprob:
        """A token with its text; of an answer's ``first`` one as that text begins, so that all of them are the text."""
        data = self.data(token)
        if first and self.trims:
            data = data.removeprefix(b" ")
        return TokenLogprob(token, data.decode("utf-8", "replace"), data, logprob, top)
