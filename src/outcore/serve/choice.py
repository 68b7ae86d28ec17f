"""One choice as the engine writes it: what it was asked, and how its tokens become text."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from mlx_lm.sample_utils import make_logits_processors
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..decode.batch_engine import Request, Token
from ..decode.sampling import own_sampler
from ..errors import BudgetError, LinkError, OutcoreError, PromptError, RequestError
from ..text import one_line
from .events import Sampling, TokenLogprob
from .grammar import Grammar
from .parsing import Stopper
from .token_text import TokenTexts

log = logging.getLogger("outcore.serve")


@dataclass(frozen=True)
class ChoiceStarted:
    """A choice is under way; its first token is there.

    Attributes:
        load_s: seconds that loading the model took for it. ``queued_s``: of waiting before its prompt was computed,
            those included; ``prompt_s``: of computing it.
        found: tokens of the prompt that the prefix cache had.
    """

    load_s: float
    queued_s: float
    prompt_s: float
    found: int = 0


@dataclass(frozen=True)
class TokenEvent:
    """A token of a choice, and the text that is known since."""

    text: str
    logprob: TokenLogprob | None = None


@dataclass(frozen=True)
class ChoiceFinished:
    """A choice has ended; ``stop``: the string that ended it."""

    reason: Literal["stop", "length"]
    text: str = ""
    stop: str | None = None


Out = ChoiceStarted | TokenEvent | ChoiceFinished | Exception


@dataclass(eq=False)
class ChoiceJob:
    """A choice that is asked for.

    Attributes:
        model: whose turn it waits for.
        tell: called on the engine's thread with what becomes of it; an exception or ``ChoiceFinished`` is the last.
        max_tokens: of the answer, at least one.
        logprobs: as in ``Ask``.
        shared: as in ``Prompt``.
        asked_at: by ``time.monotonic``.
        drafted, accepted: tokens that were drafted for it, and stayed; for others to read when it is over.
        unwanted: set where nobody waits for it any more.
    """

    model: str
    tokenizer: TokenizerWrapper
    texts: TokenTexts
    tokens: tuple[int, ...]
    tell: Callable[[Out], None]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    grammar: Grammar | None = None
    logprobs: int | None = None
    keep_alive: float | None = None
    shared: int = 0
    asked_at: float = field(default_factory=time.monotonic)
    joined_at: float | None = None
    load_s: float = 0.0
    drafted: int = 0
    accepted: int = 0
    unwanted: bool = False

    def request(self, uid: int) -> Request:
        """What the engine is given; made on its thread."""
        s = self.sampling
        sampler = own_sampler(
            s.temperature,
            top_p=s.top_p,
            min_p=s.min_p,
            top_k=s.top_k,
            xtc_probability=s.xtc_probability,
            xtc_threshold=s.xtc_threshold,
            seed=s.seed,
        )
        processors = tuple(self._processors())
        return Request(
            uid, self.tokens, self.max_tokens, sampler, processors, logprobs=self.logprobs, shared=self.shared
        )

    def _processors(self) -> list[Any]:
        s = self.sampling
        options: dict[str, Any] = {}
        if s.repetition_penalty != 1 and s.repetition_context_size:
            options |= {
                "repetition_penalty": s.repetition_penalty,
                "repetition_context_size": s.repetition_context_size,
            }
        if s.presence_penalty and s.presence_context_size:
            options |= {"presence_penalty": s.presence_penalty, "presence_context_size": s.presence_context_size}
        if s.frequency_penalty and s.frequency_context_size:
            options |= {"frequency_penalty": s.frequency_penalty, "frequency_context_size": s.frequency_context_size}
        found: list[Any] = make_logits_processors(dict(s.logit_bias) or None, **options)
        return found if self.grammar is None else [*found, self.grammar.processor(len(self.tokens))]


class Writer:
    """Makes text of a choice's tokens.

    Attributes:
        tokens: so far.
    """

    def __init__(self, job: ChoiceJob) -> None:
        self.job = job
        self.tokens = 0
        self._text = job.tokenizer.detokenizer
        self._stopper = Stopper(job.stop)

    def add(self, token: Token) -> list[Out]:
        """What another token brings; ``ChoiceFinished`` is the last of it, if it ends the choice."""
        self.tokens += 1
        ends = token.token in self.job.tokenizer.eos_token_ids
        if not ends:
            self._text.add_token(token.token)
        said = [TokenEvent(self._stopper.feed(self._text.last_segment), self._logprob(token))]
        if self._stopper.found is not None:
            return [*said, ChoiceFinished("stop", stop=self._stopper.found)]
        if ends:
            return [*said, self.end("stop")]
        return [*said, self.end("length")] if self.tokens >= self.job.max_tokens else [*said]

    def end(self, reason: Literal["stop", "length"]) -> ChoiceFinished:
        """The choice ends here, with what was held back of its text."""
        self._text.finalize()
        rest = self._stopper.feed(self._text.last_segment)
        if self._stopper.found is not None:
            return ChoiceFinished("stop", rest, self._stopper.found)
        return ChoiceFinished(reason, rest + self._stopper.finish())

    def _logprob(self, token: Token) -> TokenLogprob | None:
        if token.logprob is None:
            return None
        texts, first = self.job.texts, self.tokens == 1
        top = tuple(texts.logprob(each, value, first=first) for each, value in token.top)
        return texts.logprob(token.token, token.logprob, top, first=first)


def as_request_error(error: Exception, job: ChoiceJob, alone: bool = False) -> RequestError:
    """Any error as a client is told of it; ``alone``: it is of this prompt and no other, and came after the model was
    loaded."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, LinkError):
        told = "a machine that shares the model has failed; the server's log says which"
        return RequestError(told, "internal_error", status=500)
    if isinstance(error, PromptError):
        return RequestError(one_line(error), "context_length_exceeded")
    if isinstance(error, BudgetError) and alone and job.joined_at is None:
        tokens = len(job.tokens)
        return RequestError(f"a prompt of {tokens} tokens: {one_line(error)}", "context_length_exceeded")
    if isinstance(error, BudgetError | MemoryError):
        return RequestError(one_line(error) or "no memory", "insufficient_memory", status=503)
    if not isinstance(error, OutcoreError):
        log.error("a request failed", exc_info=error)
    return RequestError(f"{type(error).__name__}: {one_line(error)}", "internal_error", status=500)
