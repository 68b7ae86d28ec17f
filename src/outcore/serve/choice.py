"""One choice of an answer: what is asked of the engine, and how its tokens become events."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from mlx_lm.sample_utils import make_logits_processors
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, SPMStreamingDetokenizer, TokenizerWrapper

from ..decode.request import Request, Token
from ..decode.sampling import own_sampler
from ..errors import BudgetError, LinkError, OutcoreError, PromptError, RequestError
from ..modules.mlx_lm_tokenizer import byte_decoder
from ..text import one_line
from .events import Called, Ended, Event, GenerationRequest, Sampling, TextPart, TokenLogprob
from .parsing import Stopper
from .prompting import Prompt

log = logging.getLogger("outcore.serve")

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""A token of SentencePiece's for a byte that no other has."""


@dataclass(eq=False)
class ChoiceJob:
    """A choice that is asked for.

    Attributes:
        model: whose turn it waits for.
        index: among the choices of its request.
        tell: called on the engine's thread with the choice's events; ``Ended`` or an exception is the last.
        max_tokens: of the answer, at least one.
        asked_at: by ``time.monotonic``; ``joined_at``: when its first token was there.
        load_s: seconds that loading the model took for it.
        drafted, accepted: tokens that were drafted for it, and stayed.
        unwanted: nobody waits for it any more.
    """

    model: str
    index: int
    ask: GenerationRequest
    prompt: Prompt
    tokenizer: TokenizerWrapper
    tell: Callable[[Event | Exception], None]
    max_tokens: int
    asked_at: float = field(default_factory=time.monotonic)
    joined_at: float | None = None
    load_s: float = 0.0
    drafted: int = 0
    accepted: int = 0
    unwanted: bool = False


def request_of(uid: int, prompt: Prompt, sampling: Sampling, max_tokens: int, logprobs: int | None = None) -> Request:
    """What the scheduler is given for a prompt; made on the thread that computes."""
    names = ("top_p", "min_p", "top_k", "xtc_probability", "xtc_threshold", "seed")
    sampler = own_sampler(sampling.temperature, **{name: getattr(sampling, name) for name in names})
    options: dict[str, Any] = {}
    for kind, none in (("repetition", 1), ("presence", 0), ("frequency", 0)):
        penalty, size = getattr(sampling, f"{kind}_penalty"), getattr(sampling, f"{kind}_context_size")
        if penalty != none and size:
            options |= {f"{kind}_penalty": penalty, f"{kind}_context_size": size}
    processors = make_logits_processors(dict(sampling.logit_bias) or None, **options)
    if prompt.grammar is not None:
        processors.append(prompt.grammar.processor(len(prompt.tokens)))
    return Request(uid, prompt.tokens, max_tokens, sampler, tuple(processors), logprobs=logprobs, shared=prompt.shared)


class Writer:
    """Makes events of a choice's tokens.

    Attributes:
        tokens: so far; ``reasoning_tokens`` of those were thought.
    """

    def __init__(self, job: ChoiceJob) -> None:
        self.job = job
        self.tokens = self.reasoning_tokens = 0
        self._text = job.tokenizer.detokenizer
        self._stopper, self._parser = Stopper(job.prompt.stop), job.prompt.parser(job.index)
        self._called = False
        self._logprobs: list[TokenLogprob] = []

    def add(self, token: Token) -> list[Event]:
        """What another token brings; ``Ended`` is the last of it, if it ends the choice."""
        self.tokens += 1
        self.reasoning_tokens += self._parser.thinking
        ends = token.token in self.job.tokenizer.eos_token_ids
        if not ends:
            self._text.add_token(token.token)
        if token.logprob is not None:
            top = tuple(self._told(each, value) for each, value in token.top)
            self._logprobs.append(self._told(token.token, token.logprob, top))
        said = self._said(self._parser.feed(self._stopper.feed(self._text.last_segment)))
        if ends or self._stopper.found is not None or self._parser.over:
            return [*said, *self.end("stop")]
        return [*said, *self.end("length")] if self.tokens >= self.job.max_tokens else said

    def end(self, reason: Literal["stop", "length"]) -> list[Event]:
        """The choice ends here, with what was held back of its text."""
        self._text.finalize()
        rest = self._stopper.feed(self._text.last_segment)
        rest += self._stopper.finish() if self._stopper.found is None else ""
        reason = reason if self._stopper.found is None else "stop"
        said = self._said([*self._parser.feed(rest), *self._parser.finish(reason == "length")])
        if self._logprobs:
            said.append(TextPart(self.job.index, logprobs=tuple(self._logprobs)))
        called = self._called and reason == "stop" and self._stopper.found is None
        end = Ended(self.job.index, reason, self.tokens, self.reasoning_tokens, self._stopper.found)
        return [*said, replace(end, reason="tool_calls") if called else end]

    def _said(self, pieces: Sequence[TextPart | Called]) -> list[Event]:
        """The pieces, the first text of them with the log-probabilities of the tokens since the text before."""
        found: list[Event] = []
        for piece in pieces:
            if isinstance(piece, Called):
                self._called = True
            elif self._logprobs:
                piece, self._logprobs = replace(piece, logprobs=tuple(self._logprobs)), []
            found.append(piece)
        return found

    def _told(self, token: int, logprob: float, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
        """A token with its bytes; of the answer's first one as its text begins, so that all of them are the text."""
        data = token_bytes(self.job.tokenizer, type(self._text), token)
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


def as_request_error(error: Exception, job: ChoiceJob | None = None, alone: bool = False) -> RequestError:
    """Any error as a client is told of it; ``alone``: it is of this prompt and no other, and came after the model was
    loaded."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, LinkError):
        told = "a machine that shares the model has failed; the server's log says which"
        return RequestError(told, "internal_error", status=500)
    if isinstance(error, PromptError):
        return RequestError(one_line(error), "context_length_exceeded")
    if isinstance(error, BudgetError) and alone and job is not None and job.joined_at is None:
        tokens = len(job.prompt.tokens)
        return RequestError(f"a prompt of {tokens} tokens: {one_line(error)}", "context_length_exceeded")
    if isinstance(error, BudgetError | MemoryError):
        return RequestError(one_line(error) or "no memory", "insufficient_memory", status=503)
    if not isinstance(error, OutcoreError):
        log.error("a request failed", exc_info=error)
    return RequestError(f"{type(error).__name__}: {one_line(error)}", "internal_error", status=500)
