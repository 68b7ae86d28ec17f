"""One choice of an answer: what is asked of the scheduler for it, and how its tokens become events."""

from __future__ import annotations

import itertools
import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, Literal

from mlx_lm.sample_utils import make_logits_processors
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, SPMStreamingDetokenizer, TokenizerWrapper

from ..decode.request import Request, Token
from ..decode.sampling import MlxLmSampler, own_sampler
from ..errors import BudgetError, LinkError, OutcoreError, PromptError, RequestError
from ..modules.mlx_lm_tokenizer import byte_decoder
from ..text import one_line
from .events import Called, Ended, Event, GenerationRequest, TextPart, TokenLogprob
from .parsing import Stopper
from .prompting import Prompt

log = logging.getLogger("outcore.serve")

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""A token of SentencePiece's for a byte that no other has."""


UIDS = itertools.count()


def request_of(uid: int, prompt: Prompt, request: GenerationRequest) -> Request:
    """What the scheduler is given for an ask that says ``max_tokens``; made on the thread that computes."""
    sampling, asked = request.sampling, vars(request.sampling)
    named = {field.name: asked[field.name] for field in fields(MlxLmSampler) if field.name in asked}
    sampler = own_sampler(sampling.temperature, seed=sampling.seed, **named)
    options: dict[str, Any] = {}
    for kind, none in (("repetition", 1), ("presence", 0), ("frequency", 0)):
        penalty, size = asked[f"{kind}_penalty"], asked[f"{kind}_context_size"]
        if penalty != none and size:
            options |= {f"{kind}_penalty": penalty, f"{kind}_context_size": size}
    processors = make_logits_processors(dict(sampling.logit_bias) or None, **options)
    if prompt.grammar is not None:
        processors.append(prompt.grammar(len(prompt.tokens)))
    return Request(
        uid, prompt.tokens, request.max_tokens or 1, sampler, tuple(processors),
        stop=prompt.stop, logprobs=request.logprobs, shared=prompt.shared,
    )  # fmt: skip


class AnswerChoice:
    """A choice that is asked for, and its answer so far.

    Args:
        index: among the choices of its answer.
        ask: with the name of the model that it waits for, the tokens that there is room for, and a seed of its own.
        tell: called on the engine's thread with the choice's events; ``Ended`` or an exception is the last.

    Attributes:
        uid: that no other has.
        asked_at: by ``time.monotonic``.
        drafted, accepted: tokens that were drafted for it, and stayed.
        tokens: so far; ``reasoning_tokens`` of those were thought.
        wanted: somebody waits for it.
        started: the scheduler has it.
    """

    def __init__(
        self, index: int, request: GenerationRequest, prompt: Prompt, tell: Callable[[Event | Exception], None]
    ) -> None:
        self.uid, self.request, self.prompt, self.tell = next(UIDS), request, prompt, tell
        self.asked_at = time.monotonic()
        self.drafted = self.accepted = self.tokens = self.reasoning_tokens = 0
        self.wanted, self.started = True, False
        self._text, self._stopper = prompt.tokenizer.detokenizer, Stopper(prompt.stop)
        self._parser = prompt.parser(index)
        self._logprobs: list[TokenLogprob] = []

    def add(self, token: Token) -> list[Event]:
        """What another token brings; ``Ended`` is the last of it, if it ends the choice."""
        self.tokens += 1
        self.reasoning_tokens += self._parser.thinking
        ends = token.token in self.prompt.tokenizer.eos_token_ids
        if not ends:
            self._text.add_token(token.token)
        if token.logprob is not None:
            top = tuple(self._told(each, value) for each, value in token.top)
            self._logprobs.append(self._told(token.token, token.logprob, top))
        said = self._said(self._parser.feed(self._stopper.feed(self._text.last_segment)))
        if ends or self._stopper.found is not None or self._parser.over:
            return [*said, *self.end("stop")]
        return [*said, *self.end("length")] if self.tokens >= (self.request.max_tokens or 1) else said

    def end(self, reason: Literal["stop", "length"]) -> list[Event]:
        """The choice ends here, with what was held back of its text."""
        self._text.finalize()
        rest = self._stopper.feed(self._text.last_segment) + self._stopper.finish()
        stop = self._stopper.found
        reason = "stop" if stop is not None else reason
        said = self._said([*self._parser.feed(rest), *self._parser.finish(reason == "length")])
        if self._logprobs:
            said.append(TextPart(self._parser.index, logprobs=tuple(self._logprobs)))
        called = self._parser.ids and reason == "stop" and stop is None
        why: Literal["stop", "length", "tool_calls"] = "tool_calls" if called else reason
        return [*said, Ended(self._parser.index, why, self.tokens, self.reasoning_tokens, stop)]

    def _said(self, pieces: Sequence[TextPart | Called]) -> list[Event]:
        """The pieces, the first text of them with the log-probabilities of the tokens since the text before."""
        found: list[Event] = []
        for piece in pieces:
            if self._logprobs and isinstance(piece, TextPart):
                piece, self._logprobs = replace(piece, logprobs=tuple(self._logprobs)), []
            found.append(piece)
        return found

    def _told(self, token: int, logprob: float, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
        """A token with its bytes; of the answer's first one as its text begins, so that all of them are the text."""
        data = token_bytes(self.prompt.tokenizer, type(self._text), token)
        trims = getattr(self._text, "trim_space", isinstance(self._text, BPEStreamingDetokenizer))
        if self.tokens == 1 and trims:
            data = data.removeprefix(b" ")
        return TokenLogprob(token, data.decode("utf-8", "replace"), data, logprob, top)


def token_bytes(tokenizer: TokenizerWrapper, kind: type, token: int) -> bytes:
    """What a token stands for, since a character may take several; none for one that the tokenizer does not have.

    Args:
        kind: of the tokenizer's detokenizer.
    """
    name = tokenizer.convert_ids_to_tokens(token)
    if name is None:
        return b""
    known = byte_decoder() if issubclass(kind, BPEStreamingDetokenizer) else {}
    if known and all(c in known for c in name):
        return bytes(known[c] for c in name)
    if issubclass(kind, SPMStreamingDetokenizer):
        byte = BYTE.fullmatch(name)
        return bytes([int(byte[1], 16)]) if byte else str(name).replace("\u2581", " ").encode()
    return str(tokenizer.decode([token])).encode()


def as_request_error(error: Exception, choice: AnswerChoice | None = None) -> RequestError:
    """Any error as a client is told of it; ``choice``: the one whose prompt it is of, and no other's."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, LinkError):
        told = "a machine that shares the model has failed; the server's log says which"
        return RequestError(told, "internal_error", status=500)
    if isinstance(error, PromptError):
        return RequestError(one_line(error), "context_length_exceeded")
    if isinstance(error, BudgetError) and choice is not None and not choice.tokens:
        tokens = len(choice.prompt.tokens)
        return RequestError(f"a prompt of {tokens} tokens: {one_line(error)}", "context_length_exceeded")
    if isinstance(error, BudgetError | MemoryError):
        return RequestError(one_line(error) or "no memory", "insufficient_memory", status=503)
    if not isinstance(error, OutcoreError):
        log.error("a request failed", exc_info=error)
    return RequestError(f"{type(error).__name__}: {one_line(error)}", "internal_error", status=500)
